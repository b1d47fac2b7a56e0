//! Operands to places in register files.

use super::{Decoder, Result};
use crate::instruction::{Address, Slot};
use crate::kernel::Special;
use crate::syntax::{Base, Operand, Statement};
use crate::types::{Class, Register};

impl Decoder<'_> {
    /// All operands, if there are N.
    pub(super) fn operands<'s, 'a, const N: usize>(
        &self,
        s: &'s Statement<'a>,
    ) -> Result<&'s [Operand<'a>; N]> {
        s.operands.as_slice().try_into().map_err(|_| format!("{N} operands expected"))
    }

    /// A register that is written.
    pub(super) fn to(&self, operand: &Operand<'_>, class: Class) -> Result<Slot> {
        match operand {
            Operand::Register(r) if r.class == class => Ok(r.index),
            Operand::Register(r) => {
                Err(format!("a register of {} bits, not {}", class.bits(), r.class.bits()))
            }
            _ => Err("a register expected".into()),
        }
    }

    /// A register of any class but predicates.
    pub(super) fn register(&self, operand: &Operand<'_>) -> Result<Register> {
        match operand {
            Operand::Register(r) if r.class != Class::Pred => Ok(*r),
            _ => Err("a register expected".into()),
        }
    }

    /// What is read: a register of this class, a constant, a special register, or a variable's address.
    pub(super) fn read(&mut self, operand: &Operand<'_>, class: Class) -> Result<Slot> {
        match operand {
            Operand::Register(_) => self.to(operand, class),
            Operand::Integer(value) => self.constant(*value, class),
            Operand::Single(bits) if class == Class::W32 => Ok(self.files.word(*bits)),
            Operand::Double(bits) if class == Class::W64 => Ok(self.files.double(*bits)),
            Operand::Name(name) => {
                if let Some(special) = Special::parse(name) {
                    let is_word = class == Class::W32;
                    return if is_word {
                        Ok(self.files.special(special))
                    } else {
                        Err(format!("{name} has 32 bits"))
                    };
                }
                let address = self.layout.address(name).ok_or_else(|| format!("`{name}` is not declared"))?;
                match class {
                    Class::W64 => Ok(self.files.double(address)),
                    Class::W32 if u32::try_from(address).is_ok() => Ok(self.files.word(address as u32)),
                    _ => Err(format!("the address of {name} has more than {} bits", class.bits())),
                }
            }
            _ => Err("a register or a constant expected".into()),
        }
    }

    /// The same as a register.
    pub(super) fn read_register(&mut self, operand: &Operand<'_>, class: Class) -> Result<Register> {
        Ok(Register { class, index: self.read(operand, class)? })
    }

    pub(super) fn constant(&mut self, value: u64, class: Class) -> Result<Slot> {
        // Negative numbers come as their two's complement.
        let fits = |bits: u32| value >> bits == 0 || (value as i64) >> (bits - 1) == -1;
        match class {
            // True is written as 1 or as -1.
            Class::Pred => Ok(self.files.predicate(value != 0)),
            Class::W16 if fits(16) => Ok(self.files.word(value as u32 & 0xffff)),
            Class::W32 if fits(32) => Ok(self.files.word(value as u32)),
            Class::W64 => Ok(self.files.double(value)),
            Class::W16 | Class::W32 => Err(format!("{value:#x} has more than {} bits", class.bits())),
        }
    }

    /// A predicate that is read, and whether it is negated.
    pub(super) fn predicate(&mut self, operand: &Operand<'_>) -> Result<(Slot, bool)> {
        match operand {
            Operand::Not(r) if r.class == Class::Pred => Ok((r.index, true)),
            _ => Ok((self.read(operand, Class::Pred)?, false)),
        }
    }

    /// `[...]`
    pub(super) fn address(&mut self, operand: &Operand<'_>) -> Result<Address> {
        let Operand::Address(base, offset) = operand else { return Err("an address expected".into()) };
        let offset = *offset;
        Ok(match base {
            Base::Register(r) if matches!(r.class, Class::W32 | Class::W64) => {
                Address { base: r.index, wide: r.class == Class::W64, offset }
            }
            Base::Register(_) => return Err("an address has 32 or 64 bits".into()),
            Base::Absolute => Address { base: self.files.double(0), wide: true, offset },
            Base::Name(name) => {
                let address = self.layout.address(name).ok_or_else(|| format!("`{name}` is not declared"))?;
                Address { base: self.files.double(address), wide: true, offset }
            }
        })
    }
}
