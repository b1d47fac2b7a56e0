//! cvt (PTX ISA 9.7.9.21).

use super::{Decoder, Result, modifiers::Modifiers};
use crate::instruction::{Convert, Op, Rounding};
use crate::syntax::Statement;
use crate::types::{Class, Register, Type};

impl Decoder<'_> {
    pub(super) fn cvt(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let (to, from) = (m.kind()?, m.kind()?);
        let rounding = match (m.round(), m.round_integer()) {
            (None, None) => Rounding::Exact,
            (Some(round), None) => Rounding::ToFloat(round),
            (None, Some(round)) => Rounding::ToInteger(round),
            _ => return Err("one rounding only".into()),
        };
        let (flush, saturate, relu) = (m.flag("ftz"), m.flag("sat"), m.flag("relu"));
        check(to, from, rounding)?;
        if flush && to != Type::F32 && from != Type::F32 || relu && (to.is_integer() || from != Type::F32) {
            return Err("`.ftz` is of f32, `.relu` of f32 to 16 bits".into());
        }
        let packed = matches!(to, Type::F16x2 | Type::Bf16x2);
        let count = 2 + usize::from(packed);
        if s.operands.len() != count {
            return Err(format!("{count} operands expected"));
        }
        let d = self.register(&s.operands[0])?;
        let a = self.convertible(&s.operands[1], from)?;
        let b = if packed { Some(self.convertible(&s.operands[2], from)?) } else { None };
        if d.class.bits() < to.bits() || !to.is_integer() && d.class.bits() != to.bits() {
            return Err("the size of the result's register".into());
        }
        Ok(simple(to, from, saturate, d, a).unwrap_or_else(|| {
            Op::Convert(Box::new(Convert { from, to, rounding, flush, saturate, relu, d, a, b }))
        }))
    }

    /// A register may be wider than the integer in it.
    fn convertible(&mut self, operand: &crate::syntax::Operand<'_>, from: Type) -> Result<Register> {
        if let crate::syntax::Operand::Register(r) = operand {
            let fits =
                if from.is_integer() { r.class.bits() >= from.bits() } else { r.class.bits() == from.bits() };
            return if fits && r.class != Class::Pred { Ok(*r) } else { Err("the source's size".into()) };
        }
        self.read_register(operand, from.class().ok_or("a source of 16 bits or more")?)
    }
}

/// Conversions that lose bits must say how they round; those that do not, must not.
fn check(to: Type, from: Type, rounding: Rounding) -> Result<()> {
    let scalar = |t: Type| t != Type::Pred && !matches!(t, Type::F16x2 | Type::Bf16x2);
    let packed = matches!(to, Type::F16x2 | Type::Bf16x2) && from == Type::F32;
    if !scalar(from) || !scalar(to) && !packed || matches!(from, Type::Bits(_)) || matches!(to, Type::Bits(_))
    {
        return Err("these types are not converted".into());
    }
    let ok = match (from.is_integer(), to.is_integer()) {
        (true, true) => rounding == Rounding::Exact,
        (true, false) => matches!(rounding, Rounding::ToFloat(_)),
        (false, true) => matches!(rounding, Rounding::ToInteger(_)),
        (false, false) => {
            let wider = to.bits() > from.bits() && !packed;
            match rounding {
                Rounding::Exact => wider || to == from,
                Rounding::ToFloat(_) => !wider,
                Rounding::ToInteger(_) => to == from,
            }
        }
    };
    if ok { Ok(()) } else { Err("the rounding of this conversion".into()) }
}

/// Conversions of integers that only drop bits or put zeros above.
fn simple(to: Type, from: Type, saturate: bool, d: Register, a: Register) -> Option<Op> {
    if !to.is_integer() || !from.is_integer() || saturate || from.is_signed() && to.bits() > from.bits() {
        return None;
    }
    let bits = to.bits().min(from.bits());
    if to.is_signed() && d.class.bits() > to.bits() || bits == 64 {
        return None;
    }
    let mask = u32::MAX >> (32 - bits);
    let (d, a, d_class, a_class) = (d.index, a.index, d.class, a.class);
    match (a_class, d_class) {
        (Class::W64, Class::W16 | Class::W32) => Some(Op::Low { d, a, mask }),
        (Class::W16 | Class::W32, Class::W16 | Class::W32) => Some(Op::Low32 { d, a, mask }),
        (Class::W16 | Class::W32, Class::W64) if a_class.bits() == bits => Some(Op::Extend { d, a }),
        _ => None,
    }
}
