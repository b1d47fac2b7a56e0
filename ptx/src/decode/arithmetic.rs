//! Arithmetic on integers and floats (PTX ISA 9.7.1, 9.7.3, 9.7.4).

use super::{Decoder, Result, modifiers::Modifiers};
use crate::instruction::{FloatOp, FloatUnary, Half, HalfOp, IntOp, IntUnary, Mode, Op, Width};
use crate::number::{BF16, F16, Format, Round};
use crate::syntax::Statement;
use crate::types::{Class, Type};

/// The width of an integer in a register.
pub(super) fn width(kind: Type) -> Result<Width> {
    match kind.bits() {
        16 => Ok(Width::W16),
        32 => Ok(Width::W32),
        64 => Ok(Width::W64),
        _ => Err("integers of 16, 32 or 64 bits".into()),
    }
}

pub(super) fn class(kind: Type) -> Result<Class> {
    kind.class().filter(|c| *c != Class::Pred).ok_or_else(|| "a type of 16, 32 or 64 bits expected".into())
}

/// The format of a 16-bit float, and whether there are two.
pub(super) fn half(kind: Type) -> Option<(Format, bool)> {
    match kind {
        Type::F16 => Some((F16, false)),
        Type::F16x2 => Some((F16, true)),
        Type::Bf16 => Some((BF16, false)),
        Type::Bf16x2 => Some((BF16, true)),
        _ => None,
    }
}

/// Rounding is to nearest unless said otherwise.
fn mode(m: &mut Modifiers<'_>) -> Mode {
    Mode { round: m.round().unwrap_or(Round::Nearest), flush: m.flag("ftz"), saturate: m.flag("sat") }
}

impl Decoder<'_> {
    /// Two operands.
    pub(super) fn binary(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let kind = m.kind()?;
        if let Some((format, packed)) = half(kind) {
            return self.half(name, format, packed, m, s);
        }
        if kind == Type::F32 || kind == Type::F64 {
            return self.float(name, kind, m, s);
        }
        let signed = kind.is_signed();
        let op = match name {
            "mul" if m.flag("wide") => return self.wide(kind, s, false),
            "mul" => m.must(&[("lo", IntOp::MulLow), ("hi", IntOp::MulHigh { signed })])?,
            "add" => IntOp::Add,
            "sub" => IntOp::Sub,
            "div" => IntOp::Div { signed },
            "rem" => IntOp::Rem { signed },
            "min" => IntOp::Min { signed },
            "max" => IntOp::Max { signed },
            _ => return Err("not of integers".into()),
        };
        let class = class(kind)?;
        let [d, a, b] = self.operands(s)?;
        let (d, a, b) = (self.to(d, class)?, self.read(a, class)?, self.read(b, class)?);
        Ok(Op::Int { op, width: width(kind)?, d, a, b })
    }

    fn float(&mut self, name: &str, kind: Type, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let nan = matches!(name, "min" | "max") && m.flag("NaN");
        let op = match name {
            "add" => FloatOp::Add,
            "sub" => FloatOp::Sub,
            "mul" => FloatOp::Mul,
            "div" if m.flag("approx") => FloatOp::DivApprox,
            "div" if m.flag("full") => FloatOp::Div,
            "div" => FloatOp::Div,
            "min" => FloatOp::Min { nan },
            "max" => FloatOp::Max { nan },
            "copysign" => FloatOp::CopySign,
            _ => return Err("not of floats".into()),
        };
        let mode = mode(m);
        let class = class(kind)?;
        let [d, a, b] = self.operands(s)?;
        let (d, a, b) = (self.to(d, class)?, self.read(a, class)?, self.read(b, class)?);
        let directed = mode.round != Round::Nearest;
        if directed && !matches!(op, FloatOp::Add | FloatOp::Sub | FloatOp::Mul) {
            return Err("this rounding is unknown here".into());
        }
        if kind == Type::F64 {
            if directed || mode.flush || mode.saturate || op == FloatOp::DivApprox {
                return Err("unknown modifiers of f64".into());
            }
            return Ok(Op::Double { op, d, a, b });
        }
        Ok(Op::Float { op, mode, d, a, b })
    }

    fn half(
        &mut self,
        name: &str,
        format: Format,
        packed: bool,
        m: &mut Modifiers<'_>,
        s: &Statement<'_>,
    ) -> Result<Op> {
        let nan = m.flag("NaN");
        let op = match name {
            "add" => HalfOp::Add,
            "sub" => HalfOp::Sub,
            "mul" => HalfOp::Mul,
            "fma" => HalfOp::Fma,
            "min" => HalfOp::Min { nan },
            "max" => HalfOp::Max { nan },
            "neg" => HalfOp::Neg,
            "abs" => HalfOp::Abs,
            "ex2" => HalfOp::Ex2,
            "tanh" => HalfOp::Tanh,
            _ => return Err("not of 16-bit floats".into()),
        };
        if matches!(op, HalfOp::Ex2 | HalfOp::Tanh) && !m.flag("approx") {
            return Err("`.approx` expected".into());
        }
        m.flag("rn");
        let half =
            Half { op, format, packed, flush: m.flag("ftz"), saturate: m.flag("sat"), relu: m.flag("relu") };
        let class = if packed { Class::W32 } else { Class::W16 };
        let count = match op {
            HalfOp::Neg | HalfOp::Abs | HalfOp::Ex2 | HalfOp::Tanh => 1,
            HalfOp::Fma => 3,
            _ => 2,
        };
        if s.operands.len() != count + 1 {
            return Err(format!("{} operands expected", count + 1));
        }
        let d = self.to(&s.operands[0], class)?;
        let mut from = [0; 3];
        for (slot, operand) in from.iter_mut().zip(&s.operands[1..]) {
            *slot = self.read(operand, class)?;
        }
        let [a, b, c] = from;
        // Operands that there are not are read, and not used.
        let (b, c) = (if count > 1 { b } else { a }, if count > 2 { c } else { a });
        Ok(Op::Half { half, d, a, b, c })
    }

    /// mad.lo, mad.hi, mad.wide, fma.
    pub(super) fn mad(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let kind = m.kind()?;
        if let Some((format, packed)) = half(kind) {
            return self.half(name, format, packed, m, s);
        }
        let signed = kind.is_signed();
        if kind.is_integer() && m.flag("wide") {
            return self.wide(kind, s, true);
        }
        let class = class(kind)?;
        let [d, a, b, c] = self.operands(s)?;
        let (d, a) = (self.to(d, class)?, self.read(a, class)?);
        let (b, c) = (self.read(b, class)?, self.read(c, class)?);
        match kind {
            Type::F32 => Ok(Op::Fma { mode: mode(m), d, a, b, c }),
            Type::F64 if m.flag("rn") => Ok(Op::DoubleFma { d, a, b, c }),
            Type::F64 => Err("`.rn` expected".into()),
            _ if name == "fma" => Err("not of integers".into()),
            _ if m.flag("lo") => Ok(Op::MadLow { width: width(kind)?, d, a, b, c }),
            _ if m.flag("hi") && class == Class::W32 => Ok(Op::MadHigh { signed, d, a, b, c }),
            _ => Err("`.lo`, `.wide`, or `.hi` of 32 bits expected".into()),
        }
    }

    fn wide(&mut self, kind: Type, s: &Statement<'_>, add: bool) -> Result<Op> {
        let (from, to) = match kind.bits() {
            16 => (Class::W16, Class::W32),
            32 => (Class::W32, Class::W64),
            _ => return Err("`.wide` of 16 or 32 bits".into()),
        };
        if s.operands.len() != 3 + usize::from(add) {
            return Err("the number of operands".into());
        }
        let d = self.to(&s.operands[0], to)?;
        let (a, b) = (self.read(&s.operands[1], from)?, self.read(&s.operands[2], from)?);
        let c = if add { Some(self.read(&s.operands[3], to)?) } else { None };
        Ok(Op::Wide { signed: kind.is_signed(), from: width(kind)?, d, a, b, c })
    }

    /// One operand.
    pub(super) fn unary(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let kind = m.kind()?;
        if let Some((format, packed)) = half(kind) {
            return self.half(name, format, packed, m, s);
        }
        let class = class(kind)?;
        let [d, a] = self.operands(s)?;
        let (d, a) = (self.to(d, class)?, self.read(a, class)?);
        if kind.is_integer() {
            let op = match name {
                "neg" if kind.is_signed() => IntUnary::Neg,
                "abs" if kind.is_signed() => IntUnary::Abs,
                _ => return Err("not of these integers".into()),
            };
            return Ok(Op::IntUnary { op, width: width(kind)?, d, a });
        }
        let (op, needs_approximation) = match name {
            "neg" => (FloatUnary::Neg, false),
            "abs" => (FloatUnary::Abs, false),
            "rcp" => (FloatUnary::Rcp, false),
            "sqrt" => (FloatUnary::Sqrt, false),
            "rsqrt" => (FloatUnary::Rsqrt, true),
            "ex2" => (FloatUnary::Ex2, true),
            "lg2" => (FloatUnary::Lg2, true),
            "sin" => (FloatUnary::Sin, true),
            "cos" => (FloatUnary::Cos, true),
            _ => (FloatUnary::Tanh, true),
        };
        // An approximation is the exact value here, rounded: within every bound that the ISA gives.
        let approximate = m.flag("approx");
        if needs_approximation && !approximate {
            return Err("`.approx` expected".into());
        }
        let mode = mode(m);
        if kind == Type::F64 {
            let known = matches!(op, FloatUnary::Neg | FloatUnary::Abs | FloatUnary::Rcp | FloatUnary::Sqrt);
            if !known || approximate || mode.round != Round::Nearest || mode.flush || mode.saturate {
                return Err("unknown of f64".into());
            }
            return Ok(Op::DoubleUnary { op, d, a });
        }
        let rounds = matches!(op, FloatUnary::Rcp | FloatUnary::Sqrt);
        if mode.saturate || mode.round != Round::Nearest && !rounds {
            return Err("unknown rounding or saturation".into());
        }
        Ok(Op::FloatUnary { op, mode, d, a })
    }
}
