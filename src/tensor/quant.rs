//! f32 to every stored format, by plain round-to-nearest.
//!
//! For tests, exports and random weights. Quantising a real model well is an optimisation problem that other
//! tools solve; here each block takes the scale (and minimum) that covers its range.

use half::{bf16, f16};

use super::DType;

/// Encodes a row (or any run of whole blocks).
///
/// # Panics
/// `out` is not as long as `row.len()` elements of `dtype` take.
pub fn quantise_row(dtype: DType, row: &[f32], out: &mut [u8]) {
    assert_eq!(
        Some(out.len()),
        dtype.row_bytes(row.len()),
        "{} bytes for {} elements of {dtype}",
        out.len(),
        row.len()
    );
    for (x, o) in row.chunks_exact(dtype.block_len()).zip(out.chunks_exact_mut(dtype.block_bytes())) {
        match dtype {
            DType::F32 => o.copy_from_slice(&x[0].to_le_bytes()),
            DType::F16 => o.copy_from_slice(&f16::from_f32(x[0]).to_le_bytes()),
            DType::BF16 => o.copy_from_slice(&bf16::from_f32(x[0]).to_le_bytes()),
            DType::Q8_0 => q8_0(x, o),
            DType::Q4_0 => symmetric(x, o, 4),
            DType::Q5_0 => symmetric(x, o, 5),
            DType::Q4_1 => affine(x, o, 4),
            DType::Q5_1 => affine(x, o, 5),
            DType::Q4_K => k_affine(x, o, 4),
            DType::Q5_K => k_affine(x, o, 5),
            DType::Q6_K => q6_k(x, o),
        }
    }
}

/// Stores `v` as f16 at `at` and returns what the reader will see.
fn put_half(o: &mut [u8], at: usize, v: f32) -> f32 {
    let h = f16::from_f32(v);
    o[at..at + 2].copy_from_slice(&h.to_le_bytes());
    h.to_f32()
}

/// Nearest code of x at scale d, in lo..=hi. A scale of zero means a block of zeros.
fn code(x: f32, d: f32, lo: i32, hi: i32) -> i32 {
    if d == 0.0 { 0.clamp(lo, hi) } else { ((x / d).round() as i32).clamp(lo, hi) }
}

fn absmax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |m, v| m.max(v.abs()))
}

fn range(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| (lo.min(v), hi.max(v)))
}

fn q8_0(x: &[f32], o: &mut [u8]) {
    let d = put_half(o, 0, absmax(x) / 127.0);
    for (o, &x) in o[2..].iter_mut().zip(x) {
        *o = code(x, d, -127, 127) as i8 as u8;
    }
}

/// 32 codes of 4 or 5 bits: nibbles at `qs`, fifth bits as a little-endian u32 at `high`.
fn put_codes(codes: &[u8; 32], o: &mut [u8], bits: u32, high: usize, qs: usize) {
    for i in 0..16 {
        o[qs + i] = (codes[i] & 15) | (codes[i + 16] & 15) << 4;
    }
    if bits == 5 {
        let top = codes.iter().enumerate().fold(0u32, |t, (i, &c)| t | u32::from(c >> 4) << i);
        o[high..high + 4].copy_from_slice(&top.to_le_bytes());
    }
}

/// Q4_0 and Q5_0: the element of largest magnitude becomes the most negative code, which is one further out.
fn symmetric(x: &[f32], o: &mut [u8], bits: u32) {
    let half = 1 << (bits - 1);
    let far = x.iter().fold(0.0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    let d = put_half(o, 0, far / -half as f32);
    let mut codes = [0u8; 32];
    for (c, &x) in codes.iter_mut().zip(x) {
        *c = (code(x, d, -half, half - 1) + half) as u8;
    }
    put_codes(&codes, o, bits, 2, if bits == 5 { 6 } else { 2 });
}

/// Q4_1 and Q5_1.
fn affine(x: &[f32], o: &mut [u8], bits: u32) {
    let top = (1 << bits) - 1;
    let (lo, hi) = range(x);
    let d = put_half(o, 0, (hi - lo) / top as f32);
    let m = put_half(o, 2, lo);
    let mut codes = [0u8; 32];
    for (c, &x) in codes.iter_mut().zip(x) {
        *c = code(x - m, d, 0, top) as u8;
    }
    put_codes(&codes, o, bits, 4, if bits == 5 { 8 } else { 4 });
}

/// The 12 bytes of eight 6-bit scales and minima, as Q4_K and Q5_K store them.
pub fn pack_scales_mins(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut b = [0u8; 12];
    for j in 0..4 {
        b[j] = scales[j] | (scales[j + 4] >> 4) << 6;
        b[j + 4] = mins[j] | (mins[j + 4] >> 4) << 6;
        b[j + 8] = (scales[j + 4] & 15) | (mins[j + 4] & 15) << 4;
    }
    b
}

/// Q4_K and Q5_K: eight sub-blocks of 32, each with its range.
fn k_affine(x: &[f32], o: &mut [u8], bits: u32) {
    let top = (1 << bits) - 1;
    let mut spans = [(0f32, 0f32); 8];
    for (s, x) in spans.iter_mut().zip(x.chunks_exact(32)) {
        // The stored minimum is subtracted and cannot be negative: a range above zero starts at zero.
        let (lo, hi) = range(x);
        *s = ((-lo).max(0.0), (hi - lo.min(0.0)) / top as f32);
    }
    let d = put_half(o, 0, spans.iter().fold(0.0f32, |m, s| m.max(s.1)) / 63.0);
    let dmin = put_half(o, 2, spans.iter().fold(0.0f32, |m, s| m.max(s.0)) / 63.0);
    let scales = spans.map(|s| code(s.1, d, 0, 63) as u8);
    let mins = spans.map(|s| code(s.0, dmin, 0, 63) as u8);
    o[4..16].copy_from_slice(&pack_scales_mins(&scales, &mins));
    let (head, qs) = o.split_at_mut(if bits == 5 { 48 } else { 16 });
    qs.fill(0);
    if bits == 5 {
        head[16..48].fill(0);
    }
    for (i, &x) in x.iter().enumerate() {
        let (sub, l) = (i / 32, i % 32);
        let q = code(x + dmin * f32::from(mins[sub]), d * f32::from(scales[sub]), 0, top) as u8;
        qs[sub / 2 * 32 + l] |= (q & 15) << (4 * (sub % 2));
        if bits == 5 {
            head[16 + l] |= (q >> 4) << sub;
        }
    }
}

fn q6_k(x: &[f32], o: &mut [u8]) {
    let mut sub = [0f32; 16];
    for (s, x) in sub.iter_mut().zip(x.chunks_exact(16)) {
        *s = absmax(x) / 31.0;
    }
    let d = put_half(o, 208, absmax(&sub) / 127.0);
    o[..192].fill(0);
    let scales = sub.map(|s| code(s, d, 0, 127));
    for (o, s) in o[192..208].iter_mut().zip(scales) {
        *o = s as i8 as u8;
    }
    for (i, &x) in x.iter().enumerate() {
        let (h, quarter, l) = (i / 128, i / 32 % 4, i % 32);
        let q = (code(x, d * scales[i / 16] as f32, -32, 31) + 32) as u8;
        o[h * 64 + quarter % 2 * 32 + l] |= (q & 15) << (4 * (quarter / 2));
        o[128 + h * 32 + l] |= (q >> 4) << (2 * quarter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::dequant::dequantise_row;

    /// Largest error relative to the block's largest magnitude: half a step of codes over [-1, 1] or the
    /// like, plus what rounding scales (f16, and six bits in K-quants) adds.
    fn bound(d: DType) -> f32 {
        match d {
            DType::F32 => 0.0,
            DType::F16 => 1.0 / 2048.0,
            DType::BF16 => 1.0 / 256.0,
            // Half a code of 254, and 127 codes of a scale that is off by 2^-11.
            DType::Q8_0 => 0.5 / 127.0 + 1.0 / 2048.0,
            // Positive extremes clip to one code less: a whole step.
            DType::Q4_0 => 1.0 / 8.0 + 1.0 / 1024.0,
            DType::Q5_0 => 1.0 / 16.0 + 1.0 / 1024.0,
            // Steps of 2/15 and 2/31 (range up to twice the magnitude).
            DType::Q4_1 => 1.0 / 15.0 + 3.0 / 1024.0,
            DType::Q5_1 => 1.0 / 31.0 + 3.0 / 1024.0,
            // Half a step, and scale and minimum each off by half of 1/63 (over the full range of 2 and 1).
            DType::Q4_K => 1.0 / 15.0 + 1.0 / 63.0 + 0.5 / 63.0 + 4.0 / 1024.0,
            DType::Q5_K => 1.0 / 31.0 + 1.0 / 63.0 + 0.5 / 63.0 + 4.0 / 1024.0,
            // Half a step of 1/31, and a scale off by half of 1/127.
            DType::Q6_K => 0.5 / 31.0 + 0.5 / 127.0 + 2.0 / 1024.0,
        }
    }

    #[test]
    fn what_is_quantised_comes_back_close() {
        let mut s = 1u64;
        let mut next = || {
            s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (s >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0
        };
        for d in DType::ALL {
            for (case, shift) in [("centred", 0.0f32), ("positive", 1.0), ("negative", -1.0)] {
                let row: Vec<f32> = (0..512).map(|_| next() + shift).collect();
                let mut bytes = vec![0xAA; d.row_bytes(512).unwrap()];
                quantise_row(d, &row, &mut bytes);
                let mut back = vec![f32::NAN; 512];
                dequantise_row(d, &bytes, &mut back);
                let most = row.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                for (i, (a, b)) in row.iter().zip(&back).enumerate() {
                    assert!((a - b).abs() <= bound(d) * most, "{d} {case} element {i}: {a} came back as {b}");
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zero() {
        for d in DType::ALL {
            let mut bytes = vec![0xAA; d.row_bytes(256).unwrap()];
            quantise_row(d, &[0.0; 256], &mut bytes);
            let mut back = [f32::NAN; 256];
            dequantise_row(d, &bytes, &mut back);
            assert!(back.iter().all(|&v| v == 0.0), "{d}");
        }
    }

    #[test]
    fn packed_scales_unpack() {
        let scales = [0, 63, 1, 32, 15, 16, 47, 63];
        let mins = [63, 0, 17, 5, 63, 48, 1, 31];
        let b = pack_scales_mins(&scales, &mins);
        for j in 0..8 {
            assert_eq!(crate::reference::dequant::k_scale_min(&b, j), (scales[j], mins[j]));
        }
    }
}
