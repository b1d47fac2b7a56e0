//! f32 to every stored format, by plain round-to-nearest.
//!
//! For tests, exports and random weights. Quantising a real model well is an optimisation problem that other
//! tools solve; here each block takes the scale (and minimum) that covers its range.

use half::{bf16, f16};

use super::{BlockFormat, BlockScales, DType, Scales, with_format};

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
    let blocks = row.chunks_exact(dtype.block_len()).zip(out.chunks_exact_mut(dtype.block_bytes()));
    match dtype {
        DType::F32 => blocks.for_each(|(x, o)| o.copy_from_slice(&x[0].to_le_bytes())),
        DType::F16 => blocks.for_each(|(x, o)| o.copy_from_slice(&f16::from_f32(x[0]).to_le_bytes())),
        DType::BF16 => blocks.for_each(|(x, o)| o.copy_from_slice(&bf16::from_f32(x[0]).to_le_bytes())),
        quantised => with_format!(quantised, F => blocks.for_each(|(x, o)| block::<F>(x, o))),
    }
}

fn block<F: BlockFormat>(x: &[f32], out: &mut [u8]) {
    let scales = scales::<F>(x);
    F::put_scales(&scales, out);
    for (i, x) in x.chunks_exact(32).enumerate() {
        let codes = std::array::from_fn(|j| {
            let (d, m) = F::scale_min(&scales, (32 * i + j) / F::SUB);
            code::<F>(x[j] - m, d)
        });
        F::put_codes(&codes, i, out);
    }
}

/// Scales that cover the block's range, or those of its sub-blocks.
fn scales<F: BlockFormat>(x: &[f32]) -> BlockScales {
    let top = ((1 << F::BITS) - 1) as f32;
    let mut s = BlockScales::default();
    match F::SCALES {
        // The byte that is one further out is not used.
        Scales::Scale if F::BITS == 8 => s.d = half(absmax(x) / (f32::from(F::ZERO) - 1.0)).0,
        // The element of largest magnitude becomes the first code, the most negative one, which is further out.
        Scales::Scale => {
            let far = x.iter().fold(0.0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
            s.d = half(far / value::<F>(0)).0;
        }
        // The least power with which the largest magnitude is a value: a mantissa rounded up.
        Scales::PowerOfTwo => {
            let largest = (0..16).fold(0.0f32, |m, c| m.max(value::<F>(c)));
            let power = (absmax(x) / largest).to_bits().div_ceil(1 << 23) << 23;
            s.d = bf16::from_f32(f32::from_bits(power)).to_bits();
        }
        Scales::ScaleMin => {
            let (lo, hi) = range(x);
            (s.d, s.m) = (half((hi - lo) / top).0, half(lo).0);
        }
        Scales::SuperMin => {
            let mut spans = [(0.0, 0.0); 16];
            for (span, x) in spans.iter_mut().zip(x.chunks_exact(F::SUB)) {
                // The stored minimum is subtracted and cannot be negative: a range above zero starts at zero.
                let (lo, hi) = range(x);
                *span = ((-lo).max(0.0), (hi - lo.min(0.0)) / top);
            }
            let (d, dmin);
            (s.d, d) = half(spans.iter().fold(0.0f32, |m, s| m.max(s.1)) / f32::from(F::SUB_MAX));
            (s.m, dmin) = half(spans.iter().fold(0.0f32, |m, s| m.max(s.0)) / f32::from(F::SUB_MAX));
            s.subs = spans.map(|s| nearest(s.1, d, 0, F::SUB_MAX.into()) as u8);
            s.sub_mins = spans.map(|s| nearest(s.0, dmin, 0, F::SUB_MAX.into()) as u8);
        }
        Scales::SuperSigned => {
            let mut spans = [0.0; 16];
            for (span, x) in spans.iter_mut().zip(x.chunks_exact(F::SUB)) {
                *span = absmax(x) / (f32::from(F::ZERO) - 1.0);
            }
            let d;
            (s.d, d) = half(absmax(&spans) / f32::from(F::SUB_MAX));
            s.subs = spans.map(|s| nearest(s, d, 0, F::SUB_MAX.into()) as u8);
        }
    }
    s
}

/// The value of a code.
fn value<F: BlockFormat>(code: u8) -> f32 {
    f32::from(F::TABLE.map_or(code, |table| table[usize::from(code)])) - f32::from(F::ZERO)
}

/// The code of the value nearest to `x / d`.
fn code<F: BlockFormat>(x: f32, d: f32) -> u8 {
    if F::TABLE.is_some() {
        let want = if d == 0.0 { 0.0 } else { x / d };
        let off = |&c: &u8| (value::<F>(c) - want).abs();
        return (0..16).min_by(|a, b| off(a).total_cmp(&off(b))).expect("16 codes");
    }
    let zero = i32::from(F::ZERO);
    // The byte that is one further out is not used.
    let least = if F::BITS == 8 { 1 } else { 0 };
    (nearest(x, d, least - zero, (1 << F::BITS) - 1 - zero) + zero) as u8
}

/// `v` as f16: its bits, and what the reader will see.
fn half(v: f32) -> (u16, f32) {
    let h = f16::from_f32(v);
    (h.to_bits(), h.to_f32())
}

/// The integer nearest to `x / d`, in lo..=hi. A scale of zero means a block of zeros.
fn nearest(x: f32, d: f32, lo: i32, hi: i32) -> i32 {
    if d == 0.0 { 0.clamp(lo, hi) } else { ((x / d).round() as i32).clamp(lo, hi) }
}

fn absmax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |m, v| m.max(v.abs()))
}

fn range(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| (lo.min(v), hi.max(v)))
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
            // Half a step, and scale and minimum each off by half of 1/63 (1/15) (over the full range of 2 and 1).
            DType::Q4_K => 1.0 / 15.0 + 1.0 / 63.0 + 0.5 / 63.0 + 4.0 / 1024.0,
            DType::Q5_K => 1.0 / 31.0 + 1.0 / 63.0 + 0.5 / 63.0 + 4.0 / 1024.0,
            DType::Q2_K => 1.0 / 3.0 + 1.0 / 15.0 + 0.5 / 15.0 + 4.0 / 1024.0,
            // Half a step of 1/31, and a scale off by half of 1/127.
            DType::Q6_K => 0.5 / 31.0 + 0.5 / 127.0 + 2.0 / 1024.0,
            // Half a step of 1/3, and a scale off by half of 1/31.
            DType::Q3_K => 0.5 / 3.0 + 0.5 / 31.0 + 2.0 / 1024.0,
            // As IQ4_NL, and a scale off by half of 1/31.
            DType::IQ4_XS => 14.0 / 127.0 + 0.5 / 31.0 + 2.0 / 1024.0,
            // Half of the step from 8 to 12, where the largest magnitude is 10 scales.
            DType::MXFP4 => 1.0 / 5.0,
            // The largest magnitude becomes -127; one as large of the other sign, 113.
            DType::IQ4_NL => 14.0 / 127.0 + 1.0 / 1024.0,
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
}
