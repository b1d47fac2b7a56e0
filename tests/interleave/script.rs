//! What happens in a run, from a seed.

use tandem::program::Far;

use super::random::Random;

/// The engine of a run. Few values each, so that engines are used again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Setup {
    /// Of the units embedding, blocks, head, those on the CPU.
    pub on_host: usize,
    pub sequences: usize,
    pub rows: usize,
    pub sub_batches: usize,
    pub device_pages: usize,
    pub far_pages: usize,
    pub far: Far,
    /// Random delays on the device's lanes.
    pub jitter: Option<u64>,
}

impl Setup {
    /// One request at a time, all on the device.
    pub fn alone() -> Setup {
        Setup {
            on_host: 0,
            sequences: 1,
            rows: 16,
            sub_batches: 1,
            device_pages: 3,
            far_pages: 0,
            far: Far::Attend,
            jitter: None,
        }
    }

    fn random(r: &mut Random) -> Setup {
        Setup {
            on_host: *r.of(&[0, 0, 0, 2]),
            sequences: *r.of(&[2, 5]),
            rows: *r.of(&[5, 16]),
            sub_batches: *r.of(&[2, 3]),
            device_pages: *r.of(&[3, 5]),
            far_pages: *r.of(&[3, 8]),
            far: *r.of(&[Far::Attend, Far::Attend, Far::Stream]),
            jitter: *r.of(&[None, None, Some(1)]),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The so many-th launch from now is refused.
    Refused(u64),
    /// The device is lost at the so many-th operation from now.
    Lost(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    Submit(usize),
    Cancel(usize),
    Step,
    Fault(Fault),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    pub seed: u64,
    pub setup: Setup,
    pub strategy: String,
    pub acts: Vec<Act>,
}

impl Script {
    /// `most`: acts, at most.
    pub fn of(seed: u64, strategies: &[&str], most: usize) -> Script {
        let r = &mut Random(seed);
        let setup = Setup::random(r);
        let strategy = (*r.of(strategies)).to_string();
        // Most scripts have no fault, some have several, a few lose the device.
        let faults = if r.chance(75) { 0 } else { 8 };
        let lost = r.chance(2);
        let n = 1 + r.below(40);
        let act = |r: &mut Random| match r.below(100) {
            0..30 => Act::Submit(r.below(1 << 16)),
            30..36 => Act::Cancel(r.below(1 << 16)),
            x if x < 36 + faults => Act::Fault(Fault::Refused(1 + r.below(60) as u64)),
            _ => Act::Step,
        };
        let mut acts: Vec<Act> = (0..n).map(|_| act(r)).collect();
        if lost {
            acts.insert(r.below(n), Act::Fault(Fault::Lost(1 + r.below(200) as u64)));
        }
        acts.truncate(most);
        Script { seed, setup, strategy, acts }
    }
}
