//! setp, set (PTX ISA 9.7.5).

use super::{Decoder, Result, arithmetic, modifiers::Modifiers};
use crate::instruction::{Compare, Compared, Logic, Op, Test};
use crate::syntax::{Operand, Statement};
use crate::types::{Class, Type};

impl Decoder<'_> {
    pub(super) fn compare(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let test = m.must(&[
            ("eq", Test::Eq),
            ("ne", Test::Ne),
            ("lt", Test::Lt),
            ("le", Test::Le),
            ("gt", Test::Gt),
            ("ge", Test::Ge),
            ("lo", Test::Lt),
            ("ls", Test::Le),
            ("hi", Test::Gt),
            ("hs", Test::Ge),
            ("equ", Test::EqU),
            ("neu", Test::NeU),
            ("ltu", Test::LtU),
            ("leu", Test::LeU),
            ("gtu", Test::GtU),
            ("geu", Test::GeU),
            ("num", Test::Ordered),
            ("nan", Test::Unordered),
        ])?;
        let logic = m.one(&[("and", Logic::And), ("or", Logic::Or), ("xor", Logic::Xor)]);
        let flush = m.flag("ftz");
        let result = if name == "set" { Some(m.kind()?) } else { None };
        let kind = m.kind()?;
        let compared = compared(kind, flush)?;
        let float = matches!(compared, Compared::F32 { .. } | Compared::F64 | Compared::Half(_));
        if !float && !matches!(test, Test::Eq | Test::Ne | Test::Lt | Test::Le | Test::Gt | Test::Ge) {
            return Err("this comparison is of floats only".into());
        }
        let class = arithmetic::class(kind)?;
        let operands = &s.operands;
        if operands.len() != 3 + usize::from(logic.is_some()) {
            return Err("the number of operands".into());
        }
        let (a, b) = (self.read(&operands[1], class)?, self.read(&operands[2], class)?);
        let combine = match logic {
            Some(logic) => {
                let (c, negated) = self.predicate(&operands[3])?;
                Some((logic, c, negated))
            }
            None => None,
        };
        let compare = Box::new(Compare { test, kind: compared, a, b, combine });
        match (result, &operands[0]) {
            (None, Operand::Pair(d, other)) if d.class == Class::Pred && other.class == Class::Pred => {
                Ok(Op::SetPred { compare, d: d.index, other: Some(other.index) })
            }
            (None, d) => Ok(Op::SetPred { compare, d: self.to(d, Class::Pred)?, other: None }),
            (Some(Type::F32), d) => Ok(Op::Set { compare, float: true, d: self.to(d, Class::W32)? }),
            (Some(Type::Unsigned(32) | Type::Signed(32)), d) => {
                Ok(Op::Set { compare, float: false, d: self.to(d, Class::W32)? })
            }
            (Some(_), _) => Err("the type of the result".into()),
        }
    }
}

fn compared(kind: Type, flush: bool) -> Result<Compared> {
    Ok(match kind {
        Type::F32 => Compared::F32 { flush },
        _ if flush => return Err("`.ftz` of f32 only".into()),
        Type::F64 => Compared::F64,
        Type::F16 | Type::Bf16 => {
            Compared::Half(if kind == Type::F16 { crate::number::F16 } else { crate::number::BF16 })
        }
        Type::Signed(16) => Compared::Signed16,
        Type::Signed(32) => Compared::Signed32,
        Type::Signed(64) => Compared::Signed64,
        // 16-bit registers have zeros above.
        Type::Unsigned(16 | 32) | Type::Bits(16 | 32) => Compared::Unsigned32,
        Type::Unsigned(64) | Type::Bits(64) => Compared::Unsigned64,
        _ => return Err("not compared".into()),
    })
}
