//! Operands that any element of can be computed again, for checking a sample of answers in f64.

use half::{bf16, f16};
use tandem::tensor::Half;

/// Uniform in -1..1, by position.
pub fn noise(seed: u64, at: usize) -> f32 {
    let mut h = (at as u64 ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h = (h ^ h >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (h >> 40) as f32 / (1 << 23) as f32 - 1.0
}

pub fn to_bits(dtype: Half, v: f32) -> u16 {
    match dtype {
        Half::F16 => f16::from_f32(v).to_bits(),
        Half::BF16 => bf16::from_f32(v).to_bits(),
    }
}

pub fn value(dtype: Half, bits: u16) -> f64 {
    match dtype {
        Half::F16 => f16::from_bits(bits).to_f64(),
        Half::BF16 => bf16::from_bits(bits).to_f64(),
    }
}

/// `len` elements of noise, times `scale`.
pub fn halves(dtype: Half, len: usize, seed: u64, scale: f32) -> Vec<u16> {
    (0..len).map(|i| to_bits(dtype, scale * noise(seed, i))).collect()
}

/// The bytes of plain numbers.
pub fn bytes_of<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: any initialised plain number is bytes; callers pass integers and floats only.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// About `count` positions of `len`, the first and the last among them.
pub fn sample(len: usize, count: usize) -> impl Iterator<Item = usize> {
    let step = (len / count.max(1)).max(1) | 1;
    (0..len).step_by(step).chain(len.checked_sub(1))
}
