//! Floats of 16 bits.

/// A 16-bit float type: of keys and values, of activations on an accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// bfloat16, the default for keys and values: dot-product instructions of CPUs read it directly.
    BF16,
    /// IEEE half.
    F16,
}

impl Half {
    /// Both of them, for tests and benches.
    pub const ALL: [Half; 2] = [Half::BF16, Half::F16];

    /// `bf16` or `f16`: as in the names of kernels and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Half::BF16 => "bf16",
            Half::F16 => "f16",
        }
    }
}

/// An f32 rounded to the bits of a bfloat16: to nearest, ties to even; NaN stays NaN. As [`half::bf16::from_f32`] does it, but without
/// a branch, so that the compiler vectorises loops over it.
#[inline]
pub fn bf16_bits(x: f32) -> u16 {
    let b = x.to_bits();
    let rounded = b.wrapping_add(0x7fff + ((b >> 16) & 1)) >> 16;
    let quiet = (b >> 16) | 0x40;
    (if x.is_nan() { quiet } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::bf16_bits;

    #[test]
    fn bf16_rounds_like_the_half_crate() {
        for i in 0..100_000u32 {
            let x = f32::from_bits(i.wrapping_mul(0x9e37_79b9));
            assert_eq!(bf16_bits(x), bf16::from_f32(x).to_bits(), "{x:e}");
        }
        for x in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1.00390625] {
            assert_eq!(bf16_bits(x), bf16::from_f32(x).to_bits(), "{x:e}");
        }
    }
}
