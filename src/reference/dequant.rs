//! Stored weights to f32, block by block: the definition that every faster kernel is held to.
//!
//! Bit for bit what ggml computes: each product and each sum rounds to f32 on its own, no fused
//! multiply-add. `tests/fixtures/dequant.json` holds blocks of every format with the bits that ggml's own
//! Python reference gives.

use half::{bf16, f16};

use crate::tensor::{DType, Tensor};

/// Decodes one row (or any run of whole blocks).
///
/// # Panics
/// `bytes` is not as long as `out.len()` elements of `dtype` take.
pub fn dequantise_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(
        Some(bytes.len()),
        dtype.row_bytes(out.len()),
        "{} bytes for {} elements of {dtype}",
        bytes.len(),
        out.len()
    );
    let blocks = bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len()));
    match dtype {
        DType::F32 => blocks.for_each(|(b, o)| o[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::F16 => blocks.for_each(|(b, o)| o[0] = half_at(b, 0)),
        DType::BF16 => blocks.for_each(|(b, o)| o[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        DType::Q8_0 => blocks.for_each(|(b, o)| q8_0(b, o)),
        DType::Q4_0 => blocks.for_each(|(b, o)| q4_0(b, o)),
        DType::Q4_1 => blocks.for_each(|(b, o)| q4_1(b, o)),
        DType::Q5_0 => blocks.for_each(|(b, o)| q5_0(b, o)),
        DType::Q5_1 => blocks.for_each(|(b, o)| q5_1(b, o)),
        DType::Q4_K => blocks.for_each(|(b, o)| q4_k(b, o)),
        DType::Q5_K => blocks.for_each(|(b, o)| q5_k(b, o)),
        DType::Q6_K => blocks.for_each(|(b, o)| q6_k(b, o)),
    }
}

/// Decodes a whole tensor, row after row.
pub fn dequantise(t: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; t.rows() * t.cols()];
    if !out.is_empty() {
        dequantise_row(t.dtype, &t.data, &mut out);
    }
    out
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn q8_0(b: &[u8], o: &mut [f32]) {
    let d = half_at(b, 0);
    for (o, &q) in o.iter_mut().zip(&b[2..]) {
        *o = d * f32::from(q as i8);
    }
}

fn q4_0(b: &[u8], o: &mut [f32]) {
    let d = half_at(b, 0);
    for i in 0..16 {
        let q = b[2 + i];
        o[i] = d * (i32::from(q & 15) - 8) as f32;
        o[i + 16] = d * (i32::from(q >> 4) - 8) as f32;
    }
}

fn q4_1(b: &[u8], o: &mut [f32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for i in 0..16 {
        let q = b[4 + i];
        o[i] = d * f32::from(q & 15) + m;
        o[i + 16] = d * f32::from(q >> 4) + m;
    }
}

/// Element `i` of the 5-bit formats: nibble from `qs`, fifth bit from bit `i` of the 32 at `high`.
fn five_bits(qs: &[u8], high: &[u8], i: usize) -> u8 {
    let low = if i < 16 { qs[i] & 15 } else { qs[i - 16] >> 4 };
    low | ((high[i / 8] >> (i % 8)) & 1) << 4
}

fn q5_0(b: &[u8], o: &mut [f32]) {
    let d = half_at(b, 0);
    for (i, o) in o.iter_mut().enumerate() {
        *o = d * (i32::from(five_bits(&b[6..], &b[2..6], i)) - 16) as f32;
    }
}

fn q5_1(b: &[u8], o: &mut [f32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for (i, o) in o.iter_mut().enumerate() {
        *o = d * f32::from(five_bits(&b[8..], &b[4..8], i)) + m;
    }
}

/// The 6-bit scale and minimum of sub-block `j` (0..8) of Q4_K and Q5_K, from their 12 packed bytes:
/// 0..4 sit in the low six bits of bytes j and j+4; 4..8 in a nibble of byte j+4 and the top two bits of the others.
pub fn k_scale_min(scales: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (scales[j] & 63, scales[j + 4] & 63)
    } else {
        ((scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4), (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4))
    }
}

fn q4_k(b: &[u8], o: &mut [f32]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let (scales, qs) = (&b[4..16], &b[16..144]);
    for (i, o) in o.iter_mut().enumerate() {
        // 64 elements share 32 bytes: low nibbles are the first sub-block of 32, high ones the second.
        let (sub, l) = (i / 32, i % 32);
        let (sc, m) = k_scale_min(scales, sub);
        let q = (qs[sub / 2 * 32 + l] >> (4 * (sub % 2))) & 15;
        *o = (d * f32::from(sc)) * f32::from(q) - dmin * f32::from(m);
    }
}

fn q5_k(b: &[u8], o: &mut [f32]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let (scales, high, qs) = (&b[4..16], &b[16..48], &b[48..176]);
    for (i, o) in o.iter_mut().enumerate() {
        let (sub, l) = (i / 32, i % 32);
        let (sc, m) = k_scale_min(scales, sub);
        let q = ((qs[sub / 2 * 32 + l] >> (4 * (sub % 2))) & 15) | (((high[l] >> sub) & 1) << 4);
        *o = (d * f32::from(sc)) * f32::from(q) - dmin * f32::from(m);
    }
}

fn q6_k(b: &[u8], o: &mut [f32]) {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
    for (i, o) in o.iter_mut().enumerate() {
        // Halves of 128; in each, 64 bytes of nibbles (quarters 0, 1 low, 2, 3 high) and 32 bytes of bit pairs.
        let (h, quarter, l) = (i / 128, i / 32 % 4, i % 32);
        let nibble = (low[h * 64 + quarter % 2 * 32 + l] >> (4 * (quarter / 2))) & 15;
        let top = (high[h * 32 + l] >> (2 * quarter)) & 3;
        let q = i32::from(nibble | top << 4) - 32;
        *o = (d * f32::from(scales[i / 16] as i8)) * q as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unhex(s: &str) -> Vec<u8> {
        (0..s.len()).step_by(2).map(|i| u8::from_str_radix(&s[i..i + 2], 16).unwrap()).collect()
    }

    #[test]
    fn every_format_decodes_to_the_bits_of_ggml() {
        let cases: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/fixtures/dequant.json")).unwrap();
        let mut seen = Vec::new();
        for case in cases.as_array().unwrap() {
            let dtype = DType::from_name(case["dtype"].as_str().unwrap()).unwrap();
            let want: Vec<u32> = unhex(case["f32"].as_str().unwrap())
                .chunks_exact(4)
                .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
                .collect();
            let mut out = vec![f32::NAN; want.len()];
            dequantise_row(dtype, &unhex(case["bytes"].as_str().unwrap()), &mut out);
            for (i, (o, w)) in out.iter().zip(&want).enumerate() {
                assert_eq!(o.to_bits(), *w, "{dtype} element {i}: {o} instead of {}", f32::from_bits(*w));
            }
            seen.push(dtype);
        }
        for d in DType::ALL {
            assert!(seen.contains(&d), "no fixture for {d}");
        }
    }
}
