//! Numbers of checks: reproducible noise, 16-bit floats, bytes of arrays.

use half::{bf16, f16};

use crate::cache::{KvType, PAGE_TOKENS, quantise_head};
use crate::tensor::Half;

/// Unit roundoff of f32.
pub const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Unit roundoff of a 16-bit type.
pub fn unit(half: Half) -> f64 {
    match half {
        Half::F16 => 2f64.powi(-11),
        Half::BF16 => 2f64.powi(-8),
    }
}

/// Uniform in -1..1, by place.
pub fn noise(seed: u64, at: usize) -> f32 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64;
    for _ in 0..2 {
        z = (z ^ z >> 30).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^= z >> 27;
    }
    (z >> 32) as f32 / (1u64 << 31) as f32 - 1.0
}

/// `n` of them.
pub fn some(seed: u64, n: usize) -> Vec<f32> {
    (0..n).map(|i| noise(seed, i)).collect()
}

/// An f32 as the bits of a 16-bit float.
pub fn bits(half: Half, x: f32) -> u16 {
    match half {
        Half::F16 => f16::from_f32(x).to_bits(),
        Half::BF16 => bf16::from_f32(x).to_bits(),
    }
}

/// The value of these bits.
pub fn value(half: Half, bits: u16) -> f64 {
    match half {
        Half::F16 => f16::from_bits(bits).to_f64(),
        Half::BF16 => bf16::from_bits(bits).to_f64(),
    }
}

/// `n` values of noise that a 16-bit type holds, and their bits as bytes.
pub fn some_halves(half: Half, seed: u64, n: usize, scale: f32) -> (Vec<f64>, Vec<u8>) {
    let bits: Vec<u16> = some(seed, n).iter().map(|x| bits(half, scale * x)).collect();
    (bits.iter().map(|&b| value(half, b)).collect(), bits.iter().flat_map(|b| b.to_le_bytes()).collect())
}

/// An element of a head's keys (or values) of a page on a device: rows of tokens, and of q8 then their scales.
pub fn stored(kv: KvType, part: &[u8], head_dim: usize, token: usize, d: usize) -> f64 {
    let at = token * head_dim + d;
    match kv {
        KvType::Q8 => f64::from(part[at].cast_signed()) * f64::from(scale_of(part, head_dim, token)),
        KvType::BF16 | KvType::F16 => value(kv.half(), u16::from_le_bytes([part[2 * at], part[2 * at + 1]])),
    }
}

/// A token's scale of q8.
pub fn scale_of(part: &[u8], head_dim: usize, token: usize) -> f32 {
    let at = PAGE_TOKENS * head_dim + 4 * token;
    f32::from_le_bytes([part[at], part[at + 1], part[at + 2], part[at + 3]])
}

/// `n` heads' keys (or values) of pages, of noise.
pub fn some_parts(kv: KvType, seed: u64, n: usize, head_dim: usize) -> Vec<u8> {
    let row = |i: usize| (0..head_dim).map(move |d| noise(seed, i * head_dim + d));
    let mut bytes = Vec::with_capacity(n * kv.part_bytes(head_dim));
    for part in 0..n {
        let mut scales = Vec::new();
        for token in part * PAGE_TOKENS..(part + 1) * PAGE_TOKENS {
            if kv.is_scaled() {
                let mut codes = vec![0; head_dim];
                scales.push(quantise_head(&row(token).collect::<Vec<f32>>(), &mut codes));
                bytes.extend(codes.iter().map(|c| c.cast_unsigned()));
            } else {
                bytes.extend(row(token).flat_map(|x| bits(kv.half(), x).to_le_bytes()));
            }
        }
        bytes.extend(floats(&scales));
    }
    bytes
}

pub fn floats(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn words(x: &[u32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}
