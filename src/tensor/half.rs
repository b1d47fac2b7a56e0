//! Floats of 16 bits.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

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

    /// The values of these bits.
    ///
    /// # Panics
    /// If there is not a place for each.
    pub fn widen(self, bits: &[u16], out: &mut [f32]) {
        assert_eq!(bits.len(), out.len(), "values of {} bits", self.name());
        match self {
            Half::BF16 => {
                for (x, &b) in out.iter_mut().zip(bits) {
                    *x = f32::from_bits(u32::from(b) << 16);
                }
            }
            Half::F16 => bits.reinterpret_cast::<f16>().convert_to_f32_slice(out),
        }
    }

    /// The bits of these values, rounded to nearest, ties to even.
    ///
    /// # Panics
    /// If there is not a place for each.
    pub fn narrow(self, x: &[f32], bits: &mut [u16]) {
        assert_eq!(bits.len(), x.len(), "{} bits of values", self.name());
        match self {
            Half::BF16 => {
                for (b, &x) in bits.iter_mut().zip(x) {
                    *b = bf16_bits(x);
                }
            }
            Half::F16 => bits.reinterpret_cast_mut::<f16>().convert_from_f32_slice(x),
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
    use half::{bf16, f16};

    use super::{Half, bf16_bits};

    #[test]
    fn widened_bits_are_narrowed_to_themselves() {
        for half in Half::ALL {
            let bits: Vec<u16> = (0..=u16::MAX).collect();
            let mut values = vec![0f32; bits.len()];
            half.widen(&bits, &mut values);
            let mut back = vec![0u16; bits.len()];
            half.narrow(&values, &mut back);
            for ((&b, &x), &back) in bits.iter().zip(&values).zip(&back) {
                let one =
                    if half == Half::BF16 { bf16::from_bits(b).to_f32() } else { f16::from_bits(b).to_f32() };
                assert!(x.to_bits() == one.to_bits() || x.is_nan() && one.is_nan(), "{b:#x}");
                assert!(back == b || x.is_nan(), "{b:#x} of {}", half.name());
            }
        }
    }

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
