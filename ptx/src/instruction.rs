//! Decoded instructions: operands are places in a warp's register files, with constants and special registers among them.

mod arithmetic;
mod memory;
mod warp;

pub(crate) use arithmetic::*;
pub(crate) use memory::*;
pub(crate) use warp::*;

use crate::memory::Scope;
use crate::types::Register;

/// A place in the file that the instruction reads: predicates, 32-bit or 64-bit registers.
pub(crate) type Slot = u32;

/// An instruction of a kernel.
#[derive(Debug, Clone)]
pub(crate) struct Instruction {
    pub op: Op,
    /// A predicate, and whether it must be false.
    pub guard: Option<(Slot, bool)>,
    pub line: u32,
}

/// What an instruction does. `d` is written; `a`, `b`, `c` are read.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Move32 {
        d: Slot,
        a: Slot,
    },
    Move64 {
        d: Slot,
        a: Slot,
    },
    MovePred {
        d: Slot,
        a: Slot,
    },
    Pack {
        d: Register,
        parts: Box<[Register]>,
    },
    Unpack {
        parts: Box<[Register]>,
        a: Register,
    },
    Clock {
        d: Register,
        clock: Clock,
    },
    Select {
        d: Register,
        a: Slot,
        b: Slot,
        p: Slot,
    },
    Int {
        op: IntOp,
        width: Width,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    IntUnary {
        op: IntUnary,
        width: Width,
        d: Slot,
        a: Slot,
    },
    Shift {
        op: ShiftOp,
        width: Width,
        d: Slot,
        a: Slot,
        by: Slot,
    },
    Count {
        op: CountOp,
        wide: bool,
        d: Slot,
        a: Slot,
    },
    MadLow {
        width: Width,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    MadHigh {
        signed: bool,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    /// Of 16 bits to 32 or of 32 to 64.
    Wide {
        signed: bool,
        from: Width,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Option<Slot>,
    },
    Triple {
        op: TripleOp,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Extract {
        signed: bool,
        wide: bool,
        d: Slot,
        a: Slot,
        at: Slot,
        length: Slot,
    },
    Insert {
        wide: bool,
        d: Slot,
        a: Slot,
        b: Slot,
        at: Slot,
        length: Slot,
    },
    Logic {
        op: Logic,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    NotPred {
        d: Slot,
        a: Slot,
    },
    SetPred {
        compare: Box<Compare>,
        d: Slot,
        other: Option<Slot>,
    },
    Set {
        compare: Box<Compare>,
        float: bool,
        d: Slot,
    },
    Float {
        op: FloatOp,
        mode: Mode,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    Fma {
        mode: Mode,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    FloatUnary {
        op: FloatUnary,
        mode: Mode,
        d: Slot,
        a: Slot,
    },
    Double {
        op: FloatOp,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    DoubleFma {
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    DoubleUnary {
        op: FloatUnary,
        d: Slot,
        a: Slot,
    },
    Half {
        half: Half,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    /// 32 bits to 64 or fewer to more, zeros above.
    Extend {
        d: Slot,
        a: Slot,
    },
    /// The low bits of a 64-bit register.
    Low {
        d: Slot,
        a: Slot,
        mask: u32,
    },
    /// The low bits of a 32-bit register.
    Low32 {
        d: Slot,
        a: Slot,
        mask: u32,
    },
    Convert(Box<Convert>),
    Load(Access),
    Store(Access),
    Atomic(Box<Atomic>),
    IsSpace {
        place: Place,
        d: Slot,
        a: Slot,
    },
    CopyAsync {
        to: Address,
        from: Address,
        bytes: u32,
        source: Option<Slot>,
    },
    CopyCommit,
    CopyWait {
        groups: u32,
    },
    CopyWaitAll,
    Branch {
        target: u32,
    },
    Exit,
    Barrier {
        id: Slot,
        count: Option<Slot>,
        arrive: bool,
    },
    WarpBarrier {
        mask: Slot,
    },
    Shuffle(Box<Shuffle>),
    Vote {
        mode: VoteMode,
        d: Register,
        a: Slot,
        negated: bool,
        mask: Slot,
    },
    ActiveMask {
        d: Slot,
    },
    Reduce {
        op: AtomicOp,
        signed: bool,
        d: Slot,
        a: Slot,
        mask: Slot,
    },
    Mma(Box<Mma>),
    LoadMatrix {
        count: u8,
        transposed: bool,
        d: [Slot; 4],
        address: Address,
    },
    MoveMatrix {
        d: Slot,
        a: Slot,
    },
    MbarrierInit {
        address: Address,
        count: Slot,
    },
    MbarrierArrive {
        address: Address,
        bytes: Option<Slot>,
    },
    MbarrierTest {
        d: Slot,
        address: Address,
        parity: Slot,
    },
    BulkCopy(Box<Bulk>),
    Wgmma(Box<Wgmma>),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait {
        groups: u32,
    },
    Fence {
        scope: Scope,
    },
    Nanosleep,
    Trap,
    /// A hint.
    Nothing,
}
