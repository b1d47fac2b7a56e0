//! Types of the language (PTX ISA 5.2) and of registers.

/// A fundamental or packed type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    Bits(u32),
    Unsigned(u32),
    Signed(u32),
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
    Pred,
}

impl Type {
    /// From the modifier without its point: `u32`.
    pub fn parse(word: &str) -> Option<Type> {
        Some(match word {
            "f16" => Type::F16,
            "f16x2" => Type::F16x2,
            "bf16" => Type::Bf16,
            "bf16x2" => Type::Bf16x2,
            "f32" => Type::F32,
            "f64" => Type::F64,
            "pred" => Type::Pred,
            _ => {
                let make = match word.as_bytes().first()? {
                    b'b' => Type::Bits,
                    b'u' => Type::Unsigned,
                    b's' => Type::Signed,
                    _ => return None,
                };
                match &word[1..] {
                    "8" => make(8),
                    "16" => make(16),
                    "32" => make(32),
                    "64" => make(64),
                    _ => return None,
                }
            }
        })
    }

    pub fn bits(self) -> u32 {
        match self {
            Type::Bits(bits) | Type::Unsigned(bits) | Type::Signed(bits) => bits,
            Type::F16 | Type::Bf16 => 16,
            Type::F32 | Type::F16x2 | Type::Bf16x2 => 32,
            Type::F64 => 64,
            Type::Pred => 1,
        }
    }

    pub fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Type::Signed(_))
    }

    pub fn is_integer(self) -> bool {
        matches!(self, Type::Bits(_) | Type::Unsigned(_) | Type::Signed(_))
    }

    /// The registers that hold it, if it has any of its own size.
    pub fn class(self) -> Option<Class> {
        Some(match self.bits() {
            1 => Class::Pred,
            16 => Class::W16,
            32 => Class::W32,
            64 => Class::W64,
            _ => return None,
        })
    }
}

/// Sizes of registers. 16-bit ones lie in the file of 32-bit ones, with zeros above.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    Pred,
    W16,
    W32,
    W64,
}

impl Class {
    pub fn bits(self) -> u32 {
        match self {
            Class::Pred => 1,
            Class::W16 => 16,
            Class::W32 => 32,
            Class::W64 => 64,
        }
    }
}

/// A register: its place in the file of its class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Register {
    pub class: Class,
    pub index: u32,
}
