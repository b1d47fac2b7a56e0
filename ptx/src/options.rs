//! How a launch runs, and what it did.

use std::ops::Range;

/// When asynchronous copies land: both are allowed, and a kernel must not depend on which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Landing {
    /// When their thread waits for them.
    #[default]
    AtWait,
    /// At once.
    AtOnce,
}

/// In which order blocks run, and the warps of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// By their number.
    #[default]
    Ascending,
    /// The last first.
    Descending,
    /// By a random number that begins with this.
    Shuffled(u64),
}

/// Options of a launch.
#[derive(Debug, Clone)]
pub struct Options {
    /// When asynchronous copies land.
    pub copies: Landing,
    /// The order of blocks and warps.
    pub order: Order,
    /// Instructions that a warp executes before another one of its block has its turn, if nothing stops it before. Short
    /// turns show what a missing barrier does.
    pub turn: u32,
    /// Whether a read of shared memory that nobody wrote is a fault.
    pub watch_shared: bool,
    /// Whether barriers and warp instructions go on without threads that have exited, as devices do since compute
    /// capability 7.0. A kernel that relies on it is likely wrong.
    pub excuse_exited: bool,
    /// Most instructions that a warp executes in a block; `None`: a loop without end is one.
    pub budget: Option<u64>,
    /// Of the blocks in order of their number (x fastest), those that run: a launch may be divided among
    /// threads. Reads through the read-only path are then compared with the writes of the same part only.
    pub blocks: Option<Range<u64>>,
}

impl Default for Options {
    /// Late copies, ascending order, turns of 2^14 instructions, shared memory watched, exited threads missed, 2^32 instructions a warp, all blocks.
    fn default() -> Options {
        Options {
            copies: Landing::default(),
            order: Order::default(),
            turn: 1 << 14,
            watch_shared: true,
            excuse_exited: false,
            budget: Some(1 << 32),
            blocks: None,
        }
    }
}

/// What a launch did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Blocks that ran.
    pub blocks: u64,
    /// Instructions that warps executed.
    pub instructions: u64,
    /// The same, times the lanes that took part.
    pub lane_instructions: u64,
    /// Instructions that only some of a warp's live lanes executed.
    pub divergent: u64,
    /// `mma` of warps.
    pub mma: u64,
}

/// 0..count in this order.
pub(crate) fn permutation(order: Order, count: u64) -> Box<dyn Iterator<Item = u64>> {
    let seed = match order {
        Order::Ascending => return Box::new(0..count),
        Order::Descending => return Box::new((0..count).rev()),
        Order::Shuffled(seed) => seed,
    };
    let mut all: Vec<u64> = (0..count).collect();
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    for i in (1..all.len()).rev() {
        // SplitMix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        all.swap(i, ((z ^ z >> 31) % (i as u64 + 1)) as usize);
    }
    Box::new(all.into_iter())
}
