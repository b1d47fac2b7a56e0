//! What sm_90 added: mbarrier, bulk tensor copies, wgmma (PTX ISA 9.7.9.27, 9.7.13.15, 9.7.15).

use super::{Decoder, Result, modifiers::Modifiers};
use crate::instruction::{Bulk, Op, Wgmma};
use crate::number::{BF16, F16};
use crate::syntax::{Operand, Statement};
use crate::types::{Class, Type};

impl Decoder<'_> {
    pub(super) fn mbarrier(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let what = m.word();
        let expects = m.flag("expect_tx");
        let parity = m.flag("parity");
        m.must(&[("shared::cta", ()), ("shared", ())])?;
        m.must(&[("b64", ())])?;
        match (what, s.operands.as_slice()) {
            (Some("init"), [address, count]) => {
                Ok(Op::MbarrierInit { address: self.address(address)?, count: self.read(count, Class::W32)? })
            }
            // The state that an arrival returns is not kept.
            (Some("arrive"), [Operand::Name("_"), address]) if !expects => {
                Ok(Op::MbarrierArrive { address: self.address(address)?, bytes: None })
            }
            (Some("arrive"), [Operand::Name("_"), address, bytes]) if expects => {
                let bytes = Some(self.read(bytes, Class::W32)?);
                Ok(Op::MbarrierArrive { address: self.address(address)?, bytes })
            }
            (Some("try_wait" | "test_wait"), [d, address, phase]) if parity => Ok(Op::MbarrierTest {
                d: self.to(d, Class::Pred)?,
                address: self.address(address)?,
                parity: self.read(phase, Class::W32)?,
            }),
            _ => Err("this form is unknown".into()),
        }
    }

    /// cp.async.bulk.tensor of two dimensions.
    pub(super) fn bulk(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        for word in ["tensor", "2d", "shared::cluster", "global", "mbarrier::complete_tx::bytes"] {
            m.must(&[(word, ())])?;
        }
        let [to, Operand::Tensor(base, at), barrier] = self.operands(s)? else {
            return Err("a map and coordinates expected".into());
        };
        let [x, y] = at.as_slice() else { return Err("two coordinates expected".into()) };
        let at = [self.read(x, Class::W32)?, self.read(y, Class::W32)?];
        let map = self.address(&Operand::Address(*base, 0))?;
        Ok(Op::BulkCopy(Box::new(Bulk { to: self.address(to)?, map, at, barrier: self.address(barrier)? })))
    }

    pub(super) fn wgmma(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let what = m.word();
        m.must(&[("sync", ())])?;
        m.must(&[("aligned", ())])?;
        match what {
            Some("fence") => {
                self.operands::<0>(s)?;
                Ok(Op::WgmmaFence)
            }
            Some("commit_group") => {
                self.operands::<0>(s)?;
                Ok(Op::WgmmaCommit)
            }
            Some("wait_group") => match self.operands(s)? {
                [Operand::Integer(groups)] => Ok(Op::WgmmaWait { groups: *groups as u32 }),
                _ => Err("a number of groups expected".into()),
            },
            Some("mma_async") => self.mma_async(m, s),
            _ => Err("an unknown instruction".into()),
        }
    }

    fn mma_async(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let shape = m.word().unwrap_or_default();
        let n = shape.strip_prefix("m64n").and_then(|s| s.strip_suffix("k16")).and_then(|n| n.parse().ok());
        let n: usize = n.filter(|n| n % 8 == 0 && (8..=256).contains(n)).ok_or("m64nNk16 expected")?;
        let format = match [m.kind()?, m.kind()?, m.kind()?] {
            [Type::F32, Type::F16, Type::F16] => F16,
            [Type::F32, Type::Bf16, Type::Bf16] => BF16,
            _ => return Err("f16 or bf16 summed in f32 expected".into()),
        };
        let Some((Operand::Vector(d), rest)) = s.operands.split_first() else {
            return Err("accumulators expected".into());
        };
        if d.len() != n / 2 {
            return Err(format!("{} accumulators expected", n / 2));
        }
        let d = d.iter().map(|d| self.to(d, Class::W32)).collect::<Result<Vec<_>>>()?;
        let in_registers = matches!(rest.first(), Some(Operand::Vector(_)));
        // Scales of 1, and which operands run along m or n: of a in registers there is no such.
        let flags = if in_registers { 3 } else { 4 };
        if rest.len() != 3 + flags {
            return Err("the number of operands".into());
        }
        let number = |i: usize| match rest[3 + i] {
            Operand::Integer(value) => Ok(value),
            _ => Err("0 or 1 expected"),
        };
        let b_by_n = number(flags - 1)? == 1;
        if number(0)? != 1 || number(1)? != 1 || !in_registers && number(2)? != 0 {
            return Err("negated operands, or a along m".into());
        }
        let (a, a_descriptor) = if in_registers {
            (self.fragment(&rest[0], 4)?, None)
        } else {
            ([0; 4], Some(self.read(&rest[0], Class::W64)?))
        };
        let b = self.read(&rest[1], Class::W64)?;
        let accumulate = self.read(&rest[2], Class::Pred)?;
        Ok(Op::Wgmma(Box::new(Wgmma { format, d, a, a_descriptor, b, accumulate, b_by_n })))
    }
}
