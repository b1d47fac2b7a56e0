//! Accesses to memory.

use super::Slot;
use crate::memory::Semantics;
use crate::types::{Register, Type};

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Generic,
    Global,
    Shared,
    Local,
    Param,
    Constant,
}

/// A register (with `wide` of 64 bits) and an offset.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address {
    pub base: Slot,
    pub wide: bool,
    pub offset: i64,
}

/// A load or a store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub place: Place,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub bytes: u8,
    /// Elements: 1, 2 or 4.
    pub count: u8,
    /// Sign-extended to the register.
    pub signed: bool,
    pub semantics: Semantics,
    pub address: Address,
    pub registers: [Register; 4],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Exchange,
    CompareSwap,
    Min,
    Max,
    And,
    Or,
    Xor,
    Inc,
    Dec,
}

#[derive(Debug, Clone)]
pub(crate) struct Atomic {
    pub op: AtomicOp,
    pub kind: Type,
    pub place: Place,
    pub address: Address,
    /// None of `red`.
    pub d: Option<Register>,
    pub a: Register,
    /// The new value of `cas`.
    pub b: Option<Register>,
}

/// A copy of a box of a matrix.
#[derive(Debug, Clone)]
pub(crate) struct Bulk {
    pub to: Address,
    pub map: Address,
    /// Column and row of its first element.
    pub at: [Slot; 2],
    pub barrier: Address,
}
