//! The CUDA runtime against a driver that is not there, is too old, runs out of memory, refuses, or loses its
//! device, and against the driver's rules of use: on a stand-in (`tests/support/fake_cuda/`), since no GPU fails on
//! demand. Each case is a process of its own: a driver is loaded once.

use std::sync::Arc;

use crate::support::fake_driver::{Cases, some_kernel};
use tandem::Error;
use tandem::device::built::MODULES;
use tandem::device::cuda::{self, CudaOptions};
use tandem::device::{Buffer, DevPtr, Lane, Launch, Runtime};

const CASES: Cases = Cases::of(module_path!());

#[test]
fn works_within_the_rules() {
    let Some(text) = CASES.run("works", &[]) else { return };
    // Two direct launches, and two replays of the two that were recorded.
    assert!(text.contains("fake driver: 6 launches"), "{text}");
}

#[test]
fn every_target_loads() {
    for sm in ["75", "80", "89", "90", "120"] {
        CASES.run("loads", &[("FAKE_SM", sm)]);
    }
}

#[test]
fn no_devices() {
    CASES.says("open", &[("FAKE_DEVICES", "0")], &["`device` cuda:0", "no GPU is visible"]);
    CASES.says("open 3", &[("FAKE_DEVICES", "2")], &["`device` cuda:3: no such device", "cuda:0 to cuda:1"]);
    CASES.says(
        "open",
        &[("FAKE_FAIL", "cuInit:100")],
        &["`device` cuda: the CUDA driver finds no GPU", "`device` cpu"],
    );
    CASES.says("open", &[("FAKE_FAIL", "cuInit:803")], &["does not start", "kernel module"]);
}

/// What the stand-in said of each module that it loaded, in order.
fn loads(case: &str, env: &[(&str, &str)]) -> Option<Vec<String>> {
    let text = CASES.run(case, env)?;
    let said = text.lines().filter_map(|l| l.strip_prefix("fake driver: "));
    Some(said.filter(|l| l.starts_with("loads") || l.starts_with("compiles")).map(str::to_owned).collect())
}

#[test]
fn machine_code_is_taken_for_the_gpu_or_an_older_one_of_its_family() {
    for (sm, code) in [("75", "75"), ("80", "80"), ("86", "86"), ("87", "86"), ("89", "89"), ("90", "90")] {
        let Some(loaded) = loads("loads", &[("FAKE_SM", sm)]) else { return };
        assert_eq!(loaded, [format!("loads machine code for {code}")], "{sm}");
    }
}

#[test]
fn a_gpu_newer_than_all_machine_code_compiles_the_newest_ptx() {
    for sm in ["100", "120"] {
        let Some(loaded) = loads("loads", &[("FAKE_SM", sm)]) else { return };
        assert_eq!(loaded.len(), 1, "{loaded:?}");
        assert!(["compiles PTX for 80", "compiles PTX for 90"].contains(&loaded[0].as_str()), "{loaded:?}");
    }
}

/// A T4's path on a newer GPU: machine code for a T4 does not run there.
#[test]
fn an_older_gpus_path_is_compiled_for_a_newer_family() {
    let Some(loaded) = loads("pretend 75", &[("FAKE_SM", "90")]) else { return };
    assert_eq!(loaded, ["compiles PTX for 75"]);
}

/// One sentence says so, and the driver is not offered machine code again.
#[test]
fn refused_machine_code_falls_back_to_ptx() {
    for code in ["209", "200"] {
        let fail = format!("cuModuleLoadDataEx:{code}");
        let Some(text) = CASES.run("preload", &[("FAKE_SM", "86"), ("FAKE_FAIL", &fail)]) else { return };
        let notes = text.lines().filter(|l| l.contains("refuses this program's machine code for 86")).count();
        assert_eq!(notes, 1, "{text}");
        assert!(!text.contains("loads machine code"), "{text}");
        assert!(text.contains("compiles PTX for 80"), "{text}");
    }
}

#[test]
fn what_fails_in_both_forms_is_an_error_with_a_remedy() {
    let fail = ("FAKE_FAIL", "cuModuleLoadDataEx:218:1:2");
    CASES.says(
        "launch",
        &[fail],
        &["cuda:0 (Fake 0)", "the driver cannot load it", "a fake complaint", "`device` cpu"],
    );
}

/// Every kernel of a model is there before it is launched, each module loaded once.
#[test]
fn preloaded_kernels_are_not_loaded_again() {
    let Some(text) = CASES.run("preload", &[]) else { return };
    let loads = text.lines().filter(|l| l.contains("fake driver: loads machine code")).count();
    let told = text.lines().find_map(|l| l.split_once("modules: ")).expect("their number").1;
    assert_eq!(told, loads.to_string(), "{text}");
    assert!(loads > 5, "{text}");
}

#[test]
fn other_registers_at_entry_than_setmaxnreg_needs_are_an_error() {
    CASES.says(
        "entry registers",
        &[("FAKE_REGISTERS", "152")],
        &["kernel ", "_sm90a: the driver of cuda:0 (Fake 0) gives it 152 registers", "written for 168"],
    );
}

#[test]
fn too_old_a_driver_is_told_which_it_takes() {
    let parts = ["cuda:0 (Fake 0)", "knows CUDA 11.4", "need CUDA 12.0 (driver 525 or later)"];
    for sm in ["75", "90", "120"] {
        CASES.says("open", &[("FAKE_VERSION", "11040"), ("FAKE_SM", sm)], &parts);
    }
    CASES.says(
        "launch",
        &[("FAKE_FAIL", "cuModuleLoadDataEx:222"), ("FAKE_SM", "120")],
        &["too old", "(driver 525 or later)"],
    );
}

/// 525 is the driver of CUDA 12.0.
#[test]
fn every_kernel_loads_on_driver_525() {
    for sm in ["75", "80", "89", "90", "120"] {
        let Some(text) = CASES.run("everything", &[("FAKE_SM", sm), ("FAKE_VERSION", "12000")]) else {
            return;
        };
        let refused = text.contains("refuses this program's machine code");
        assert!(!refused, "{sm}: {text}");
    }
}

#[test]
fn too_old_a_gpu() {
    CASES.says("open", &[("FAKE_SM", "61")], &["compute capability 6.1", "need 7.5", "`device` cpu"]);
}

#[test]
fn out_of_memory_comes_with_numbers() {
    CASES.says(
        "too much",
        &[],
        &["capacity", "cuda:0 (Fake 0)", "80.0 MiB asked for", "48.0 MiB are free", "16.0 MiB held"],
    );
    CASES.says(
        "over the cap",
        &[],
        &["capacity", "12.0 MiB asked for", "4.0 MiB of the 8.0 MiB granted (`gpu_memory`)"],
    );
    CASES.says(
        "pinned",
        &[("FAKE_FAIL", "cuMemHostAlloc:2")],
        &["the host has no 1.0 MiB to page-lock", "ulimit -l", "`device` cpu"],
    );
    CASES.says(
        "launch",
        &[("FAKE_FAIL", "cuModuleLoadDataEx:2")],
        &["capacity", "no memory left to load cuda/", "`gpu_memory`"],
    );
    CASES.says("open", &[("FAKE_FAIL", "cuDevicePrimaryCtxRetain:2")], &["capacity", "another process"]);
}

#[test]
fn the_assemblers_log_is_shown() {
    CASES.says(
        "launch",
        &[("FAKE_FAIL", "cuModuleLoadDataEx:218"), ("FAKE_SM", "120")],
        &["the driver cannot load it", "a fake complaint"],
    );
}

#[test]
fn a_refused_launch_names_its_shape() {
    CASES.says(
        "launch",
        &[("FAKE_FAIL", "cuLaunchKernel:701")],
        &["kernel ", "refused", "grid [3, 1, 1], block [32, 1, 1]"],
    );
    CASES.says("too much shared", &[], &["kernel ", "wants 300000 bytes of shared memory", "232448"]);
    CASES.says("unknown kernel", &[], &["kernel nobody", "not in this build"]);
}

/// After an illegal access every call gives the same error, nothing hangs, and dropping everything is fine
/// (though what the device holds cannot be given back).
#[test]
fn a_lost_device_is_lost_for_every_call() {
    let parts = ["lost: an illegal memory access", "700", "enqueued last: kernel ", "CUDA_LAUNCH_BLOCKING=1"];
    let Some(text) = CASES.child("lost", &[("FAKE_FAIL", "cuMemcpyHtoDAsync_v2:700:2")]) else { return };
    let errors: Vec<_> = text.lines().filter_map(|l| l.split_once("error: ")).map(|(_, e)| e).collect();
    assert_eq!(errors.len(), 7, "{text}");
    for error in &errors {
        assert_eq!(error, &errors[0]);
        assert!(parts.iter().all(|p| error.contains(p)), "{error}");
    }
}

#[test]
fn what_a_kernel_became_is_read_back() {
    let Some(text) = CASES.run("usage", &[]) else { return };
    assert!(text.contains("168 registers, 16 local, 8 shared"), "{text}");
    CASES.says("usage", &[("FAKE_FAIL", "cuFuncGetAttribute:201:2")], &["kernel ", "its attributes"]);
    CASES.says("usage", &[("FAKE_FAIL", "cuModuleLoadDataEx:218:1:2")], &["cannot load", "a fake complaint"]);
}

/// What a GPU that fell off the bus answers: nothing works afterwards.
#[test]
fn an_unknown_error_loses_the_device() {
    let Some(text) = CASES.child("lost", &[("FAKE_FAIL", "cuMemcpyHtoDAsync_v2:999:2")]) else { return };
    let errors: Vec<_> = text.lines().filter_map(|l| l.split_once("error: ")).map(|(_, e)| e).collect();
    assert_eq!(errors.len(), 7, "{text}");
    assert!(
        errors.iter().all(|e| *e == errors[0] && e.contains("lost: ") && e.contains("999")),
        "{errors:?}"
    );
}

fn print(error: &Error) {
    let capacity = if matches!(error, Error::Capacity(_)) { " (capacity)" } else { "" };
    println!("error: {error}{capacity}");
}

/// The other side of the tests above: runs in a process whose driver is the stand-in.
#[test]
#[ignore = "run by the others, in a process of its own"]
fn inside() {
    let case = std::env::var("FAKE_CASE").expect("the other tests set FAKE_CASE");
    let options = match case.as_str() {
        "open 3" => CudaOptions { ordinal: 3, ..CudaOptions::default() },
        "over the cap" => CudaOptions { memory: Some(8 << 20), ..CudaOptions::default() },
        "pretend 75" => CudaOptions { pretend_sm: Some(75), ..CudaOptions::default() },
        _ => CudaOptions::default(),
    };
    tandem::device::listen_to_notices(|sentence| println!("{sentence}"));
    let rt = match cuda::open(&options) {
        Ok(rt) if case == "usage" => {
            let (kernel, _) = some_kernel(&*rt);
            rt.kernel_usage("nobody").expect_err("no such kernel");
            return match rt.kernel_usage(kernel) {
                Ok(u) => println!("{} registers, {} local, {} shared", u.registers, u.local, u.shared),
                Err(error) => print(&error),
            };
        }
        Ok(rt) => rt as Arc<dyn Runtime>,
        Err(error) => return print(&error),
    };
    let fails = |result: tandem::Result<()>| print(&result.expect_err("an error"));
    let (kernel, params) = some_kernel(&*rt);
    let params = vec![0; params];
    let launch = |shared| Launch { kernel, grid: [3, 1, 1], block: [32, 1, 1], shared, params: &params };
    match case.as_str() {
        "works" => works(&rt, kernel, &params),
        "preload" => {
            // Kernels of one format of quantised weights.
            let modules = std::cell::Cell::new(0);
            let other = |name: &str| ["q4_1", "q5", "q8_0", "q6_k"].iter().any(|f| name.contains(f));
            rt.preload(&|name| !other(name), &|done, of| {
                assert!(done <= of);
                modules.set(done);
            })
            .expect("they load");
            println!("modules: {}", modules.get());
            rt.launch(Lane::Compute, &launch(0)).expect("a launch");
        }
        "everything" => rt.preload(&|_| true, &|_, _| ()).expect("they load"),
        "entry registers" => {
            let promised =
                MODULES.iter().flat_map(|m| m.kernels).find(|k| k.registers.is_some()).expect("one");
            fails(rt.preload(&|name| name == promised.name, &|_, _| ()));
        }
        "loads" | "pretend 75" => rt.launch(Lane::Compute, &launch(0)).expect("a launch"),
        "too much" => {
            let _held = Buffer::new(&rt, 16 << 20).expect("it fits");
            fails(rt.alloc(80 << 20).map(drop));
        }
        "over the cap" => {
            let held = Buffer::new(&rt, 4 << 20).expect("it fits");
            assert_eq!(rt.memory_free().expect("a number"), 4 << 20);
            fails(rt.alloc(12 << 20).map(drop));
            drop(held);
            assert_eq!(rt.memory_free().expect("a number"), 8 << 20);
        }
        "pinned" => fails(rt.pinned(1 << 20).map(drop)),
        "launch" => fails(rt.launch(Lane::Compute, &launch(0))),
        "too much shared" => fails(rt.launch(Lane::Compute, &launch(300_000))),
        "unknown kernel" => fails(rt.launch(Lane::Compute, &Launch { kernel: "nobody", ..launch(0) })),
        "lost" => {
            let buffer = Buffer::from_bytes(&rt, Lane::Compute, &[1; 100]).expect("the first upload");
            rt.launch(Lane::Compute, &launch(0)).expect("a launch");
            let event = rt.record(Lane::Compute).expect("an event");
            fails(rt.upload(Lane::Compute, buffer.ptr(), &[2; 100]));
            fails(rt.launch(Lane::Compute, &launch(0)));
            fails(rt.download(Lane::Compute, buffer.ptr(), &mut [0; 100]));
            fails(rt.alloc(100).map(drop));
            fails(rt.synchronize(&event));
            fails(rt.synchronize_all());
            fails(rt.capture(&mut || Ok(())).map(drop));
        }
        other => panic!("no case {other}"),
    }
}

fn works(rt: &Arc<dyn Runtime>, kernel: &str, params: &[u8]) {
    let launch = |shared| Launch { kernel, grid: [3, 1, 1], block: [32, 1, 1], shared, params };
    assert_eq!((rt.info().name.as_str(), rt.info().sm, rt.info().multiprocessors), ("Fake 0", 90, 4));
    let data: Vec<u8> = (0..20 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut back = vec![0; data.len()];
    // Several times around the staging ring.
    let buffer = Buffer::new(rt, data.len()).expect("memory");
    for lane in [Lane::Compute, Lane::HostToDevice, Lane::Compute] {
        rt.upload(lane, buffer.ptr(), &data).expect("an upload");
    }
    rt.download(Lane::DeviceToHost, buffer.ptr(), &mut back).expect("a download");
    assert!(back == data);

    let pinned = rt.pinned(1000).expect("pinned memory");
    rt.fill(Lane::Compute, buffer.ptr(), 7, 100).expect("a fill");
    rt.copy(Lane::Compute, buffer.ptr().add(200), buffer.ptr(), 100).expect("a copy");
    rt.download_pinned(Lane::DeviceToHost, buffer.ptr().add(150), &pinned, 10, 100).expect("a download");
    // SAFETY: the stand-in has copied when the call returns, and nobody else uses the memory.
    let got = unsafe { std::slice::from_raw_parts(pinned.host(), 1000) };
    assert_eq!((&got[..10], got[60], got[109], got[110]), (&[0; 10][..], 7, 7, 0));
    rt.upload_pinned(Lane::HostToDevice, buffer.ptr(), &pinned, 60..110).expect("an upload");
    assert!(!pinned.device().is_null());

    let event = rt.record(Lane::HostToDevice).expect("an event");
    rt.wait(Lane::Compute, &event).expect("waiting");
    rt.synchronize(&event).expect("waiting");
    assert!(rt.is_done(&event).expect("asking"));

    // A plain one, and one with more shared memory than is granted unasked.
    rt.launch(Lane::Compute, &launch(0)).expect("a launch");
    rt.launch(Lane::Compute, &launch(100 << 10)).expect("a launch");

    // What dies or is made while a step is recorded waits, or is allowed; what cannot be recorded is refused.
    let doomed = std::cell::RefCell::new(Some((buffer, pinned)));
    let graph = rt
        .capture(&mut || {
            rt.launch(Lane::Compute, &launch(0))?;
            doomed.take();
            let _new = Buffer::new(rt, 100)?;
            rt.upload(Lane::Compute, DevPtr(256), &[1]).expect_err("an upload cannot be recorded");
            rt.record(Lane::Compute).expect_err("an event cannot be recorded");
            rt.launch(Lane::Compute, &launch(0))
        })
        .expect("a recording")
        .expect("CUDA records");
    rt.replay(&graph).expect("a replay");
    rt.replay(&graph).expect("a replay");
    let failed = rt.capture(&mut || Err(Error::usage("no")));
    assert_eq!(failed.expect_err("its error").to_string(), "no");
    rt.synchronize_all().expect("waiting");

    let map = rt.tensor_map_2d(DevPtr(512), 10, 20, 24, 8, 16).expect("a tensor map");
    let word = |i: usize| u64::from_ne_bytes(map[8 * i..8 * i + 8].try_into().expect("8 bytes"));
    assert_eq!([0, 1, 2, 3, 4, 5].map(word), [512, 20, 10, 48, 16, 8]);
    rt.tensor_map_2d(DevPtr(512), 10, 20, 20, 8, 65).expect_err("a box wider than the swizzle");
    drop(graph);
}
