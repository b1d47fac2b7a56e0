//! Decoded instructions: operands are places in a warp's register files, with constants and special registers among them.

use crate::memory::{Scope, Semantics};
use crate::number::{Format, Round};
use crate::types::{Register, Type};

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

/// Widths of integers in registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    W16,
    W32,
    W64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntOp {
    Add,
    Sub,
    MulLow,
    MulHigh { signed: bool },
    Div { signed: bool },
    Rem { signed: bool },
    Min { signed: bool },
    Max { signed: bool },
    And,
    Or,
    Xor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntUnary {
    Not,
    Neg,
    Abs,
    /// Logical: 1 of zero.
    CNot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShiftOp {
    Left,
    Right { signed: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CountOp {
    Ones,
    LeadingZeros,
    Reverse,
    /// `bfind`: the place of the highest bit that differs from the sign, or all ones.
    Find {
        signed: bool,
        shift: bool,
    },
}

/// Three 32-bit words to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TripleOp {
    /// Its truth table.
    Lop3(u8),
    Permute(PermuteMode),
    FunnelLeft {
        wrap: bool,
    },
    FunnelRight {
        wrap: bool,
    },
    /// Bytes by bytes: which of the two are signed.
    Dot4 {
        a_signed: bool,
        b_signed: bool,
    },
    /// |a - b| + c.
    Sad {
        signed: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PermuteMode {
    Select,
    Forward4,
    Backward4,
    Replicate8,
    EdgeLeft,
    EdgeRight,
    Replicate16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

/// Comparisons; those that end in `U` hold of unordered numbers too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Test {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    EqU,
    NeU,
    LtU,
    LeU,
    GtU,
    GeU,
    Ordered,
    Unordered,
}

/// Numbers that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compared {
    Unsigned32,
    /// Also 16 bits: sign-extended first.
    Signed32,
    Signed16,
    Unsigned64,
    Signed64,
    F32 {
        flush: bool,
    },
    F64,
    Half(Format),
}

#[derive(Debug, Clone)]
pub(crate) struct Compare {
    pub test: Test,
    pub kind: Compared,
    pub a: Slot,
    pub b: Slot,
    /// What the comparison is combined with, perhaps negated.
    pub combine: Option<(Logic, Slot, bool)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatOp {
    Add,
    Sub,
    Mul,
    Div,
    /// `div.approx`: 0 where the divisor is beyond 2^126.
    DivApprox,
    Min {
        nan: bool,
    },
    Max {
        nan: bool,
    },
    /// The sign of a on the magnitude of b.
    CopySign,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatUnary {
    Neg,
    Abs,
    Rcp,
    Sqrt,
    Rsqrt,
    Ex2,
    Lg2,
    Sin,
    Cos,
    Tanh,
}

/// How a result of f32 is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mode {
    pub round: Round,
    /// `.ftz`
    pub flush: bool,
    /// `.sat`: to 0..=1, NaN to 0.
    pub saturate: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HalfOp {
    Add,
    Sub,
    Mul,
    Fma,
    Min { nan: bool },
    Max { nan: bool },
    Neg,
    Abs,
    Ex2,
    Tanh,
}

/// Arithmetic on 16-bit floats, one or two in a register.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Half {
    pub op: HalfOp,
    pub format: Format,
    pub packed: bool,
    pub flush: bool,
    pub saturate: bool,
    pub relu: bool,
}

/// How a conversion rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// None is needed.
    Exact,
    ToFloat(Round),
    /// To a whole number.
    ToInteger(Round),
}

#[derive(Debug, Clone)]
pub(crate) struct Convert {
    pub from: Type,
    pub to: Type,
    pub rounding: Rounding,
    pub flush: bool,
    pub saturate: bool,
    pub relu: bool,
    pub d: Register,
    pub a: Register,
    /// Of packed results: the lower half.
    pub b: Option<Register>,
}

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    Clock,
    GlobalTimer,
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
    Fence {
        scope: Scope,
    },
    Nanosleep,
    Trap,
    /// A hint.
    Nothing,
}
