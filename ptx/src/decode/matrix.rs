//! mma, ldmatrix, movmatrix (PTX ISA 9.7.14).

use super::{Decoder, Result, modifiers::Modifiers};
use crate::instruction::{Mma, MmaKind, Op, Slot};
use crate::number::{BF16, F16};
use crate::syntax::{Operand, Statement};
use crate::types::{Class, Type};

impl Decoder<'_> {
    pub(super) fn matrix(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        m.must(&[("sync", ())])?;
        m.must(&[("aligned", ())])?;
        match name {
            "mma" => self.mma(m, s),
            "ldmatrix" => self.load_matrix(m, s),
            _ => {
                for word in ["m8n8", "trans", "b16"] {
                    m.must(&[(word, ())])?;
                }
                let [d, a] = self.operands(s)?;
                Ok(Op::MoveMatrix { d: self.to(d, Class::W32)?, a: self.read(a, Class::W32)? })
            }
        }
    }

    fn mma(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        let (rows, k) = m.must(&[
            ("m16n8k8", (16, 8)),
            ("m16n8k16", (16, 16)),
            ("m16n8k32", (16, 32)),
            ("m8n8k16", (8, 16)),
        ])?;
        m.must(&[("row", ())])?;
        m.must(&[("col", ())])?;
        let saturate = m.flag("satfinite");
        let types = [m.kind()?, m.kind()?, m.kind()?, m.kind()?];
        let kind = match types {
            [Type::F32, a, b, Type::F32] if a == b && rows == 16 && k <= 16 && !saturate => match a {
                Type::F16 => MmaKind::Half { format: F16, k },
                Type::Bf16 => MmaKind::Half { format: BF16, k },
                _ => return Err("f16 or bf16 expected".into()),
            },
            [Type::Signed(32), a, b, Type::Signed(32)]
                if a.bits() == 8 && b.bits() == 8 && a.is_integer() && b.is_integer() && k >= 16 =>
            {
                let (a_signed, b_signed) = (a.is_signed(), b.is_signed());
                MmaKind::Bytes { m: rows, k, a_signed, b_signed, saturate }
            }
            _ => return Err("these fragments are unknown".into()),
        };
        let bits = if matches!(kind, MmaKind::Half { .. }) { 16 } else { 8 };
        let [d, a, b, c] = self.operands(s)?;
        // Registers of a fragment: its bits by 32 lanes and 32 bits.
        let count = |elements: u32, bits: u32| (elements * bits / 1024) as usize;
        Ok(Op::Mma(Box::new(Mma {
            kind,
            d: self.fragment_to(d, count(rows * 8, 32))?,
            a: self.fragment(a, count(rows * k, bits))?,
            b: self.fragment(b, count(8 * k, bits))?,
            c: self.fragment(c, count(rows * 8, 32))?,
        })))
    }

    /// `count` registers; the places of the others repeat the first.
    pub(super) fn fragment<const N: usize>(
        &mut self,
        operand: &Operand<'_>,
        count: usize,
    ) -> Result<[Slot; N]> {
        let all = match operand {
            Operand::Vector(all) => all.as_slice(),
            _ => std::slice::from_ref(operand),
        };
        if all.len() != count || count > N {
            return Err(format!("{count} registers expected"));
        }
        let mut slots = [self.read(&all[0], Class::W32)?; N];
        for (slot, operand) in slots.iter_mut().zip(all) {
            *slot = self.read(operand, Class::W32)?;
        }
        Ok(slots)
    }

    fn fragment_to(&mut self, operand: &Operand<'_>, count: usize) -> Result<[Slot; 4]> {
        let registers = matches!(operand, Operand::Register(_))
            || matches!(operand, Operand::Vector(all) if all.iter().all(|o| matches!(o, Operand::Register(_))));
        if registers { self.fragment(operand, count) } else { Err("registers expected".into()) }
    }

    fn load_matrix(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        m.must(&[("m8n8", ())])?;
        let count = m.must(&[("x1", 1u8), ("x2", 2), ("x4", 4)])?;
        let transposed = m.flag("trans");
        m.must(&[("shared", ()), ("shared::cta", ())])?;
        m.must(&[("b16", ())])?;
        let [d, address] = self.operands(s)?;
        let d = self.fragment_to(d, usize::from(count))?;
        Ok(Op::LoadMatrix { count, transposed, d, address: self.address(address)? })
    }
}
