//! Stored weights to f32, block by block: the definition that every faster kernel is held to.
//!
//! Bit for bit what ggml computes: each product and each sum rounds to f32 on its own, no fused
//! multiply-add. `tensor/formats/` has the formats. `tests/fixtures/dequant.json` holds blocks of every format with the bits
//! that ggml's own Python reference gives.

use half::{bf16, f16};

use crate::tensor::formats::{BlockFormat, with_format};
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
        DType::F16 => blocks.for_each(|(b, o)| o[0] = f16::from_le_bytes([b[0], b[1]]).to_f32()),
        DType::BF16 => blocks.for_each(|(b, o)| o[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        quantised => with_format!(quantised, F => blocks.for_each(|(b, o)| F::decode(b, o))),
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
