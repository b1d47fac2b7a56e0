//! The emulated lanes: truly asynchronous, strict about order and memory, as slow as told.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tandem::Error;
use tandem::device::emulated::{EmulatedOptions, EmulatedRuntime, Span, Speed};
use tandem::device::{Buffer, DevPtr, Lane, Launch, Runtime};

use super::{each_emulated, emulated, options};

/// What a refused call says.
#[track_caller]
fn refused<T>(result: tandem::Result<T>, want: &str) {
    match result.err().expect("a refusal") {
        Error::Device { what, problem } => {
            assert!(format!("{what}: {problem}").contains(want), "{want:?} wanted: {what}: {problem}");
        }
        other => panic!("a device's error wanted: {other}"),
    }
}

/// Blocks a lane until a message comes.
fn gate(rt: &EmulatedRuntime, lane: Lane) -> (Sender<()>, Receiver<()>) {
    let (open, opened) = channel::<()>();
    let (entered, inside) = channel();
    let (opened, entered) = (Mutex::new(opened), Mutex::new(entered));
    rt.operation(lane, "gate", &[], &[], move |_, _| {
        entered.lock().unwrap().send(()).ok();
        opened.lock().unwrap().recv().ok();
        Ok(())
    })
    .unwrap();
    (open, inside)
}

fn shared(rt: &Arc<EmulatedRuntime>) -> Arc<dyn Runtime> {
    rt.clone()
}

#[test]
fn a_blocked_lane_holds_up_nobody_but_those_who_wait_for_it() {
    let rt = emulated(options());
    let dyn_rt = shared(&rt);
    let a = Buffer::from_bytes(&dyn_rt, Lane::HostToDevice, &[1; 64]).unwrap();
    rt.synchronize_all().unwrap();
    let (open, inside) = gate(&rt, Lane::Compute);
    inside.recv().unwrap();
    let blocked = rt.record(Lane::Compute).unwrap();
    rt.wait(Lane::DeviceToHost, &blocked).unwrap();
    let behind = rt.record(Lane::DeviceToHost).unwrap();
    // Calls that enqueue have returned, and the third lane is free.
    rt.fill(Lane::HostToDevice, a.ptr(), 2, 64).unwrap();
    let mut got = [0; 64];
    rt.download(Lane::HostToDevice, a.ptr(), &mut got).unwrap();
    assert_eq!(got, [2; 64]);
    assert!(!rt.is_done(&blocked).unwrap() && !rt.is_done(&behind).unwrap());
    open.send(()).unwrap();
    rt.synchronize(&behind).unwrap();
    assert!(rt.is_done(&blocked).unwrap());
}

/// A free returns at once; the memory stays what it is until the work enqueued before is done, and only then is free.
#[test]
fn a_free_goes_behind_the_work_in_flight() {
    let rt = emulated(options());
    let ptr = rt.alloc(512 << 10).unwrap();
    rt.fill(Lane::Compute, ptr, 5, 8).unwrap();
    let (open, inside) = gate(&rt, Lane::Compute);
    inside.recv().unwrap();
    let begin = Instant::now();
    rt.free(ptr);
    assert!(begin.elapsed() < Duration::from_secs(5), "a free waited for a lane that is held up");
    refused(rt.fill(Lane::Compute, ptr, 0, 1), "not allocated");
    // Half of it is left; whoever needs more, or asks how much there is, waits.
    let other = rt.alloc(256 << 10).unwrap();
    assert_ne!(other, ptr);
    let waited = std::thread::scope(|s| {
        let alloc = s.spawn(|| (rt.alloc(512 << 10).unwrap(), Instant::now()));
        let free = s.spawn(|| (rt.memory_free().unwrap(), Instant::now()));
        std::thread::sleep(Duration::from_millis(20));
        let opened = Instant::now();
        open.send(()).unwrap();
        let ((_, allocated), (_, asked)) = (alloc.join().unwrap(), free.join().unwrap());
        allocated > opened && asked > opened
    });
    assert!(waited, "memory was given out under work in flight");
    assert_eq!(rt.memory_free().unwrap(), 256 << 10);
}

#[test]
fn memory_is_poison_until_it_is_written_and_after_it_was_freed() {
    let rt = emulated(options());
    for _ in 0..2 {
        let ptr = rt.alloc(1000).unwrap();
        let mut got = [0; 1000];
        rt.download(Lane::Compute, ptr, &mut got).unwrap();
        assert_eq!(got, [0xFF; 1000]);
        rt.fill(Lane::Compute, ptr, 1, 1000).unwrap();
        rt.free(ptr);
    }
}

#[test]
fn the_cap_is_exact() {
    let rt = emulated(options());
    let held: Vec<DevPtr> = (0..4).map(|_| rt.alloc(256 << 10).unwrap()).collect();
    assert_eq!(rt.memory_free().unwrap(), 0);
    let e = rt.alloc(1).unwrap_err();
    assert_eq!(e.to_string(), "emulated accelerator: 1 bytes asked for, 0 of 1048576 bytes are free");
    rt.free(held[2]);
    assert_eq!(rt.memory_free().unwrap(), 256 << 10);
    // A hole is as good as any memory.
    assert_eq!(rt.alloc((256 << 10) - 3).unwrap(), held[2]);
}

#[test]
fn ranges_are_checked() {
    each_emulated(|_, rt| {
        let b = Buffer::from_bytes(&rt, Lane::Compute, &[0; 300]).unwrap();
        rt.synchronize_all().unwrap();
        refused(rt.upload(Lane::Compute, b.ptr().add(299), &[0; 2]), "2 bytes from byte 299");
        refused(rt.fill(Lane::Compute, b.ptr().add(300), 0, 1), "not allocated");
        refused(rt.copy(Lane::Compute, b.ptr(), DevPtr(64), 1), "no address of this device");
        refused(rt.copy(Lane::Compute, DevPtr::NULL, b.ptr(), 1), "no address of this device");
        let mut out = [0; 400];
        refused(rt.download(Lane::Compute, b.ptr(), &mut out), "400 bytes from byte 0");
        assert_eq!(out, [0; 400]);
        let host = [0u8; 8];
        refused(rt.fill(Lane::Compute, DevPtr(host.as_ptr() as u64), 0, 8), "no address of this device");
        // Refused calls enqueued nothing.
        let mut out = [1; 300];
        rt.download(Lane::Compute, b.ptr(), &mut out).unwrap();
        assert_eq!(out, [0; 300]);
    });
}

#[test]
fn a_second_free_is_told_to_the_next_call() {
    let rt = emulated(options());
    let ptr = rt.alloc(10).unwrap();
    rt.free(ptr);
    rt.free(ptr);
    refused(rt.alloc(10), "freed twice");
    let ptr = rt.alloc(10).unwrap();
    rt.free(ptr.add(1));
    refused(rt.record(Lane::Compute), "no allocation begins");
    rt.synchronize_all().unwrap();
}

#[test]
fn work_on_the_same_bytes_without_an_event_is_refused() {
    let rt = emulated(options());
    let dyn_rt = shared(&rt);
    let b = Buffer::from_bytes(&dyn_rt, Lane::HostToDevice, &[1; 64]).unwrap();
    refused(
        rt.fill(Lane::Compute, b.ptr().add(63), 0, 1),
        "which work on the host-to-device lane writes; no event orders the two",
    );
    let event = rt.record(Lane::HostToDevice).unwrap();
    rt.wait(Lane::Compute, &event).unwrap();
    rt.operation(Lane::Compute, "read", &[Span::new(b.ptr(), 64)], &[], |_, _| Ok(())).unwrap();
    refused(rt.fill(Lane::HostToDevice, b.ptr(), 0, 1), "which work on the compute lane reads");
    rt.synchronize_all().unwrap();
    rt.fill(Lane::HostToDevice, b.ptr(), 0, 1).unwrap();
}

#[test]
fn operations_get_their_bytes() {
    let rt = emulated(options());
    let dyn_rt = shared(&rt);
    let a = Buffer::from_bytes(&dyn_rt, Lane::Compute, &[3; 16]).unwrap();
    let b = Buffer::from_bytes(&dyn_rt, Lane::Compute, &[4; 16]).unwrap();
    let pinned = rt.pinned(16).unwrap();
    let spans = [Span::new(a.ptr(), 16), Span::new(b.ptr(), 8)];
    let (out, mapped) = (Span::new(b.ptr().add(8), 8), Span::new(pinned.device(), 16));
    rt.operation(Lane::Compute, "sum", &spans, &[out, mapped], |reads, writes| {
        writes[0].fill(reads[0][0] + reads[1][0]);
        writes[1].fill(9);
        Ok(())
    })
    .unwrap();
    let mut got = [0; 16];
    rt.download(Lane::Compute, b.ptr(), &mut got).unwrap();
    assert_eq!(got, [4, 4, 4, 4, 4, 4, 4, 4, 7, 7, 7, 7, 7, 7, 7, 7]);
    // SAFETY: the operation is done.
    assert_eq!(unsafe { std::slice::from_raw_parts(pinned.host(), 16) }, [9; 16]);
    // What is written is nobody else's, of the same operation too.
    let overlap = [Span::new(a.ptr(), 9), Span::new(a.ptr().add(8), 8)];
    refused(rt.operation(Lane::Compute, "twice", &[], &overlap, |_, _| Ok(())), "overlap");
    refused(rt.operation(Lane::Compute, "in place", &overlap[..1], &overlap[1..], |_, _| Ok(())), "overlap");
    drop(pinned);
    refused(rt.operation(Lane::Compute, "late", &[mapped], &[], |_, _| Ok(())), "no address of this device");
}

#[test]
fn a_failed_operation_is_told_once_and_what_follows_is_skipped() {
    for jitter in [None, Some(5)] {
        let rt = emulated(EmulatedOptions { jitter, ..options() });
        let dyn_rt = shared(&rt);
        let b = Buffer::from_bytes(&dyn_rt, Lane::Compute, &[1; 8]).unwrap();
        rt.synchronize_all().unwrap();
        let (open, inside) = gate(&rt, Lane::Compute);
        rt.operation(Lane::Compute, "bad", &[], &[], |_, _| Err(Error::Run("went wrong".into()))).unwrap();
        rt.fill(Lane::Compute, b.ptr(), 2, 8).unwrap();
        let failed = rt.record(Lane::Compute).unwrap();
        rt.wait(Lane::DeviceToHost, &failed).unwrap();
        rt.fill(Lane::DeviceToHost, b.ptr(), 3, 8).unwrap();
        inside.recv().unwrap();
        open.send(()).unwrap();
        refused(rt.synchronize(&failed), "operation bad: went wrong");
        refused(rt.is_done(&failed), "operation bad: went wrong");
        // The lane that waited has failed with it: told when marking it, or when waiting for the mark.
        let told = rt.record(Lane::DeviceToHost).and_then(|event| rt.synchronize(&event));
        let told = told.expect_err("the failure did not spread");
        assert!(told.to_string().contains("went wrong"), "{told}");
        // Both lanes work again, and nothing behind the failure was done.
        rt.synchronize_all().unwrap();
        let mut got = [0; 8];
        rt.download(Lane::Compute, b.ptr(), &mut got).unwrap();
        assert_eq!(got, [1; 8]);
    }
}

#[test]
fn a_panic_in_an_operation_is_an_error() {
    let rt = emulated(options());
    rt.operation(Lane::Compute, "oops", &[], &[], |_, _| panic!("at {}", 42)).unwrap();
    refused(rt.synchronize_all(), "operation oops: panicked: at 42");
    rt.synchronize_all().unwrap();
}

#[test]
fn a_recording_takes_launches_and_copies_only() {
    let rt = emulated(options());
    let ptr = rt.alloc(64).unwrap();
    let pinned = rt.pinned(64).unwrap();
    let event = rt.record(Lane::Compute).unwrap();
    let graph = rt.capture(&mut || {
        refused(rt.upload(Lane::Compute, ptr, &[0; 4]), "cannot be recorded");
        refused(rt.download(Lane::Compute, ptr, &mut [0; 4]), "cannot be recorded");
        refused(rt.fill(Lane::HostToDevice, ptr, 0, 1), "is being recorded");
        refused(rt.record(Lane::Compute), "is being recorded");
        refused(rt.synchronize(&event), "is being recorded");
        refused(rt.capture(&mut || Ok(())), "recorded already");
        std::thread::scope(|s| {
            let other = s.spawn(|| rt.fill(Lane::Compute, ptr, 0, 1));
            refused(other.join().unwrap(), "is being recorded");
        });
        rt.upload_pinned(Lane::Compute, ptr, &pinned, 0..64)?;
        rt.operation(Lane::Compute, "add", &[], &[Span::new(ptr, 1)], |_, w| {
            w[0][0] += 1;
            Ok(())
        })
    });
    let graph = graph.unwrap().unwrap();
    for value in 0..3 {
        // SAFETY: no work uses the memory: each replay is waited for.
        unsafe { *pinned.host() = value };
        rt.replay(&graph).unwrap();
        let mut got = [0; 1];
        rt.download(Lane::Compute, ptr, &mut got).unwrap();
        assert_eq!(got, [value + 1]);
    }
    rt.free(ptr);
    refused(rt.replay(&graph), "not allocated");
}

#[test]
fn events_and_graphs_belong_to_their_device() {
    let (a, b) = (emulated(options()), emulated(options()));
    let event = a.record(Lane::Compute).unwrap();
    refused(b.wait(Lane::Compute, &event), "of another accelerator");
    refused(b.synchronize(&event), "of another accelerator");
    let ptr = a.alloc(4).unwrap();
    let graph = a.capture(&mut || a.fill(Lane::Compute, ptr, 0, 4)).unwrap().unwrap();
    refused(b.replay(&graph), "no address of this device");
}

#[test]
fn copies_and_launches_take_as_long_as_asked() {
    let speed = Speed {
        host_to_device: Some(0.01),
        device_to_host: Some(0.005),
        launch: Duration::from_millis(5),
        kernel_factor: 1.0,
        host_factor: 1.0,
    };
    let rt = emulated(EmulatedOptions { speed, ..options() });
    let ptr = rt.alloc(100_000).unwrap();
    let timed = |f: &dyn Fn()| {
        let begin = Instant::now();
        f();
        rt.synchronize_all().unwrap();
        begin.elapsed()
    };
    assert!(
        timed(&|| rt.upload(Lane::HostToDevice, ptr, &[0; 100_000]).unwrap()) >= Duration::from_millis(10)
    );
    let down = timed(&|| rt.download(Lane::DeviceToHost, ptr, &mut [0; 100_000]).unwrap());
    assert!(down >= Duration::from_millis(20));
    let op = || rt.operation(Lane::Compute, "nothing", &[], &[], |_, _| Ok(())).unwrap();
    assert!(timed(&op) >= Duration::from_millis(5));
}

#[test]
fn an_unknown_capability_is_a_usage_error() {
    let e = EmulatedRuntime::new(EmulatedOptions { sm: 61, ..options() }).err().unwrap();
    assert!(matches!(&e, Error::Usage(m) if m.contains("61")), "{e}");
}

/// Without kernels built for the host there are none; with them, some of the project's.
#[test]
fn kernels_by_name() {
    let kernels = |sm| {
        let rt = emulated(EmulatedOptions { sm, ..options() });
        ["copy_rows_16", "embed_f32", "gemv_bf16_m1", "gemm_bf16_128x128_sm90a"].map(|k| rt.has_kernel(k))
    };
    if cfg!(tandem_emulation) {
        assert_eq!(kernels(75), [true, true, false, false]);
        assert_eq!(kernels(80), [true, true, true, false]);
        assert_eq!(kernels(90), [true; 4]);
    } else {
        assert_eq!(kernels(90), [false; 4]);
        println!("skipped: no kernels were built for the host (libclang and a C++ compiler make them)");
    }
}

/// Shapes that no device takes are refused at once, and nothing is enqueued.
#[test]
fn impossible_launches_are_refused() {
    let rt = emulated(options());
    if !rt.has_kernel("copy_rows_16") {
        println!("skipped: no kernels were built for the host");
        return;
    }
    let launch = |grid, block, shared, params: usize| {
        let params = vec![0; params];
        let kernel = "copy_rows_16";
        rt.launch(Lane::Compute, &Launch { kernel, grid, block, shared, params: &params })
    };
    refused(launch([1, 0, 1], [32, 1, 1], 0, 8), "cannot be launched");
    refused(launch([1, 1, 1], [1025, 1, 1], 0, 8), "cannot be launched");
    refused(launch([1, 1, 1], [u32::MAX; 3], 0, 8), "cannot be launched");
    refused(launch([1, 1, 1], [32, 1, 1], 228 << 10, 8), "a block may have 232448");
    refused(launch([1, 1, 1], [32, 1, 1], 0, 5000), "5000 bytes of parameters");
    rt.synchronize_all().unwrap();
}
