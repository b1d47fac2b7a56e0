//! Random programs over lanes and events against the same program run one step after another.

use std::sync::Arc;

use proptest::prelude::*;
use tandem::device::{Buffer, Event, Lane, Pinned, Runtime};

use super::each;

const SIZE: usize = 512;
const BUFFERS: usize = 4;

/// One step, on a lane; `at`, `len` are brought into range.
#[derive(Debug, Clone)]
enum Step {
    Upload {
        dst: usize,
        at: usize,
        len: usize,
        seed: u8,
    },
    Fill {
        dst: usize,
        at: usize,
        len: usize,
        value: u8,
    },
    Copy {
        dst: usize,
        src: usize,
        to: usize,
        from: usize,
        len: usize,
    },
    FromPinned {
        dst: usize,
        at: usize,
        from: usize,
        len: usize,
    },
    ToPinned {
        src: usize,
        at: usize,
        to: usize,
        len: usize,
    },
    /// Host waits for the lane.
    Synchronize,
}

fn step() -> impl Strategy<Value = Step> {
    let (b, n) = (0..BUFFERS, 0..SIZE);
    prop_oneof![
        (b.clone(), n.clone(), n.clone(), any::<u8>()).prop_map(|(dst, at, len, seed)| Step::Upload {
            dst,
            at,
            len,
            seed
        }),
        (b.clone(), n.clone(), n.clone(), any::<u8>()).prop_map(|(dst, at, len, value)| Step::Fill {
            dst,
            at,
            len,
            value
        }),
        (b.clone(), 1..BUFFERS, n.clone(), n.clone(), n.clone()).prop_map(|(dst, d, to, from, len)| {
            Step::Copy { dst, src: (dst + d) % BUFFERS, to, from, len }
        }),
        (b.clone(), n.clone(), n.clone(), n.clone()).prop_map(|(dst, at, from, len)| Step::FromPinned {
            dst,
            at,
            from,
            len
        }),
        (b, n.clone(), n.clone(), n).prop_map(|(src, at, to, len)| Step::ToPinned { src, at, to, len }),
        Just(Step::Synchronize),
    ]
}

/// Runs steps one after another, on the host.
fn run_model(steps: &[(Lane, Step)]) -> (Vec<Vec<u8>>, Vec<u8>) {
    let mut buffers = vec![vec![0u8; SIZE]; BUFFERS];
    let mut pinned: Vec<u8> = (0..SIZE).map(|i| i as u8).collect();
    for (_, step) in steps {
        match *step {
            Step::Upload { dst, at, len, seed } => {
                let len = len.min(SIZE - at);
                for (i, b) in buffers[dst][at..at + len].iter_mut().enumerate() {
                    *b = seed.wrapping_add(i as u8);
                }
            }
            Step::Fill { dst, at, len, value } => {
                let len = len.min(SIZE - at);
                buffers[dst][at..at + len].fill(value);
            }
            Step::Copy { dst, src, to, from, len } => {
                let len = len.min(SIZE - to.max(from));
                let bytes = buffers[src][from..from + len].to_vec();
                buffers[dst][to..to + len].copy_from_slice(&bytes);
            }
            Step::FromPinned { dst, at, from, len } => {
                let len = len.min(SIZE - at.max(from));
                buffers[dst][at..at + len].copy_from_slice(&pinned[from..from + len]);
            }
            Step::ToPinned { src, at, to, len } => {
                let len = len.min(SIZE - at.max(to));
                pinned[to..to + len].copy_from_slice(&buffers[src][at..at + len]);
            }
            Step::Synchronize => {}
        }
    }
    (buffers, pinned)
}

/// Puts an event between steps of different lanes that use the same buffer, and no others.
struct Ordered<'a> {
    rt: &'a Arc<dyn Runtime>,
    /// Of each buffer (the last is the pinned one): after its latest use, per lane.
    used: Vec<[Option<Event>; 3]>,
}

impl Ordered<'_> {
    fn before(&self, lane: Lane, buffers: &[usize]) {
        for &b in buffers {
            for (l, event) in self.used[b].iter().enumerate() {
                if let Some(event) = event.as_ref().filter(|_| l != lane as usize) {
                    self.rt.wait(lane, event).unwrap();
                }
            }
        }
    }
    fn after(&mut self, lane: Lane, buffers: &[usize]) {
        let event = self.rt.record(lane).unwrap();
        for &b in buffers {
            self.used[b][lane as usize] = Some(event.clone());
        }
    }
}

fn run(rt: &Arc<dyn Runtime>, steps: &[(Lane, Step)]) -> (Vec<Vec<u8>>, Vec<u8>) {
    let buffers: Vec<Buffer> =
        (0..BUFFERS).map(|_| Buffer::from_bytes(rt, Lane::Compute, &[0; SIZE]).unwrap()).collect();
    let pinned: Arc<dyn Pinned> = rt.pinned(SIZE).unwrap();
    for i in 0..SIZE {
        // SAFETY: in range, and no work uses the memory yet.
        unsafe { *pinned.host().add(i) = i as u8 };
    }
    rt.synchronize_all().unwrap();
    let mut order = Ordered { rt, used: vec![[None, None, None]; BUFFERS + 1] };
    for (lane, step) in steps {
        let lane = *lane;
        let touched = match *step {
            Step::Upload { dst, .. } | Step::Fill { dst, .. } => vec![dst],
            Step::Copy { dst, src, .. } => vec![dst, src],
            Step::FromPinned { dst, .. } => vec![dst, BUFFERS],
            Step::ToPinned { src, .. } => vec![src, BUFFERS],
            Step::Synchronize => vec![],
        };
        order.before(lane, &touched);
        match *step {
            Step::Upload { dst, at, len, seed } => {
                let len = len.min(SIZE - at);
                let data: Vec<u8> = (0..len).map(|i| seed.wrapping_add(i as u8)).collect();
                rt.upload(lane, buffers[dst].ptr().add(at), &data).unwrap();
            }
            Step::Fill { dst, at, len, value } => {
                rt.fill(lane, buffers[dst].ptr().add(at), value, len.min(SIZE - at)).unwrap();
            }
            Step::Copy { dst, src, to, from, len } => {
                let len = len.min(SIZE - to.max(from));
                let (dst, src) = (buffers[dst].ptr().add(to), buffers[src].ptr().add(from));
                rt.copy(lane, dst, src, len).unwrap();
            }
            Step::FromPinned { dst, at, from, len } => {
                let len = len.min(SIZE - at.max(from));
                rt.upload_pinned(lane, buffers[dst].ptr().add(at), &pinned, from..from + len).unwrap();
            }
            Step::ToPinned { src, at, to, len } => {
                let len = len.min(SIZE - at.max(to));
                rt.download_pinned(lane, buffers[src].ptr().add(at), &pinned, to, len).unwrap();
            }
            Step::Synchronize => rt.synchronize(&rt.record(lane).unwrap()).unwrap(),
        }
        order.after(lane, &touched);
    }
    rt.synchronize_all().unwrap();
    let read = |b: &Buffer| {
        let mut out = vec![0; SIZE];
        rt.download(Lane::Compute, b.ptr(), &mut out).unwrap();
        out
    };
    // SAFETY: everything is done, and the memory is alive.
    let host = unsafe { std::slice::from_raw_parts(pinned.host(), SIZE) }.to_vec();
    (buffers.iter().map(read).collect(), host)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn lanes_with_events_do_what_one_step_after_another_does(
        steps in prop::collection::vec((prop::sample::select(&Lane::ALL[..]), step()), 0..30),
    ) {
        let want = run_model(&steps);
        each(|name, rt| assert!(run(&rt, &steps) == want, "{name}"));
    }
}
