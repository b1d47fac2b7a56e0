//! What happens in a run, from a seed.

use tandem::program::{COPY_LANE_ROWS, Far};

use super::random::Random;

/// Scripts that one engine runs one after the other, if its lanes act in turn. The engine begins with the first of them, so that a
/// script that fails is run again with all that came before it.
pub const BATCH: u64 = 64;

/// Units on the CPU ([`Setup::on_host`]): none; boundaries; the last block, the one between, a block and
/// the head, the last block and the head.
const SPLITS: [u8; 14] = [0, 0, 0, 0, 0, 0, 0b1, 0b11, 0b11, 0b111, 0b1000, 0b100, 0b1_0010, 0b1_1000];

/// Blocks whose feed-forward alone is on the CPU ([`Setup::apart`]): none; all, the first, the last two.
const APART: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0b111, 0b1, 0b110];

/// Who does the work of lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lanes {
    /// Threads, with random delays if there is a seed: orders come by chance.
    Threads(Option<u64>),
    /// Whoever waits, in an order that the script's seed makes.
    InTurn,
}

/// The engine of a run. Few values each, so that engines are used again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Setup {
    /// Whether some blocks see a window only.
    pub windows: bool,
    /// Of the units embedding, three blocks and head, those on the CPU: a bit each.
    pub on_host: u8,
    /// Of the three blocks, those whose feed-forward is on the CPU where the rest is not, as experts are: a bit each.
    pub apart: u8,
    pub sequences: usize,
    pub rows: usize,
    pub sub_batches: usize,
    pub device_pages: usize,
    pub far_pages: usize,
    pub far: Far,
    pub lanes: Lanes,
    /// [`tandem::program::Placement::copy_lane_rows`].
    pub copy_lane_rows: u32,
}

impl Setup {
    /// One request at a time, all on the device.
    pub fn alone(windows: bool) -> Setup {
        Setup {
            windows,
            on_host: 0,
            apart: 0,
            sequences: 1,
            rows: 16,
            sub_batches: 1,
            device_pages: 3,
            far_pages: 0,
            far: Far::Attend,
            lanes: Lanes::Threads(None),
            copy_lane_rows: COPY_LANE_ROWS,
        }
    }

    fn random(r: &mut Random, in_turn: bool) -> Setup {
        Setup {
            windows: r.chance(35),
            on_host: *r.of(&SPLITS),
            apart: 0,
            sequences: *r.of(&[2, 5]),
            rows: *r.of(&[5, 16]),
            sub_batches: *r.of(&[2, 3]),
            device_pages: *r.of(&[2, 3, 5]),
            far_pages: *r.of(&[2, 3, 8]),
            far: *r.of(&[Far::Attend, Far::Attend, Far::Stream]),
            lanes: match in_turn {
                true => Lanes::InTurn,
                false => Lanes::Threads(*r.of(&[None, None, Some(1)])),
            },
            copy_lane_rows: *r.of(&[1, 1, COPY_LANE_ROWS]),
        }
    }
}

/// [`Setup::apart`] by a generator of its own, so that all else of a script is that of its seed as before.
fn apart(seed: u64) -> u8 {
    *Random(seed ^ 0xa9a7).of(&APART)
}

/// Counted from now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// This launch is refused.
    Refused(u64),
    /// This job of the host panics.
    Panic(u64),
    /// The device is lost at this operation.
    Lost(u64),
    /// This copy never ends.
    Endless(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    Submit(usize),
    /// So many at once.
    Burst(usize),
    /// A request that cannot be: empty, too long for the context, too long for the memories, of no token.
    Bad(usize),
    Cancel(usize),
    /// Whoever asked goes away.
    Leave(usize),
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
    /// On lanes with threads. `most`: acts, at most.
    pub fn of(seed: u64, strategies: &[&str], most: usize) -> Script {
        let r = &mut Random(seed);
        let setup = Setup { apart: apart(seed), ..Setup::random(r, false) };
        Script::with(seed, setup, r, strategies, most)
    }

    /// On lanes that act in turn.
    pub fn in_turn(seed: u64, strategies: &[&str], most: usize) -> Script {
        let batch = seed / BATCH;
        let setup = Setup { apart: apart(batch), ..Setup::random(&mut Random(batch ^ 0x5e70), true) };
        Script::with(seed, setup, &mut Random(seed), strategies, most)
    }

    fn with(seed: u64, setup: Setup, r: &mut Random, strategies: &[&str], most: usize) -> Script {
        let strategy = (*r.of(strategies)).to_string();
        // Most scripts have no fault, some have several, a few lose the device.
        let faults = if r.chance(75) { 0 } else { 8 };
        let lost = r.chance(2);
        let n = 1 + r.below(40);
        let act = |r: &mut Random| match r.below(100) {
            0..27 => Act::Submit(r.below(1 << 16)),
            27 => Act::Burst(r.below(12)),
            28 => Act::Bad(r.below(4)),
            29 => Act::Leave(r.below(1 << 16)),
            30..36 => Act::Cancel(r.below(1 << 16)),
            x if x < 36 + faults => Act::Fault(match r.chance(50) {
                true => Fault::Refused(1 + r.below(60) as u64),
                false => Fault::Panic(1 + r.below(30) as u64),
            }),
            _ => Act::Step,
        };
        let mut acts: Vec<Act> = (0..n).map(|_| act(r)).collect();
        if lost {
            // On threads an endless copy is only known by how long it takes.
            let endless = setup.lanes == Lanes::InTurn && r.chance(40);
            let fault = match endless {
                true => Fault::Endless(1 + r.below(60) as u64),
                false => Fault::Lost(1 + r.below(200) as u64),
            };
            acts.insert(r.below(n), Act::Fault(fault));
        }
        acts.truncate(most);
        Script { seed, setup, strategy, acts }
    }
}
