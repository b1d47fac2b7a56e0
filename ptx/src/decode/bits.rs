//! Logic, shifts and bit fields (PTX ISA 9.7.1, 9.7.7, 9.7.8).

use super::arithmetic::{class, width};
use super::{Decoder, Result, modifiers::Modifiers};
use crate::instruction::{CountOp, IntOp, IntUnary, Logic, Op, PermuteMode, ShiftOp, TripleOp, Width};
use crate::syntax::{Operand, Statement};
use crate::types::{Class, Type};

impl Decoder<'_> {
    pub(super) fn bitwise(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let kind = m.kind()?;
        if kind == Type::Pred {
            return self.logic(name, s);
        }
        if !kind.is_integer() {
            return Err("bits expected".into());
        }
        let class = class(kind)?;
        let width = width(kind)?;
        if matches!(name, "not" | "cnot") {
            let [d, a] = self.operands(s)?;
            let op = if name == "not" { IntUnary::Not } else { IntUnary::CNot };
            return Ok(Op::IntUnary { op, width, d: self.to(d, class)?, a: self.read(a, class)? });
        }
        let [d, a, b] = self.operands(s)?;
        let (d, a) = (self.to(d, class)?, self.read(a, class)?);
        let int = |op, b| Op::Int { op, width, d, a, b };
        // The amount of a shift is of 32 bits, whatever is shifted.
        Ok(match name {
            "and" => int(IntOp::And, self.read(b, class)?),
            "or" => int(IntOp::Or, self.read(b, class)?),
            "xor" => int(IntOp::Xor, self.read(b, class)?),
            "shl" => Op::Shift { op: ShiftOp::Left, width, d, a, by: self.read(b, Class::W32)? },
            _ => {
                let op = ShiftOp::Right { signed: kind.is_signed() };
                Op::Shift { op, width, d, a, by: self.read(b, Class::W32)? }
            }
        })
    }

    fn logic(&mut self, name: &str, s: &Statement<'_>) -> Result<Op> {
        if name == "not" {
            let [d, a] = self.operands(s)?;
            return Ok(Op::NotPred { d: self.to(d, Class::Pred)?, a: self.read(a, Class::Pred)? });
        }
        let op = match name {
            "and" => Logic::And,
            "or" => Logic::Or,
            "xor" => Logic::Xor,
            _ => return Err("not of predicates".into()),
        };
        let [d, a, b] = self.operands(s)?;
        let (a, b) = (self.read(a, Class::Pred)?, self.read(b, Class::Pred)?);
        Ok(Op::Logic { op, d: self.to(d, Class::Pred)?, a, b })
    }

    pub(super) fn count(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let shift = m.flag("shiftamt");
        let kind = m.kind()?;
        let op = match name {
            "popc" => CountOp::Ones,
            "clz" => CountOp::LeadingZeros,
            "brev" => CountOp::Reverse,
            _ => CountOp::Find { signed: kind.is_signed(), shift },
        };
        let wide = match width(kind)? {
            Width::W32 => false,
            Width::W64 => true,
            Width::W16 => return Err("of 32 or 64 bits".into()),
        };
        let [d, a] = self.operands(s)?;
        let a = self.read(a, class(kind)?)?;
        let result = if op == CountOp::Reverse { class(kind)? } else { Class::W32 };
        Ok(Op::Count { op, wide, d: self.to(d, result)?, a })
    }

    /// Three words to one.
    pub(super) fn triple(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let op = match name {
            "lop3" => {
                let table = match s.operands.get(4) {
                    Some(Operand::Integer(table)) if *table < 256 => *table as u8,
                    _ => return Err("a truth table expected".into()),
                };
                TripleOp::Lop3(table)
            }
            "prmt" => {
                let modes = [
                    ("f4e", PermuteMode::Forward4),
                    ("b4e", PermuteMode::Backward4),
                    ("rc8", PermuteMode::Replicate8),
                    ("ecl", PermuteMode::EdgeLeft),
                    ("ecr", PermuteMode::EdgeRight),
                    ("rc16", PermuteMode::Replicate16),
                ];
                TripleOp::Permute(m.one(&modes).unwrap_or(PermuteMode::Select))
            }
            "shf" => {
                let left = m.must(&[("l", true), ("r", false)])?;
                let wrap = m.must(&[("wrap", true), ("clamp", false)])?;
                if left { TripleOp::FunnelLeft { wrap } } else { TripleOp::FunnelRight { wrap } }
            }
            "dp4a" => {
                let (a, b) = (m.kind()?, m.kind()?);
                if a.bits() != 32 || b.bits() != 32 {
                    return Err("words of bytes expected".into());
                }
                TripleOp::Dot4 { a_signed: a.is_signed(), b_signed: b.is_signed() }
            }
            _ => {
                let kind = m.kind()?;
                if kind.bits() != 32 {
                    return Err("of 32 bits".into());
                }
                TripleOp::Sad { signed: kind.is_signed() }
            }
        };
        if matches!(name, "lop3" | "prmt" | "shf") && m.kind()? != Type::Bits(32) {
            return Err("`.b32` expected".into());
        }
        if s.operands.len() != 4 + usize::from(name == "lop3") {
            return Err("the number of operands".into());
        }
        let d = self.to(&s.operands[0], Class::W32)?;
        let (a, b) = (self.read(&s.operands[1], Class::W32)?, self.read(&s.operands[2], Class::W32)?);
        Ok(Op::Triple { op, d, a, b, c: self.read(&s.operands[3], Class::W32)? })
    }

    /// bfe, bfi: place and length are of 32 bits.
    pub(super) fn bit_field(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let kind = m.kind()?;
        let class = class(kind)?;
        let wide = match class {
            Class::W32 => false,
            Class::W64 => true,
            _ => return Err("of 32 or 64 bits".into()),
        };
        if name == "bfe" {
            let [d, a, at, length] = self.operands(s)?;
            let (d, a) = (self.to(d, class)?, self.read(a, class)?);
            let (at, length) = (self.read(at, Class::W32)?, self.read(length, Class::W32)?);
            return Ok(Op::Extract { signed: kind.is_signed(), wide, d, a, at, length });
        }
        let [d, a, b, at, length] = self.operands(s)?;
        let (d, a, b) = (self.to(d, class)?, self.read(a, class)?, self.read(b, class)?);
        let (at, length) = (self.read(at, Class::W32)?, self.read(length, Class::W32)?);
        Ok(Op::Insert { wide, d, a, b, at, length })
    }
}
