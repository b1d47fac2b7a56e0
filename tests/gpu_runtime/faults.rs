//! Injected faults: a typed error that names the thing, the process alive, the host's data intact.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem::Error;
use tandem::device::emulated::{EmulatedOptions, EmulatedRuntime, FaultPlan};
use tandem::device::{Buffer, Lane, Runtime};

use super::{emulated, options};

fn with(faults: FaultPlan) -> Arc<EmulatedRuntime> {
    emulated(EmulatedOptions { faults, ..options() })
}

fn text(e: &Error) -> String {
    assert!(matches!(e, Error::Device { .. } | Error::Capacity(_)), "a typed error wanted: {e:?}");
    e.to_string()
}

#[test]
fn out_of_memory_at_an_allocation() {
    let rt = with(FaultPlan { out_of_memory_at: Some(2), ..FaultPlan::default() });
    let first = rt.alloc(100).unwrap();
    let e = rt.alloc(200).unwrap_err();
    assert!(matches!(e, Error::Capacity(_)), "{e:?}");
    assert!(text(&e).contains("200 bytes asked for") && text(&e).contains("fault"), "{e}");
    // It was that one only, and what there was is intact.
    let third = rt.alloc(200).unwrap();
    rt.fill(Lane::Compute, first, 1, 100).unwrap();
    rt.copy(Lane::Compute, third, first, 100).unwrap();
    let mut got = [0; 100];
    rt.download(Lane::Compute, third, &mut got).unwrap();
    assert_eq!(got, [1; 100]);
}

#[test]
fn out_of_memory_above_a_size() {
    let rt = with(FaultPlan { out_of_memory_above: Some(1000), ..FaultPlan::default() });
    rt.alloc(1000).unwrap();
    for _ in 0..2 {
        assert!(matches!(rt.alloc(1001), Err(Error::Capacity(_))));
    }
    rt.set_faults(FaultPlan::default());
    rt.alloc(1001).unwrap();
}

#[test]
fn no_pinned_memory() {
    let rt = with(FaultPlan { no_pinned_above: Some(4096), ..FaultPlan::default() });
    rt.pinned(4096).unwrap();
    let e = rt.pinned(4097).err().unwrap();
    assert!(matches!(&e, Error::Capacity(m) if m.contains("4097 bytes of pinned")), "{e}");
    // Pageable memory still goes through a staged upload.
    let ptr = rt.alloc(8).unwrap();
    rt.upload(Lane::Compute, ptr, &[7; 8]).unwrap();
    let mut got = [0; 8];
    rt.download(Lane::Compute, ptr, &mut got).unwrap();
    assert_eq!(got, [7; 8]);
}

/// Where memory cannot be page-locked a slab is pageable: it says so, copies work, and the device does not see it.
#[test]
fn a_slab_that_cannot_be_locked_is_pageable_and_says_so() {
    for jitter in [None, Some(3)] {
        let faults = FaultPlan { no_pinned_above: Some(0), ..FaultPlan::default() };
        let rt = emulated(EmulatedOptions { faults, jitter, ..options() });
        let slab = rt.slab(5000).unwrap();
        let why = slab.pageable().expect("it is not page-locked");
        assert!(why.contains("5000 bytes") && why.contains("pageable") && why.contains("refused"), "{why}");
        assert_eq!(rt.notices(), [why]);
        let (up, down) = (slab.range(0..100), slab.range(4000..4100));
        assert!(up.device().is_null() && slab.memory().device().is_null());
        // SAFETY: no work uses the memory yet.
        unsafe { std::slice::from_raw_parts_mut(up.host(), 100).fill(9) };
        let ptr = rt.alloc(100).unwrap();
        rt.upload_pinned(Lane::HostToDevice, ptr, &up, 0..100).unwrap();
        rt.wait(Lane::DeviceToHost, &rt.record(Lane::HostToDevice).unwrap()).unwrap();
        rt.download_pinned(Lane::DeviceToHost, ptr, &down, 10, 90).unwrap();
        // Its memory is the lanes' until they are done, whoever drops it.
        let seen = slab.memory().clone();
        drop((slab, up, down));
        rt.synchronize_all().unwrap();
        // SAFETY: everything is done, and `seen` keeps the memory.
        let host = unsafe { std::slice::from_raw_parts(seen.host(), 5000) };
        assert!(host[4010..4100].iter().all(|&b| b == 9) && host[4000..4010].iter().all(|&b| b == 0));
    }
}

#[test]
fn a_refused_launch_is_refused_once() {
    let plan = FaultPlan { refuse_launch: Some(2), ..FaultPlan::default() };
    let rt = with(plan);
    let ptr = rt.alloc(1).unwrap();
    rt.fill(Lane::Compute, ptr, 0, 1).unwrap();
    let add = || {
        let write = [tandem::device::emulated::Span::new(ptr, 1)];
        rt.operation(Lane::Compute, "add", &[], &write, |_, w| {
            w[0][0] += 1;
            Ok(())
        })
    };
    add().unwrap();
    let e = add().unwrap_err();
    assert!(matches!(&e, Error::Device { what, .. } if what.contains("add")), "{e}");
    assert!(text(&e).contains("refused"), "{e}");
    add().unwrap();
    let mut got = [0; 1];
    rt.download(Lane::Compute, ptr, &mut got).unwrap();
    assert_eq!(got, [2], "the refused one did not run");
}

#[test]
fn a_kernel_can_be_refused_by_name() {
    let rt = with(FaultPlan { refuse_kernel: Some("bad".into()), ..FaultPlan::default() });
    for _ in 0..2 {
        rt.operation(Lane::Compute, "good", &[], &[], |_, _| Ok(())).unwrap();
        assert!(rt.operation(Lane::Compute, "bad", &[], &[], |_, _| Ok(())).is_err());
    }
    rt.synchronize_all().unwrap();
}

/// At every operation of a small program: whatever is called then says the same.
#[test]
fn a_lost_device_stays_lost() {
    for jitter in [None, Some(3)] {
        for n in 1..=6 {
            let faults = FaultPlan { lost_at: Some(n), ..FaultPlan::default() };
            let rt = emulated(EmulatedOptions { faults, jitter, ..options() });
            let dyn_rt: Arc<dyn Runtime> = rt.clone();
            let buffer = Buffer::new(&dyn_rt, 64).unwrap();
            let pinned = rt.pinned(64).unwrap();
            let host = [5u8; 64];
            let mut back = [6u8; 64];
            let program = |back: &mut [u8]| -> tandem::Result<()> {
                rt.upload(Lane::HostToDevice, buffer.ptr(), &host)?;
                rt.wait(Lane::Compute, &rt.record(Lane::HostToDevice)?)?;
                rt.fill(Lane::Compute, buffer.ptr(), 1, 8)?;
                rt.operation(Lane::Compute, "nothing", &[], &[], |_, _| Ok(()))?;
                rt.wait(Lane::DeviceToHost, &rt.record(Lane::Compute)?)?;
                rt.download_pinned(Lane::DeviceToHost, buffer.ptr(), &pinned, 0, 64)?;
                rt.download(Lane::DeviceToHost, buffer.ptr(), back)
            };
            let Err(e) = program(&mut back) else {
                assert_eq!(n, 6, "only five operations");
                assert_eq!((&back[..8], &back[8..]), (&[1; 8][..], &[5; 56][..]));
                continue;
            };
            let lost = text(&e);
            assert!(lost.contains("lost"), "{lost}");
            assert_eq!((host, back), ([5; 64], [6; 64]), "the host's data is intact");
            // Everything after says the same and returns at once.
            let mut byte = [0];
            let calls = [
                rt.alloc(1).map(|_| ()),
                rt.pinned(1).map(|_| ()),
                rt.memory_free().map(|_| ()),
                rt.upload(Lane::Compute, buffer.ptr(), &[1]),
                rt.download(Lane::Compute, buffer.ptr(), &mut byte),
                rt.record(Lane::DeviceToHost).map(|_| ()),
                rt.synchronize_all(),
                rt.capture(&mut || Ok(())).map(|_| ()),
                rt.operation(Lane::Compute, "more", &[], &[], |_, _| Ok(())),
            ];
            for call in calls {
                assert_eq!(text(&call.unwrap_err()), lost);
            }
            drop(buffer);
        }
    }
}

#[test]
fn a_copy_that_never_ends_is_noticed() {
    for lane in Lane::ALL {
        let faults = FaultPlan { endless_copy: Some(2), ..FaultPlan::default() };
        let watchdog = Duration::from_millis(60);
        let rt = emulated(EmulatedOptions { faults, watchdog, ..options() });
        let dyn_rt: Arc<dyn Runtime> = rt.clone();
        let buffer = Buffer::from_bytes(&dyn_rt, lane, &[1; 32]).unwrap();
        let pinned = rt.pinned(32).unwrap();
        let begin = Instant::now();
        rt.download_pinned(lane, buffer.ptr(), &pinned, 0, 32).unwrap();
        let event = rt.record(lane).unwrap();
        assert!(!rt.is_done(&event).unwrap());
        let e = text(&rt.synchronize(&event).unwrap_err());
        assert!(begin.elapsed() >= watchdog, "it was given its time");
        assert!(e.contains("copy of 32 bytes to the host: has not ended after 0.06 s"), "{e}");
        // From now on nobody waits, and the same is said.
        assert_eq!(text(&rt.synchronize_all().unwrap_err()), e);
        // SAFETY: the copy was abandoned: nothing writes the memory any more.
        assert_eq!(unsafe { std::slice::from_raw_parts(pinned.host(), 32) }, [0; 32]);
        drop(buffer);
    }
}

#[test]
fn other_lanes_wait_for_an_endless_copy_and_are_let_go() {
    let faults = FaultPlan { endless_copy: Some(1), ..FaultPlan::default() };
    let rt = emulated(EmulatedOptions { faults, watchdog: Duration::from_millis(50), ..options() });
    let ptr = rt.alloc(16).unwrap();
    rt.upload(Lane::HostToDevice, ptr, &[1; 16]).unwrap();
    rt.wait(Lane::Compute, &rt.record(Lane::HostToDevice).unwrap()).unwrap();
    let e = rt.download(Lane::Compute, ptr, &mut [0; 16]).unwrap_err();
    assert!(text(&e).contains("copy of 16 bytes to the device: has not ended"), "{e}");
    let begin = Instant::now();
    rt.free(ptr);
    assert!(begin.elapsed() < Duration::from_secs(5), "a free on a lost device does not wait");
}

/// Also with work in the queues and nobody ever waiting.
#[test]
fn a_runtime_with_an_endless_copy_can_be_dropped() {
    let rt = with(FaultPlan { endless_copy: Some(1), ..FaultPlan::default() });
    let ptr = rt.alloc(16).unwrap();
    let pinned = rt.pinned(16).unwrap();
    rt.upload_pinned(Lane::HostToDevice, ptr, &pinned, 0..16).unwrap();
    rt.fill(Lane::HostToDevice, ptr, 1, 16).unwrap();
    let event = rt.record(Lane::HostToDevice).unwrap();
    rt.wait(Lane::Compute, &event).unwrap();
    rt.wait(Lane::DeviceToHost, &event).unwrap();
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(rt);
        done.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(20)).expect("the drop ends");
    drop(event);
}
