//! Arithmetic: which operation of a group, on what, how rounded.

use super::Slot;
use crate::number::{Format, Round};
use crate::types::{Register, Type};

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
