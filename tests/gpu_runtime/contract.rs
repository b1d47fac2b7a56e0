//! What every accelerator must do.

use std::sync::Arc;

use tandem::Error;
use tandem::device::{Buffer, Lane, Pinned, Runtime};

use super::each;

/// A view of pinned memory; no work in flight touches it.
#[allow(clippy::mut_from_ref)] // the memory is the device's too: nobody owns it alone
fn host(pinned: &Arc<dyn Pinned>) -> &mut [u8] {
    // SAFETY: `pinned` is alive, and the tests call this between synchronised steps only.
    unsafe { std::slice::from_raw_parts_mut(pinned.host(), pinned.len()) }
}

fn bytes_of(rt: &Arc<dyn Runtime>, buffer: &Buffer) -> Vec<u8> {
    let mut out = vec![0; buffer.len()];
    rt.download(Lane::Compute, buffer.ptr(), &mut out).unwrap();
    out
}

fn pattern(n: usize, seed: u8) -> Vec<u8> {
    (0..n).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

#[test]
fn memory_is_aligned_counted_and_given_back() {
    each(|name, rt| {
        let before = rt.memory_free().unwrap();
        assert!(before <= rt.info().memory_total, "{name}");
        let buffers: Vec<_> = (1..6).map(|i| Buffer::new(&rt, i * 100).unwrap()).collect();
        for b in &buffers {
            assert_eq!(b.ptr().0 % 256, 0, "{name}");
        }
        assert!(rt.memory_free().unwrap() <= before, "{name}");
        drop(buffers);
        assert_eq!(rt.memory_free().unwrap(), before, "{name}");
    });
}

#[test]
fn more_than_there_is_is_a_capacity_error() {
    each(|name, rt| {
        let total = rt.info().memory_total as usize;
        let refused = rt.alloc(total + 1).unwrap_err();
        // With the numbers, in each runtime's own units.
        assert!(
            matches!(&refused, Error::Capacity(m) if m.contains(" asked for, ") && m.contains(" free")),
            "{name}: {refused}"
        );
        // And nothing is broken.
        let b = Buffer::from_bytes(&rt, Lane::Compute, &pattern(100, 1)).unwrap();
        assert_eq!(bytes_of(&rt, &b), pattern(100, 1), "{name}");
    });
}

#[test]
fn an_upload_is_staged() {
    each(|name, rt| {
        let b = Buffer::new(&rt, 64 << 10).unwrap();
        let mut source = pattern(64 << 10, 7);
        rt.upload(Lane::HostToDevice, b.ptr(), &source).unwrap();
        source.fill(0);
        rt.synchronize(&rt.record(Lane::HostToDevice).unwrap()).unwrap();
        assert_eq!(bytes_of(&rt, &b), pattern(64 << 10, 7), "{name}");
    });
}

#[test]
fn work_of_a_lane_runs_in_order() {
    each(|name, rt| {
        for lane in Lane::ALL {
            let a = Buffer::new(&rt, 1000).unwrap();
            let b = Buffer::new(&rt, 1000).unwrap();
            rt.fill(lane, a.ptr(), 1, 1000).unwrap();
            rt.copy(lane, b.ptr(), a.ptr(), 1000).unwrap();
            rt.upload(lane, a.ptr().add(10), &[2; 10]).unwrap();
            rt.copy(lane, b.ptr().add(500), a.ptr(), 20).unwrap();
            rt.fill(lane, b.ptr().add(505), 3, 1).unwrap();
            let mut got = vec![0; 1000];
            rt.download(lane, b.ptr(), &mut got).unwrap();
            let mut want = vec![1; 1000];
            want[510..520].fill(2);
            want[505] = 3;
            assert_eq!(got, want, "{name}, {lane:?}");
        }
    });
}

#[test]
fn events_order_lanes() {
    each(|name, rt| {
        let n = 10_000;
        let (up, down) = (rt.pinned(n).unwrap(), rt.pinned(n).unwrap());
        let a = Buffer::new(&rt, n).unwrap();
        let b = Buffer::new(&rt, n).unwrap();
        for round in 0..20u8 {
            host(&up).copy_from_slice(&pattern(n, round));
            rt.upload_pinned(Lane::HostToDevice, a.ptr(), &up, 0..n).unwrap();
            let uploaded = rt.record(Lane::HostToDevice).unwrap();
            rt.wait(Lane::Compute, &uploaded).unwrap();
            rt.copy(Lane::Compute, b.ptr(), a.ptr(), n).unwrap();
            let computed = rt.record(Lane::Compute).unwrap();
            rt.wait(Lane::DeviceToHost, &computed).unwrap();
            rt.download_pinned(Lane::DeviceToHost, b.ptr(), &down, 0, n).unwrap();
            let downloaded = rt.record(Lane::DeviceToHost).unwrap();
            rt.synchronize(&downloaded).unwrap();
            for event in [&uploaded, &computed, &downloaded] {
                assert!(rt.is_done(event).unwrap(), "{name}: what came before is done, too");
                rt.synchronize(event).unwrap();
            }
            assert_eq!(host(&down), pattern(n, round), "{name}, round {round}");
        }
    });
}

#[test]
fn an_event_of_an_idle_lane_is_soon_done() {
    each(|name, rt| {
        let event = rt.record(Lane::DeviceToHost).unwrap();
        rt.synchronize(&event).unwrap();
        assert!(rt.is_done(&event).unwrap(), "{name}");
        // Waiting for what is done, or for one's own lane, changes nothing.
        rt.wait(Lane::DeviceToHost, &event).unwrap();
        rt.wait(Lane::Compute, &event).unwrap();
        rt.synchronize_all().unwrap();
    });
}

#[test]
fn pinned_memory_is_zeroed_and_copied_by_ranges() {
    each(|name, rt| {
        let pinned = rt.pinned(4096).unwrap();
        assert_eq!((pinned.len(), pinned.is_empty()), (4096, false));
        assert!(host(&pinned).iter().all(|&b| b == 0), "{name}");
        host(&pinned).copy_from_slice(&pattern(4096, 3));
        let b = Buffer::new(&rt, 100).unwrap();
        rt.upload_pinned(Lane::Compute, b.ptr(), &pinned, 50..150).unwrap();
        rt.download_pinned(Lane::Compute, b.ptr().add(20), &pinned, 4000, 30).unwrap();
        rt.synchronize_all().unwrap();
        let mut want = pattern(4096, 3);
        want.copy_within(70..100, 4000);
        assert_eq!(host(&pinned), want, "{name}");
        let beyond = rt.upload_pinned(Lane::Compute, b.ptr(), &pinned, 4090..4097);
        assert!(beyond.is_err(), "{name}: past the end of pinned memory");
    });
}

#[test]
fn recorded_work_runs_when_replayed() {
    each(|name, rt| {
        let a = Buffer::from_bytes(&rt, Lane::Compute, &[1; 64]).unwrap();
        let b = Buffer::from_bytes(&rt, Lane::Compute, &[0; 64]).unwrap();
        rt.synchronize_all().unwrap();
        let graph = rt.capture(&mut || {
            rt.copy(Lane::Compute, b.ptr(), a.ptr(), 32)?;
            rt.fill(Lane::Compute, a.ptr(), 9, 1)
        });
        let Some(graph) = graph.unwrap() else {
            println!("skipped: {name} does not record");
            return;
        };
        assert_eq!(bytes_of(&rt, &b), [0; 64], "{name}: recording runs nothing");
        for value in 2..6u8 {
            rt.fill(Lane::Compute, a.ptr(), value, 64).unwrap();
            rt.replay(&graph).unwrap();
            assert_eq!(bytes_of(&rt, &b)[..33], [[value; 32].as_slice(), &[0]].concat(), "{name}");
            assert_eq!(bytes_of(&rt, &a)[..2], [9, value], "{name}");
        }
    });
}

#[test]
fn a_recording_that_fails_leaves_nothing() {
    each(|name, rt| {
        let b = Buffer::from_bytes(&rt, Lane::Compute, &[5; 16]).unwrap();
        rt.synchronize_all().unwrap();
        let failed = rt.capture(&mut || {
            rt.fill(Lane::Compute, b.ptr(), 6, 16)?;
            Err(Error::Run("enough".into()))
        });
        assert!(matches!(failed, Err(Error::Run(_)) | Ok(None)), "{name}");
        rt.fill(Lane::Compute, b.ptr(), 7, 1).unwrap();
        assert_eq!(bytes_of(&rt, &b)[..2], [7, 5], "{name}: later work is not recorded, earlier did not run");
    });
}

#[test]
fn free_waits_for_work_in_flight() {
    each(|name, rt| {
        let down = rt.pinned(100_000).unwrap();
        for round in 0..10u8 {
            let b = Buffer::new(&rt, 100_000).unwrap();
            rt.fill(Lane::DeviceToHost, b.ptr(), round, b.len()).unwrap();
            rt.download_pinned(Lane::DeviceToHost, b.ptr(), &down, 0, b.len()).unwrap();
            drop(b);
            // Its memory is somebody else's now.
            let other = Buffer::new(&rt, 100_000).unwrap();
            rt.fill(Lane::Compute, other.ptr(), 0xEE, other.len()).unwrap();
            rt.synchronize_all().unwrap();
            assert!(host(&down).iter().all(|&b| b == round), "{name}, round {round}");
        }
    });
}

/// One registration, several ranges: each is pinned memory of its own, and keeps the whole alive.
#[test]
fn a_slab_serves_its_ranges() {
    each(|name, rt| {
        for size in [1, 4096, 10_001, (2 << 20) + 5] {
            let slab = rt.slab(size).unwrap();
            assert_eq!((slab.memory().len(), slab.pageable()), (size, None), "{name}: of exact size");
            assert!(host(slab.memory()).iter().all(|&b| b == 0), "{name}");
            assert_eq!(slab.memory().host() as usize % 4096, 0, "{name}");
        }
        let slab = rt.slab(10_001).unwrap();
        let (all, first, last) = (slab.memory().clone(), slab.range(0..5000), slab.range(5000..10_001));
        drop(slab);
        assert_eq!(
            (last.host() as usize, last.device().0),
            (all.host() as usize + 5000, all.device().0 + 5000)
        );
        assert_eq!((first.len(), last.len()), (5000, 5001));
        drop(all);
        host(&first).copy_from_slice(&pattern(5000, 1));
        let b = Buffer::new(&rt, 5000).unwrap();
        rt.upload_pinned(Lane::Compute, b.ptr(), &first, 0..5000).unwrap();
        drop(first);
        rt.download_pinned(Lane::Compute, b.ptr().add(100), &last, 1, 4900).unwrap();
        rt.synchronize_all().unwrap();
        assert_eq!(host(&last)[1..4901], pattern(5000, 1)[100..], "{name}");
        assert_eq!((host(&last)[0], &host(&last)[4901..]), (0, &[0; 100][..]), "{name}");
        assert!(rt.download_pinned(Lane::Compute, b.ptr(), &last, 5000, 2).is_err(), "{name}: past its end");
    });
}

#[test]
fn a_kernel_that_does_not_exist_is_refused() {
    each(|name, rt| {
        assert!(!rt.has_kernel("no_such_kernel"), "{name}");
        let launch = tandem::device::Launch {
            kernel: "no_such_kernel",
            grid: [1; 3],
            block: [32, 1, 1],
            shared: 0,
            params: &[],
        };
        let e = rt.launch(Lane::Compute, &launch).unwrap_err();
        assert!(matches!(&e, Error::Device { what, .. } if what.contains("no_such_kernel")), "{name}: {e}");
        rt.synchronize_all().unwrap();
    });
}

#[test]
fn many_threads_may_call() {
    each(|name, rt| {
        std::thread::scope(|s| {
            for t in 0..4u8 {
                let rt = rt.clone();
                s.spawn(move || {
                    for round in 0..10 {
                        let b = Buffer::from_bytes(&rt, Lane::Compute, &pattern(500, t + round)).unwrap();
                        assert_eq!(bytes_of(&rt, &b), pattern(500, t + round));
                    }
                });
            }
        });
        rt.synchronize_all().unwrap_or_else(|e| panic!("{name}: {e}"));
    });
}
