//! Decodes one row of weights, times a scale, for embeddings.
//!
//! The results equal those of `reference::dequant` bit for bit. Products of a half-precision scale with small integers
//! are exact in f32, so the only roundings are one sum (or one product, Q6_K) and the final scaling, which happen in
//! the same order here.
//!
//! bound      the row is read once, in tens of nanoseconds; negligible against a whole model per token

use half::f16;

use super::convert::{Bf16, F16, widen_bytes};
use crate::reference::dequant::k_scale_min;
use crate::simd::vector::Simd;
use crate::tensor::DType;

/// The minimum of formats that have none: adding -0 changes nothing, where +0 would turn -0 into +0.
const NO_MINIMUM: f32 = -0.0;

/// `out = scale·row`.
#[inline(always)]
pub(crate) fn embed_row<S: Simd>(s: S, dtype: DType, row: &[u8], scale: f32, out: &mut [f32]) {
    assert_eq!(
        Some(row.len()),
        dtype.row_bytes(out.len()),
        "embed_row: {} bytes for {} elements of {dtype}",
        row.len(),
        out.len()
    );
    let blocks = row.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len()));
    match dtype {
        DType::F32 => f32_row(s, row, scale, out),
        // SAFETY: two bytes per element, as asserted.
        DType::F16 => unsafe { widen_bytes(s, row.as_ptr(), scale, out, F16) },
        // SAFETY: two bytes per element, as asserted.
        DType::BF16 => unsafe { widen_bytes(s, row.as_ptr(), scale, out, Bf16) },
        DType::Q8_0 => {
            for (b, o) in blocks {
                q8_0(s, b, scale, o);
            }
        }
        DType::Q4_0 => {
            for (b, o) in blocks {
                nibbles(s, &b[2..], None, 8.0, (half_at(b, 0), NO_MINIMUM), scale, o);
            }
        }
        DType::Q4_1 => {
            for (b, o) in blocks {
                nibbles(s, &b[4..], None, 0.0, (half_at(b, 0), half_at(b, 2)), scale, o);
            }
        }
        DType::Q5_0 => {
            for (b, o) in blocks {
                nibbles(s, &b[6..], Some(word_at(b, 2)), 16.0, (half_at(b, 0), NO_MINIMUM), scale, o);
            }
        }
        DType::Q5_1 => {
            for (b, o) in blocks {
                nibbles(s, &b[8..], Some(word_at(b, 4)), 0.0, (half_at(b, 0), half_at(b, 2)), scale, o);
            }
        }
        DType::Q4_K => {
            for (b, o) in blocks {
                k_block(s, b, &b[16..], None, scale, o);
            }
        }
        DType::Q5_K => {
            for (b, o) in blocks {
                k_block(s, b, &b[48..], Some(&b[16..48]), scale, o);
            }
        }
        DType::Q6_K => {
            for (b, o) in blocks {
                q6_k(s, b, scale, o);
            }
        }
    }
}

#[inline(always)]
fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

#[inline(always)]
fn word_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

#[inline(always)]
fn f32_row<S: Simd>(s: S, row: &[u8], scale: f32, out: &mut [f32]) {
    let n = out.len();
    assert!(row.len() == 4 * n);
    let (p, k) = (row.as_ptr().cast::<f32>(), s.splat(scale));
    let mut i = 0;
    // SAFETY: every access is at i..i + LANES <= n, or a tail of n - i elements; loads need no alignment.
    unsafe {
        while i + S::LANES <= n {
            s.store(out.as_mut_ptr().add(i), s.mul(s.load(p.add(i)), k));
            i += S::LANES;
        }
        if i < n {
            s.store_tail(out.as_mut_ptr().add(i), n - i, s.mul(s.load_tail(p.add(i), n - i, 0.0), k));
        }
    }
}

#[inline(always)]
fn q8_0<S: Simd>(s: S, b: &[u8], scale: f32, o: &mut [f32]) {
    let (qs, d, k) = (&b[2..34], s.splat(half_at(b, 0)), s.splat(scale));
    assert!(o.len() == 32);
    let mut i = 0;
    while i < 32 {
        // SAFETY: LANES (8 or 16) divides 32, the length of `qs` and `o`.
        unsafe {
            let q = s.to_f32(s.load_i8(qs.as_ptr().add(i)));
            s.store(o.as_mut_ptr().add(i), s.mul(s.mul(d, q), k));
        }
        i += S::LANES;
    }
}

/// A block of 32 in 16 bytes of nibbles: the low ones first, then the high ones; bit i of `fifth` is the
/// fifth bit of element i. x = d·(q - zero) + m.
#[inline(always)]
fn nibbles<S: Simd>(
    s: S,
    qs: &[u8],
    fifth: Option<u32>,
    zero: f32,
    (d, m): (f32, f32),
    scale: f32,
    o: &mut [f32],
) {
    assert!(qs.len() == 16 && o.len() == 32);
    let (d, m, zero, k, fifteen) = (s.splat(d), s.splat(m), s.splat(zero), s.splat(scale), s.splat_int(15));
    for high in [0, 16] {
        let mut i = 0;
        while i < 16 {
            // SAFETY: LANES (8 or 16) divides 16, the length of `qs` and of each half of `o`.
            unsafe {
                let byte = s.load_u8(qs.as_ptr().add(i));
                let mut q = s.and(s.shr(byte, high as u32 / 4), fifteen);
                if let Some(bits) = fifth {
                    let bits = s.shr_by_lane(s.splat_int((bits >> (high + i)) as i32));
                    q = s.or(q, s.shl(s.and(bits, s.splat_int(1)), 4));
                }
                let x = s.add(s.mul(d, s.sub(s.to_f32(q), zero)), m);
                s.store(o.as_mut_ptr().add(high + i), s.mul(x, k));
            }
            i += S::LANES;
        }
    }
}

/// A block of 256 of Q4_K, or Q5_K with its 32 bytes of fifth bits: eight sub-blocks of 32 with a 6-bit
/// scale and minimum each; 64 elements share 32 bytes of nibbles.
#[inline(always)]
fn k_block<S: Simd>(s: S, b: &[u8], qs: &[u8], fifth: Option<&[u8]>, scale: f32, o: &mut [f32]) {
    assert!(qs.len() == 128 && o.len() == 256 && fifth.is_none_or(|f| f.len() == 32));
    let (d, dmin, k, fifteen) = (half_at(b, 0), half_at(b, 2), s.splat(scale), s.splat_int(15));
    for sub in 0..8 {
        let (sc, m) = k_scale_min(&b[4..16], sub);
        let (dsc, min) = (s.splat(d * f32::from(sc)), s.splat(dmin * f32::from(m)));
        let mut i = 0;
        while i < 32 {
            // SAFETY: LANES divides 32; sub / 2 * 32 + 32 <= 128 and sub * 32 + 32 <= 256.
            unsafe {
                let byte = s.load_u8(qs.as_ptr().add(sub / 2 * 32 + i));
                let mut q = s.and(s.shr(byte, 4 * (sub as u32 % 2)), fifteen);
                if let Some(f) = fifth {
                    let bit = s.and(s.shr(s.load_u8(f.as_ptr().add(i)), sub as u32), s.splat_int(1));
                    q = s.or(q, s.shl(bit, 4));
                }
                let x = s.sub(s.mul(dsc, s.to_f32(q)), min);
                s.store(o.as_mut_ptr().add(sub * 32 + i), s.mul(x, k));
            }
            i += S::LANES;
        }
    }
}

/// A block of 256 of Q6_K: halves of 128, each of 64 bytes of nibbles and 32 bytes of bit pairs; a signed
/// 8-bit scale per 16 elements.
#[inline(always)]
fn q6_k<S: Simd>(s: S, b: &[u8], scale: f32, o: &mut [f32]) {
    assert!(b.len() == 210 && o.len() == 256);
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
    let (k, zero, fifteen, three) = (s.splat(scale), s.splat(32.0), s.splat_int(15), s.splat_int(3));
    for (group, &sc) in scales.iter().enumerate() {
        let (h, quarter, l) = (group / 8, group / 2 % 4, group % 2 * 16);
        let dsc = s.splat(d * f32::from(sc as i8));
        let mut i = 0;
        while i < 16 {
            // SAFETY: LANES divides 16; h * 64 + 32 + 16 + 16 <= 128, h * 32 + 16 + 16 <= 64, group * 16 + 16
            // <= 256.
            unsafe {
                let nibble = s.load_u8(low.as_ptr().add(h * 64 + quarter % 2 * 32 + l + i));
                let pair = s.load_u8(high.as_ptr().add(h * 32 + l + i));
                let nibble = s.and(s.shr(nibble, 4 * (quarter as u32 / 2)), fifteen);
                let top = s.and(s.shr(pair, 2 * quarter as u32), three);
                let q = s.sub(s.to_f32(s.or(nibble, s.shl(top, 4))), zero);
                s.store(o.as_mut_ptr().add(group * 16 + i), s.mul(s.mul(dsc, q), k));
            }
            i += S::LANES;
        }
    }
}
