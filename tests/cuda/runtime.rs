//! The CUDA runtime's memory, events and waits on a stand-in for the driver whose lanes lag (`tests/support/fake_cuda/order.c`), and on
//! devices that lack something: each a sentence that names the remedy, and a way that still works.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support;
use crate::support::fake_driver::{Cases, count, some_kernel};
use tandem::Error;
use tandem::device::cuda::{self, CudaOptions};
use tandem::device::{Buffer, Lane, Launch, Runtime};

const CASES: Cases = Cases::of(module_path!());

fn open() -> Arc<dyn Runtime> {
    open_with(None)
}

fn open_with(memory: Option<u64>) -> Arc<dyn Runtime> {
    cuda::open(&CudaOptions { memory, ..CudaOptions::default() }).expect("the stand-in opens")
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
    /// A free asks nothing of the driver but events; memory goes back when the lanes have passed them, and the next
    /// allocation that needs it waits for that. (The stand-in complains of whatever goes back too early.)
    frees_go_behind_the_lanes [] => || {
        let rt = open_with(Some(1 << 20));
        let held: Vec<_> = (0..4).map(|_| Buffer::new(&rt, 256 << 10).unwrap()).collect();
        for (b, lane) in held.iter().zip(Lane::ALL.into_iter().cycle()) {
            rt.fill(lane, b.ptr(), 1, b.len()).unwrap();
        }
        let calls = || ["cuMemFree_v2", "cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"].map(count);
        let before = calls();
        drop(held);
        assert_eq!(calls(), before, "a free waited, or freed under work in flight");
        // Frees without work between them share their fence.
        assert_eq!(count("cuEventRecord"), 3);
        drop(Buffer::new(&rt, 1 << 20).expect("all of it, once the lanes are done"));
        assert_eq!(rt.memory_free().unwrap(), 1 << 20);
        assert_eq!(count("cuMemFree_v2"), before[0] + 5);
        assert_eq!(count("cuCtxSynchronize"), 0);
    };

    /// The driver's own memory runs out before any cap: what is dead goes back first.
    the_dead_make_room_for_the_living [("FAKE_MEMORY", "16777216")] => || {
        let rt = open();
        for lane in Lane::ALL.into_iter().cycle().take(10) {
            let b = Buffer::new(&rt, 10 << 20).expect("one of two fits");
            rt.fill(lane, b.ptr(), 1, b.len()).unwrap();
        }
    };

    pinned_memory_and_graphs_go_behind_the_lanes_too [] => || {
        let rt = open();
        let b = Buffer::new(&rt, 1000).unwrap();
        for _ in 0..3 {
            let (pinned, slab) = (rt.pinned(1000).unwrap(), rt.slab(1000).unwrap());
            rt.upload_pinned(Lane::HostToDevice, b.ptr(), &pinned, 0..1000).unwrap();
            rt.download_pinned(Lane::DeviceToHost, b.ptr(), &slab.range(10..500), 0, 490).unwrap();
            let graph = rt.capture(&mut || rt.fill(Lane::Compute, b.ptr(), 1, 10)).unwrap().expect("a graph");
            rt.replay(&graph).unwrap();
        }
        rt.memory_free().unwrap();
        // What has been given back is gone: the last round's, too.
        assert_eq!([count("cuMemHostUnregister"), count("cuGraphExecDestroy")], [3, 3]);
    };

    /// The wait at the end of a step is for lanes that got work, and for none twice.
    idle_lanes_are_not_waited_for [] => || {
        let rt = open();
        let b = Buffer::new(&rt, 1000).unwrap();
        let waits = |lanes: &[Lane]| {
            lanes.iter().for_each(|&lane| rt.fill(lane, b.ptr(), 1, 10).unwrap());
            let before = ["cuEventRecord", "cuStreamSynchronize", "cuCtxSynchronize"].map(count);
            rt.synchronize_all().unwrap();
            let after = ["cuEventRecord", "cuStreamSynchronize", "cuCtxSynchronize"].map(count);
            [0, 1, 2].map(|i| after[i] - before[i])
        };
        rt.synchronize_all().unwrap();
        assert_eq!(waits(&[Lane::Compute]), [1, 0, 0]);
        assert_eq!(waits(&[]), [0, 0, 0], "everything is known to be done");
        assert_eq!(waits(&[Lane::DeviceToHost, Lane::DeviceToHost]), [1, 0, 0]);
        assert_eq!(waits(&Lane::ALL), [3, 0, 0]);
    };

    /// One page-locked registration of exactly these bytes for all ranges.
    a_slab_is_one_registration [] => || {
        let rt = open();
        let slab = rt.slab(10_001).unwrap();
        let ranges: Vec<_> = (0..100).map(|i| slab.range(100 * i..100 * i + 101)).collect();
        assert_eq!((count("cuMemHostRegister_v2"), count("cuMemHostAlloc")), (1, 0));
        assert_eq!(ranges[7].device().0, slab.memory().device().0 + 700);
        assert!(rt.notices().is_empty());
    };

    a_slab_stays_pageable_where_locking_is_refused [("FAKE_FAIL", "cuMemHostRegister_v2:2:0")] => || {
        let rt = open();
        let slab = rt.slab(4 << 20).unwrap();
        let why = slab.pageable().expect("not page-locked");
        for part in ["cuda:0 (Fake 0)", "4.0 MiB", "pageable", "ulimit -l"] {
            assert!(why.contains(part), "{part}: {why}");
        }
        assert_eq!(rt.notices(), [why]);
        assert!(slab.memory().device().is_null());
        let b = Buffer::new(&rt, 4 << 20).unwrap();
        // SAFETY: no work uses the memory yet.
        unsafe { std::slice::from_raw_parts_mut(slab.memory().host(), 4 << 20).fill(3) };
        rt.upload_pinned(Lane::HostToDevice, b.ptr(), slab.memory(), 0..4 << 20).unwrap();
        let mut back = vec![0; 4 << 20];
        rt.download(Lane::HostToDevice, b.ptr(), &mut back).unwrap();
        assert!(back.iter().all(|&b| b == 3));
    };

    /// No mapped memory: all that stays on the device works, copies included; the exchange with the CPU says what lacks.
    without_mapped_memory_all_but_the_exchange_works [("FAKE_MAPS", "0")] => || {
        let rt = open();
        let b = Buffer::from_bytes(&rt, Lane::HostToDevice, &[5; 3 << 20]).unwrap();
        let mut back = vec![0; 3 << 20];
        rt.download(Lane::HostToDevice, b.ptr(), &mut back).unwrap();
        assert!(back.iter().all(|&b| b == 5));
        let slab = rt.slab(1000).unwrap();
        assert!(slab.pageable().is_none() && slab.memory().device().is_null(), "locked, not mapped");
        let error = rt.pinned(1000).err().expect("not without mapping");
        assert!(matches!(error, Error::Unsupported(_)));
        for part in ["cuda:0 (Fake 0)", "no mapped memory", "publish, collect", "`device` cpu"] {
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
    };

    /// The time between events, on a driver as old as they come: by the function that all have.
    timed_events [] => || {
        let rt = open();
        let b = Buffer::new(&rt, 100).unwrap();
        let first = rt.record_timed(Lane::Compute).unwrap();
        rt.fill(Lane::Compute, b.ptr(), 1, 100).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        let last = rt.record_timed(Lane::Compute).unwrap();
        assert!(rt.elapsed(&first, &last).unwrap_err().to_string().contains("not both done"));
        rt.synchronize(&last).unwrap();
        let took = rt.elapsed(&first, &last).unwrap();
        assert!((Duration::from_millis(5)..Duration::from_secs(60)).contains(&took), "{took:?}");
        let plain = rt.record(Lane::Compute).unwrap();
        rt.synchronize(&plain).unwrap();
        assert!(rt.elapsed(&first, &plain).unwrap_err().to_string().contains("keep"));
        // Events are used again by those who want the same of them.
        drop((first, last));
        let again = (rt.record_timed(Lane::Compute).unwrap(), rt.record_timed(Lane::HostToDevice).unwrap());
        assert_eq!(count("cuEventCreate"), 3);
        drop(again);
    };

    /// Whoever is in no hurry sleeps; a hand-over asks, again and again.
    waits_sleep_unless_they_hurry [] => || {
        let rt = open();
        let b = Buffer::new(&rt, 100).unwrap();
        let work = || (0..5).try_for_each(|_| rt.fill(Lane::Compute, b.ptr(), 1, 100)).unwrap();
        let calls = || [count("cuEventQuery"), count("cuEventSynchronize")];
        work();
        let before = calls();
        rt.synchronize(&rt.record(Lane::Compute).unwrap()).unwrap();
        assert_eq!(calls(), [before[0], before[1] + 1]);
        work();
        let before = calls();
        rt.spin_until_done(&rt.record(Lane::Compute).unwrap()).unwrap();
        assert_eq!(calls(), [before[0] + 6, before[1]], "five pieces of work, one a question");
        work();
        let before = calls();
        rt.download(Lane::Compute, b.ptr(), &mut [0; 100]).unwrap();
        assert!(calls()[0] > before[0] && calls()[1] == before[1], "a download is a hand-over");
        assert_eq!(count("events that spin"), 0);
    };

    a_deadline_passes_while_the_lane_is_stuck [("FAKE_STUCK", "1")] => || {
        let rt = open();
        let b = Buffer::new(&rt, 100).unwrap();
        rt.fill(Lane::Compute, b.ptr(), 1, 100).unwrap();
        let event = rt.record(Lane::Compute).unwrap();
        let begin = Instant::now();
        assert!(!rt.synchronize_until(&event, begin + Duration::from_millis(20)).unwrap());
        assert!(begin.elapsed() >= Duration::from_millis(20));
        assert!(!rt.is_done(&event).unwrap());
        // One that spins in vain goes to sleep.
        rt.spin_until_done(&event).unwrap();
        assert_eq!(count("cuEventSynchronize"), 1);
        assert!(rt.synchronize_until(&event, Instant::now()).unwrap(), "done, also if asked too late");
    };

    a_refused_recording_is_announced [("FAKE_FAIL", "cuStreamBeginCapture_v2:801:0")] => || {
        let rt = open();
        for _ in 0..2 {
            assert!(rt.capture(&mut || Ok(())).unwrap().is_none());
        }
        let notices = rt.notices();
        assert_eq!(notices.len(), 1, "once: {notices:?}");
        for part in ["cuda:0 (Fake 0)", "refuses to record", "801", "kernel by kernel", "updating the driver"] {
            assert!(notices[0].contains(part), "{part}: {}", notices[0]);
        }
    };

    /// Tests of one program share a runtime; on a device each has it for itself as long as it holds it.
    tests_take_turns_on_a_device [("FAKE_KEEPS", "1")] => || {
        let here = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..20 {
                        let rt = support::gpu::gpu().expect("the stand-in");
                        let again = support::gpu::gpu().expect("again, in its own turn");
                        assert_eq!(here.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0, "two at a time");
                        let (kernel, params) = some_kernel(&*rt);
                        let params = vec![0; params];
                        let launch = Launch { kernel, grid: [1; 3], block: [32, 1, 1], shared: 0, params: &params };
                        rt.launch(Lane::Compute, &launch).expect("a launch");
                        let graph = rt.capture(&mut || again.launch(Lane::Compute, &launch));
                        rt.replay(&graph.expect("nobody else records").expect("a graph")).expect("a replay");
                        here.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
    };
}
