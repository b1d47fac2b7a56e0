//! mov, cvta, selp (PTX ISA 9.7.9).

use super::{Decoder, Result, modifiers::Modifiers};
use crate::fault::Space;
use crate::instruction::{Clock, IntOp, Op, Place, Width};
use crate::memory::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::syntax::{Operand, Statement};
use crate::types::{Class, Register, Type};

/// Where generic addresses of a space begin.
pub(super) fn window(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
        Space::Constant | Space::Global => 0,
    }
}

impl Decoder<'_> {
    pub(super) fn mov(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let kind = m.kind()?;
        let class = kind.class().ok_or("mov of 16, 32 or 64 bits or of a predicate")?;
        let [d, a] = self.operands(s)?;
        match (d, a) {
            (Operand::Vector(parts), _) if matches!(kind, Type::Bits(_)) => {
                let a = self.read_register(a, class)?;
                Ok(Op::Unpack { parts: self.parts(parts, class)?, a })
            }
            (_, Operand::Vector(parts)) if matches!(kind, Type::Bits(_)) => {
                let d = Register { class, index: self.to(d, class)? };
                Ok(Op::Pack { d, parts: self.parts(parts, class)? })
            }
            (_, Operand::Name(name)) if name.starts_with("%clock") || name.starts_with("%globaltimer") => {
                let wide = matches!(*name, "%clock64" | "%globaltimer");
                let clock = if name.starts_with("%clock") { Clock::Clock } else { Clock::GlobalTimer };
                if wide != (class == Class::W64) || !wide && !matches!(*name, "%clock" | "%globaltimer_lo") {
                    return Err(format!("{name} in {} bits", class.bits()));
                }
                Ok(Op::Clock { d: Register { class, index: self.to(d, class)? }, clock })
            }
            _ => {
                let (d, a) = (self.to(d, class)?, self.read(a, class)?);
                Ok(match class {
                    Class::Pred => Op::MovePred { d, a },
                    Class::W64 => Op::Move64 { d, a },
                    Class::W16 | Class::W32 => Op::Move32 { d, a },
                })
            }
        }
    }

    /// The parts of a register, from the low one on: two or four of 16, or two of 32 bits.
    fn parts(&mut self, parts: &[Operand<'_>], whole: Class) -> Result<Box<[Register]>> {
        let class = match (parts.len(), whole) {
            (2, Class::W32) | (4, Class::W64) => Class::W16,
            (2, Class::W64) => Class::W32,
            _ => return Err("parts of 16 or 32 bits expected".into()),
        };
        parts.iter().map(|p| Ok(Register { class, index: self.to(p, class)? })).collect()
    }

    /// Generic and global addresses are the same; the windows of the others are moved.
    pub(super) fn cvta(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let to = m.flag("to");
        let space = m.must(&[
            ("global", Space::Global),
            ("const", Space::Constant),
            ("shared", Space::Shared),
            ("shared::cta", Space::Shared),
            ("local", Space::Local),
            ("param", Space::Param),
        ])?;
        if m.kind()? != Type::Unsigned(64) {
            return Err("addresses have 64 bits".into());
        }
        let [d, a] = self.operands(s)?;
        let (d, a) = (self.to(d, Class::W64)?, self.read(a, Class::W64)?);
        if window(space) == 0 {
            return Ok(Op::Move64 { d, a });
        }
        let op = if to { IntOp::Sub } else { IntOp::Add };
        Ok(Op::Int { op, width: Width::W64, d, a, b: self.files.double(window(space)) })
    }

    pub(super) fn selp(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let class = m.kind()?.class().filter(|c| *c != Class::Pred).ok_or("selp of 16, 32 or 64 bits")?;
        let [d, a, b, p] = self.operands(s)?;
        let d = Register { class, index: self.to(d, class)? };
        Ok(Op::Select { d, a: self.read(a, class)?, b: self.read(b, class)?, p: self.read(p, Class::Pred)? })
    }

    pub(super) fn is_space(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let place = m.must(&[
            ("global", Place::Global),
            ("shared", Place::Shared),
            ("shared::cta", Place::Shared),
            ("local", Place::Local),
            ("const", Place::Constant),
            ("param", Place::Param),
        ])?;
        let [d, a] = self.operands(s)?;
        Ok(Op::IsSpace { place, d: self.to(d, Class::Pred)?, a: self.read(a, Class::W64)? })
    }
}
