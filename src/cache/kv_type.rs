//! How keys and values are stored: 16-bit floats, or codes of 8 bits with a scale for each token and head.
//!
//! ```text
//! q8    amax = max |x_d| over a head's key (or value) of one token;  scale = amax / 127 as f32
//!       code_d = x_d · (127 / amax), rounded to nearest, ties to even, in −127 ..= 127;  x_d ≈ scale · code_d
//! ```
//! One scale for a whole head, not for blocks of it: it then is a factor of the token's score (keys) and of its weight (values),
//! so that kernels multiply codes and never see a scaled key (decision 0052).

use half::{bf16, f16};

use super::PAGE_TOKENS;
use crate::tensor::Half;

/// The storage type of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    /// bfloat16, the default: dot-product instructions of CPUs read it directly.
    BF16,
    /// IEEE half.
    F16,
    /// Integers of 8 bits, and one f32 scale for each token, head, and side (key or value).
    Q8,
}

impl From<Half> for KvType {
    fn from(half: Half) -> KvType {
        match half {
            Half::BF16 => KvType::BF16,
            Half::F16 => KvType::F16,
        }
    }
}

/// Largest magnitude of a code.
const MOST: f32 = 127.0;
/// 1.5·2^23: adding it leaves a float's integer part, rounded to nearest even, in the low bits.
const TO_INTEGER: f32 = 12_582_912.0;

impl KvType {
    /// All of them, for tests and benches.
    pub const ALL: [KvType; 3] = [KvType::BF16, KvType::F16, KvType::Q8];

    /// `bf16`, `f16` or `q8`: as on the command line and in the names of kernels.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::BF16 => "bf16",
            KvType::F16 => "f16",
            KvType::Q8 => "q8",
        }
    }

    /// The type of queries, keys and values on their way to attention and to pages, where they are 16 bits wide. For q8 that is f16:
    /// its
    /// rounding of a head's largest element is an eighth of the quantisation's; bf16's would be half of it.
    pub const fn half(self) -> Half {
        match self {
            KvType::BF16 => Half::BF16,
            KvType::F16 | KvType::Q8 => Half::F16,
        }
    }

    /// Whether elements are codes with a scale.
    pub const fn is_scaled(self) -> bool {
        matches!(self, KvType::Q8)
    }

    /// Bytes of an element, without its scale.
    pub const fn element(self) -> usize {
        match self {
            KvType::BF16 | KvType::F16 => 2,
            KvType::Q8 => 1,
        }
    }

    /// Bytes of one head's key, or of its value, of one token.
    pub const fn head_bytes(self, head_dim: usize) -> usize {
        self.element() * head_dim + if self.is_scaled() { size_of::<f32>() } else { 0 }
    }

    /// Bytes of one head's keys, or of its values, in a page: the elements, then a scale for each token.
    pub const fn part_bytes(self, head_dim: usize) -> usize {
        PAGE_TOKENS * self.head_bytes(head_dim)
    }

    /// The value of an element, its scale aside; `at` is the first of its bytes.
    ///
    /// # Safety
    /// [`KvType::element`] bytes at `at` are readable.
    pub(super) unsafe fn decode(self, at: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                KvType::BF16 => bf16::from_bits(at.cast::<u16>().read_unaligned()).to_f32(),
                KvType::F16 => f16::from_bits(at.cast::<u16>().read_unaligned()).to_f32(),
                KvType::Q8 => f32::from(at.cast::<i8>().read()),
            }
        }
    }
}

/// Quantises a head's key or value to `codes`, and returns its scale. An element that is not finite makes the scale not finite, so
/// that it is seen in what attends it; a head of zeros has the scale 0.
///
/// # Panics
/// If there is not a code for each element.
pub fn quantise_head(x: &[f32], codes: &mut [i8]) -> f32 {
    assert_eq!(x.len(), codes.len(), "codes of a head");
    // As bits, in which NaN is larger than infinity, and infinity than all others.
    let amax = f32::from_bits(x.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff_ffff)));
    // Below 2^-121 the inverse would overflow; codes are then too small, of what is nothing beside other tokens.
    let inverse = if amax > 0.0 { (MOST / amax).min(f32::MAX) } else { 0.0 };
    for (code, &x) in codes.iter_mut().zip(x) {
        // Without a branch or a call, so that the compiler vectorises it. At most 127 after rounding, as |x| <= amax.
        *code = (x * inverse + TO_INTEGER).to_bits() as i8;
    }
    amax / MOST
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_by_hand() {
        assert_eq!(KvType::BF16.part_bytes(64), 32 * 64 * 2);
        assert_eq!(KvType::Q8.part_bytes(64), 32 * 64 + 32 * 4);
        assert_eq!((KvType::Q8.head_bytes(128), KvType::F16.head_bytes(128)), (132, 256));
    }

    proptest! {
        /// Each element is within half a step (and the roundings of two products) of its code times the scale, whatever the range.
        #[test]
        fn codes_are_nearest(seed in prop::collection::vec(-1.0f32..1.0, 1..80), exponent in -90i32..90) {
            let x: Vec<f32> = seed.iter().map(|&x| x * 2f32.powi(exponent)).collect();
            let mut codes = vec![0i8; x.len()];
            let scale = quantise_head(&x, &mut codes);
            let amax = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            prop_assert_eq!(scale, amax / 127.0);
            for (&x, &code) in x.iter().zip(&codes) {
                prop_assert!((-127..=127).contains(&code));
                let error = (f64::from(x) - f64::from(scale) * f64::from(code)).abs();
                // Half a step, and of the product x·(127/amax) <= 127 and of the scale two roundings each.
                let most = f64::from(scale) * (0.5 + 4.0 * 127.0 * 2f64.powi(-24));
                prop_assert!(error <= most + f64::from(f32::from_bits(127)), "{} by {} x {}", x, scale, code);
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_seen() {
        let mut codes = [0i8; 4];
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let scale = quantise_head(&[1.0, bad, -2.0, 0.0], &mut codes);
            assert!(!scale.is_finite(), "{bad}: {scale}");
            assert!(!(scale * f32::from(codes[1])).is_finite(), "{bad}: {scale} x {}", codes[1]);
        }
    }

    #[test]
    fn zeros_ties_and_the_least_floats() {
        let mut codes = [1i8; 3];
        assert_eq!((quantise_head(&[0.0, -0.0, 0.0], &mut codes), codes), (0.0, [0; 3]));
        // 127/amax is 1: ties go to the even code.
        assert_eq!((quantise_head(&[127.0, 2.5, -3.5], &mut codes), codes), (1.0, [127, 2, -4]));
        let least = f32::from_bits(1);
        quantise_head(&[least, -least, 0.0], &mut codes);
        assert!(codes[0] >= 0 && codes[1] <= 0 && codes[2] == 0, "{codes:?}");
    }
}
