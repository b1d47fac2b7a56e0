//! What the lanes of a warp do together, and clocks.

use super::Slot;
use crate::number::Format;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone)]
pub(crate) struct Shuffle {
    pub mode: ShuffleMode,
    pub d: Slot,
    pub valid: Option<Slot>,
    pub a: Slot,
    pub b: Slot,
    pub c: Slot,
    pub mask: Slot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VoteMode {
    All,
    Any,
    Uniform,
    Ballot,
}

/// Fragments that an `mma` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MmaKind {
    /// m16n8k8 or k16 of 16-bit floats, accumulated in f32.
    Half { format: Format, k: u32 },
    /// m8n8k16, m16n8k16 or m16n8k32 of bytes, accumulated in 32 bits.
    Bytes { m: u32, k: u32, a_signed: bool, b_signed: bool, saturate: bool },
}

#[derive(Debug, Clone)]
pub(crate) struct Mma {
    pub kind: MmaKind,
    pub d: [Slot; 4],
    pub a: [Slot; 4],
    pub b: [Slot; 2],
    pub c: [Slot; 4],
}

/// An asynchronous product of a warpgroup: m64nNk16.
#[derive(Debug, Clone)]
pub(crate) struct Wgmma {
    pub format: Format,
    /// N / 2.
    pub d: Vec<Slot>,
    /// Read if there is no descriptor.
    pub a: [Slot; 4],
    pub a_descriptor: Option<Slot>,
    pub b: Slot,
    /// A predicate: whether to add to what d holds.
    pub accumulate: Slot,
    /// Rows of b's tile run along n.
    pub b_by_n: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    Clock,
    GlobalTimer,
}
