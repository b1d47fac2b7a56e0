//! Branches, barriers, and what lanes do together (PTX ISA 9.7.12, 9.7.13).

use super::{Decoder, Result, modifiers::Modifiers};
use crate::instruction::{AtomicOp, Op, Shuffle, ShuffleMode, VoteMode};
use crate::syntax::{Operand, Statement};
use crate::types::{Class, Register, Type};

impl Decoder<'_> {
    pub(super) fn jump(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        m.flag("uni");
        if name == "bra" {
            let [Operand::Name(label)] = self.operands(s)? else { return Err("a label expected".into()) };
            let target = self.entry.body.label(s.scope, label);
            let target = target.ok_or_else(|| format!("label `{label}` is not there"))?;
            return Ok(Op::Branch { target });
        }
        if name == "nanosleep" {
            let [time] = self.operands(s)?;
            m.flag("u32");
            self.read(time, Class::W32)?;
            return Ok(Op::Nanosleep);
        }
        self.operands::<0>(s)?;
        Ok(if name == "trap" { Op::Trap } else { Op::Exit })
    }

    pub(super) fn barrier(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        if m.flag("warp") {
            m.must(&[("sync", ())])?;
            let [mask] = self.operands(s)?;
            return Ok(Op::WarpBarrier { mask: self.read(mask, Class::W32)? });
        }
        m.flag("cta");
        let arrive = m.must(&[("sync", false), ("arrive", true)])?;
        m.flag("aligned");
        let (id, count) = match s.operands.as_slice() {
            [id] if !arrive => (id, None),
            [id, count] => (id, Some(self.read(count, Class::W32)?)),
            _ => return Err("a barrier and a count expected".into()),
        };
        Ok(Op::Barrier { id: self.read(id, Class::W32)?, count, arrive })
    }

    pub(super) fn warp(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        if name == "activemask" {
            let [d] = self.operands(s)?;
            m.must(&[("b32", ())])?;
            return Ok(Op::ActiveMask { d: self.to(d, Class::W32)? });
        }
        m.must(&[("sync", ())])?;
        match name {
            "shfl" => self.shuffle(m, s),
            "vote" => self.vote(m, s),
            _ => {
                let op = m.must(&[
                    ("add", AtomicOp::Add),
                    ("min", AtomicOp::Min),
                    ("max", AtomicOp::Max),
                    ("and", AtomicOp::And),
                    ("or", AtomicOp::Or),
                    ("xor", AtomicOp::Xor),
                ])?;
                let kind = m.kind()?;
                if !kind.is_integer() || kind.bits() != 32 {
                    return Err("redux of 32-bit integers".into());
                }
                let [d, a, mask] = self.operands(s)?;
                let (d, a) = (self.to(d, Class::W32)?, self.read(a, Class::W32)?);
                Ok(Op::Reduce { op, signed: kind.is_signed(), d, a, mask: self.read(mask, Class::W32)? })
            }
        }
    }

    fn shuffle(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let mode = m.must(&[
            ("up", ShuffleMode::Up),
            ("down", ShuffleMode::Down),
            ("bfly", ShuffleMode::Butterfly),
            ("idx", ShuffleMode::Index),
        ])?;
        m.must(&[("b32", ())])?;
        let [d, a, b, c, mask] = self.operands(s)?;
        let (d, valid) = match d {
            Operand::Pair(d, p) if d.class == Class::W32 && p.class == Class::Pred => {
                (d.index, Some(p.index))
            }
            _ => (self.to(d, Class::W32)?, None),
        };
        let (a, b) = (self.read(a, Class::W32)?, self.read(b, Class::W32)?);
        let (c, mask) = (self.read(c, Class::W32)?, self.read(mask, Class::W32)?);
        Ok(Op::Shuffle(Box::new(Shuffle { mode, d, valid, a, b, c, mask })))
    }

    fn vote(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let mode = m.must(&[
            ("all", VoteMode::All),
            ("any", VoteMode::Any),
            ("uni", VoteMode::Uniform),
            ("ballot", VoteMode::Ballot),
        ])?;
        let class = if mode == VoteMode::Ballot { Class::W32 } else { Class::Pred };
        let kind = m.kind()?;
        if kind != if mode == VoteMode::Ballot { Type::Bits(32) } else { Type::Pred } {
            return Err("the type of the vote".into());
        }
        let [d, a, mask] = self.operands(s)?;
        let d = Register { class, index: self.to(d, class)? };
        let (a, negated) = self.predicate(a)?;
        Ok(Op::Vote { mode, d, a, negated, mask: self.read(mask, Class::W32)? })
    }
}
