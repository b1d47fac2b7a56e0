//! The driver's rules of stream capture: what must not happen while a step is recorded, by whichever thread and runtime, and
//! what may. On a stand-in for the driver that enforces them (`tests/support/fake_cuda/capture.c`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::fake_driver::{Cases, count, executes, some_kernel};
use tandem::device::cuda::{self, CudaOptions};
use tandem::device::{Buffer, Graph, Lane, Launch, Runtime, on_kernels};
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::load;
use tandem::program::{Flow, Placement, RequestId, Side, Wants};
use tandem::simd::Isa;

const CASES: Cases = Cases::of(module_path!());

fn open() -> Arc<dyn Runtime> {
    cuda::open(&CudaOptions::default()).expect("the stand-in opens")
}

/// Two launches and `meanwhile` between them, recorded. Every kernel has run before.
fn record(rt: &Arc<dyn Runtime>, meanwhile: &mut dyn FnMut()) -> Graph {
    let (kernel, params) = some_kernel(&**rt);
    let params = vec![0; params];
    let launch = Launch { kernel, grid: [1; 3], block: [32, 1, 1], shared: 0, params: &params };
    rt.launch(Lane::Compute, &launch).expect("a launch");
    let graph = rt.capture(&mut || {
        rt.launch(Lane::Compute, &launch)?;
        meanwhile();
        rt.launch(Lane::Compute, &launch)
    });
    graph.expect("no error").expect("the recording was not invalidated")
}

/// In a thread of its own, to its end.
fn elsewhere(work: impl FnOnce() + Send) {
    std::thread::scope(|s| s.spawn(work).join().expect("no panic"));
}

macro_rules! cases {
    ($($(#[$doc:meta])* $name:ident $env:expr => $body:expr;)*) => {
        $(
            $(#[$doc])*
            #[test]
            fn $name() {
                CASES.run(stringify!($name), &$env);
            }
        )*

        /// The other side: runs in a process whose driver is the stand-in.
        #[test]
        #[ignore = "run by the others, in a process of its own"]
        fn inside() {
            let case = std::env::var("FAKE_CASE").expect("the other tests set FAKE_CASE");
            $(if case == stringify!($name) {
                let body: fn() = $body;
                return body();
            })*
            panic!("no case {case}");
        }
    };
}

cases! {
    /// Two runtimes share the device's primary context: one frees while a thread records with the other.
    another_runtime_may_free_while_a_step_is_recorded [] => || {
        let (a, b) = (open(), open());
        let mut held = Some((Buffer::new(&b, 1000).unwrap(), b.pinned(1000).unwrap()));
        let graph = record(&a, &mut || elsewhere(|| {
            held.take();
            // To allocate is allowed, and must not give back what waits for the end of the recording.
            Buffer::new(&b, 500).unwrap();
            b.memory_free().unwrap();
        }));
        a.replay(&graph).unwrap();
        assert_eq!(count("cuCtxSynchronize"), 0);
    };

    the_recording_thread_may_free_another_runtimes_memory [] => || {
        let (a, b) = (open(), open());
        let mut held = Some((Buffer::new(&b, 1000).unwrap(), b.pinned(1000).unwrap()));
        record(&a, &mut || {
            held.take();
            Buffer::new(&b, 500).unwrap();
        });
    };

    runtimes_come_and_go_while_a_step_is_recorded [] => || {
        let (a, b, c) = (open(), open(), open());
        for rt in [&b, &c] {
            let graph = record(rt, &mut || ());
            rt.replay(&graph).unwrap();
        }
        let (mut b, mut c) = (Some(b), Some(c));
        record(&a, &mut || {
            elsewhere(|| {
                b.take();
                let d = open();
                record(&d, &mut || ());
            });
            c.take();
            open();
        });
        // And nothing was lost by it.
        let graph = record(&a, &mut || ());
        a.replay(&graph).unwrap();
    };

    /// A race of milliseconds: whether to wait was decided before the recording, waited for during it.
    threads_that_free_never_meet_a_recording [("FAKE_MEMORY", "68719476736")] => || {
        let (a, b) = (open(), open());
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            // Also if the recordings fail: the threads would go on for ever.
            let _over = Over(&over);
            for (rt, lane) in [(&a, Lane::HostToDevice), (&b, Lane::Compute), (&a, Lane::DeviceToHost)] {
                let over = &over;
                s.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let buffer = Buffer::from_bytes(rt, lane, &[7; 100]).unwrap();
                        let mut back = [0; 100];
                        rt.download(lane, buffer.ptr(), &mut back).unwrap();
                        assert_eq!(back, [7; 100]);
                        drop((buffer, rt.pinned(100).unwrap()));
                    }
                });
            }
            for _ in 0..200 {
                let graph = record(&a, &mut || std::thread::yield_now());
                a.replay(&graph).unwrap();
            }
        });
        assert_eq!(count("cuCtxSynchronize"), 0, "nobody waits for the context");
    };

    two_runtimes_record_at_the_same_time [] => || {
        let (a, b) = (open(), open());
        let mut graphs = Vec::new();
        let outer = record(&a, &mut || elsewhere(|| graphs.push(record(&b, &mut || ()))));
        a.replay(&outer).unwrap();
        b.replay(&graphs[0]).unwrap();
        // But not one thread at a time: what it enqueues would belong to both.
        let mut nested = None;
        record(&a, &mut || nested = Some(b.capture(&mut || Ok(())).is_err()));
        assert_eq!(nested, Some(true));
    };

    /// Events from before the recording: any thread may ask, other threads may wait. What is recorded has no time at all.
    events_beside_a_recording [] => || {
        let rt = open();
        let buffer = Buffer::new(&rt, 100).unwrap();
        rt.fill(Lane::HostToDevice, buffer.ptr(), 1, 100).unwrap();
        let event = rt.record(Lane::HostToDevice).unwrap();
        record(&rt, &mut || {
            while !rt.is_done(&event).unwrap() {}
            rt.synchronize(&event).unwrap_err();
            rt.wait(Lane::Compute, &event).unwrap_err();
            rt.record(Lane::Compute).unwrap_err();
            elsewhere(|| {
                rt.synchronize(&event).unwrap();
                rt.wait(Lane::DeviceToHost, &event).unwrap();
                let mut back = [0; 100];
                rt.download(Lane::DeviceToHost, buffer.ptr(), &mut back).unwrap();
                assert_eq!(back, [1; 100]);
                rt.upload(Lane::HostToDevice, buffer.ptr(), &[2; 100]).unwrap();
                let event = rt.record(Lane::HostToDevice).unwrap();
                rt.synchronize(&event).unwrap();
                // The lane that is recorded takes nothing from anybody else.
                rt.fill(Lane::Compute, buffer.ptr(), 3, 1).unwrap_err();
                rt.record(Lane::Compute).unwrap_err();
                rt.capture(&mut || Ok(())).unwrap_err();
            });
        });
    };

    a_recording_that_panics_or_fails_leaves_the_lane_as_it_was [] => || {
        let rt = open();
        let buffer = Buffer::new(&rt, 100).unwrap();
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rt.capture(&mut || panic!("in the middle")).map(drop)
        }));
        panic.expect_err("the panic goes on");
        rt.capture(&mut || Err(tandem::Error::usage("no"))).map(drop).unwrap_err();
        rt.fill(Lane::Compute, buffer.ptr(), 1, 100).unwrap();
        record(&rt, &mut || ());
    };

    refused_at_the_beginning [("FAKE_FAIL", "cuStreamBeginCapture_v2:801")] => refused;
    refused_at_the_end [("FAKE_FAIL", "cuStreamEndCapture:901")] => refused;
    refused_as_a_whole [("FAKE_FAIL", "cuGraphInstantiateWithFlags:801")] => refused;

    /// The first decode step of a bucket runs kernel by kernel, the second is recorded, later ones are replayed; nothing is
    /// loaded in a recording; the step's lists go up in one copy.
    an_engine_records_what_has_run_once [("FAKE_MEMORY", "1073741824")] => || {
        let (mut e, seq) = engine();
        let steps: Vec<_> = (0..4).map(|_| counted(&mut e, &[seq])).collect();
        let [first, second, third, fourth] = &steps[..] else { unreachable!() };
        assert!(first.launches > 10 && first.begun + first.replayed == 0, "{first:?}");
        assert_eq!((second.begun, second.replayed, second.launches), (1, 1, first.launches), "recorded, then run");
        assert_eq!((third.begun, third.replayed, third.launches), (0, 1, 0), "{third:?}");
        assert_eq!(third, fourth);
        assert_eq!(count("loads in a recording"), 0);
        assert!(steps.iter().all(|s| s.uploads == 1), "one upload a step: {steps:?}");
        // Another bucket begins again.
        let other = e.add();
        e.prefill(other, &[1, 2, 3], |_| ()).unwrap();
        let both = counted(&mut e, &[seq, other]);
        assert!(both.begun == 0 && both.replayed == 0 && both.uploads == 1, "{both:?}");
        assert_eq!(count("cuCtxSynchronize"), 0);
    };

    /// Beside cohorts, too, a step's own rows are padded to their bucket: other numbers of rows are no reason to record anew.
    an_engine_records_a_bucket_once_beside_cohorts
    [("FAKE_MEMORY", "1073741824"), ("FAKE_ORDER", "late")] => || {
        if !executes() {
            return;
        }
        let m = load("synth:tiny-llama,dtype=bf16,seed=1,layers=2").unwrap();
        let mut options = Options::new(Isa::Reference, 64);
        (options.threads, options.sequences, options.sub_batches) = (Some(1), 8, 2);
        (options.kv_pages, options.far_pages) = (Some(16), Some(4));
        let accel = on_kernels(open()).expect("kernels");
        let placement = Placement::all(Side::Device, 2, 0);
        let e = Engine::placed(m.spec.clone(), &m.weights, &options, accel, "cuda:0", "test", placement, &|_| ());
        let mut e = e.unwrap();
        let far = e.add_at(Side::Host).unwrap();
        let near: Vec<RequestId> = (0..7).map(|_| e.add()).collect();
        for &seq in near.iter().chain([&far]) {
            e.forward_greedy(&[NewTokens { id: seq, tokens: &[3, 1, 4], wants: Wants::Last }]).unwrap();
        }
        let recordings = || ["cuStreamBeginCapture_v2", "cuGraphLaunch"].map(count);
        let mut advance = |rows: usize| {
            let input = |seq| NewTokens { id: seq, tokens: &[7], wants: Wants::Last };
            let own: Vec<NewTokens<'_>> = near[..rows].iter().map(|&seq| input(seq)).collect();
            let cohort = [input(far)];
            let batches = [&own[..], &cohort];
            let batches = if e.parked(far).is_none() { &batches[..] } else { &batches[..1] };
            let before = recordings();
            e.run_rows(batches, Flow::Async, &[], |i| i.pick = true).unwrap();
            let after = recordings();
            [after[0] - before[0], after[1] - before[1]]
        };
        // Layer by layer, some steps until every segment has run once and has been recorded.
        let begun: i32 = (0..6).map(|_| advance(5)[0]).sum();
        assert!(begun > 0, "segments are recorded beside cohorts");
        for rows in [6, 7, 5, 7] {
            let [begun, replayed] = advance(rows);
            assert!(begun == 0 && replayed > 0, "{rows} rows: {begun} recorded, {replayed} replayed");
        }
    };

    /// Where recording is refused the step runs all the same, and later ones do not try again.
    an_engine_goes_on_where_recording_is_refused
    [("FAKE_MEMORY", "1073741824"), ("FAKE_FAIL", "cuStreamEndCapture:901:0")] => || {
        let (mut e, seq) = engine();
        let steps: Vec<_> = (0..4).map(|_| counted(&mut e, &[seq])).collect();
        assert_eq!(steps.iter().map(|s| s.begun).collect::<Vec<_>>(), [0, 1, 0, 0], "{steps:?}");
        assert!(steps.iter().all(|s| s.replayed == 0 && s.launches >= steps[0].launches), "{steps:?}");
    };
}

/// Sets it when dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A recording that the driver refuses is none, and the lane goes on.
fn refused() {
    let rt = open();
    let buffer = Buffer::new(&rt, 100).unwrap();
    let refused = rt.capture(&mut || rt.fill(Lane::Compute, buffer.ptr(), 1, 100));
    assert!(refused.expect("no error").is_none());
    rt.fill(Lane::Compute, buffer.ptr(), 2, 100).unwrap();
    let mut back = [0; 100];
    rt.download(Lane::Compute, buffer.ptr(), &mut back).unwrap();
    assert_eq!(back, [2; 100]);
    record(&rt, &mut || ());
}

fn engine() -> (Engine, RequestId) {
    let m = load("synth:tiny-llama,dtype=bf16,seed=1").unwrap();
    let mut options = Options::new(Isa::Reference, 64);
    (options.threads, options.sequences) = (Some(1), 2);
    let accel = on_kernels(open()).expect("kernels");
    let mut e =
        Engine::on_accelerator(m.spec.clone(), &m.weights, &options, accel, "cuda:0", &|_| ()).unwrap();
    let seq = e.add();
    e.prefill(seq, &[3, 1, 4, 1, 5], |_| ()).unwrap();
    (e, seq)
}

/// What a decode step asks of the driver.
#[derive(Debug, PartialEq)]
struct Counted {
    launches: i32,
    begun: i32,
    replayed: i32,
    uploads: i32,
}

fn counted(e: &mut Engine, seqs: &[RequestId]) -> Counted {
    let now =
        || ["cuLaunchKernel", "cuStreamBeginCapture_v2", "cuGraphLaunch", "cuMemcpyHtoDAsync_v2"].map(count);
    let before = now();
    let inputs: Vec<_> =
        seqs.iter().map(|&seq| NewTokens { id: seq, tokens: &[7], wants: Wants::Last }).collect();
    e.forward(&inputs).unwrap();
    let after = now();
    let [launches, begun, replayed, uploads] = std::array::from_fn(|i| after[i] - before[i]);
    Counted { launches, begun, replayed, uploads }
}
