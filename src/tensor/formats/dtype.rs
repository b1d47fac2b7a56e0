//! Element types of weights. Names and numbers are ggml's, so that GGUF files map one to one.

use super::{BlockFormat, with_format};

/// A storage type of weights. Quantised types store blocks of consecutive elements of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types)]
pub enum DType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// 32 elements, f16 scale, 8 bits: `q8_0.rs`.
    Q8_0,
    /// 32 elements, f16 scale, 4 bits: `q4_0.rs`.
    Q4_0,
    /// 32 elements, f16 scale and minimum, 4 bits: `q4_1.rs`.
    Q4_1,
    /// 32 elements, f16 scale, 5 bits: `q5_0.rs`.
    Q5_0,
    /// 32 elements, f16 scale and minimum, 5 bits: `q5_1.rs`.
    Q5_1,
    /// 256 elements, two levels of scales and minima, 4 bits: `q4_k.rs`.
    Q4_K,
    /// 256 elements, two levels of scales and minima, 5 bits: `q5_k.rs`.
    Q5_K,
    /// 256 elements, two levels of scales, 6 bits: `q6_k.rs`.
    Q6_K,
    /// 32 elements, f16 scale, 4 bits that index a table: `iq4_nl.rs`.
    IQ4_NL,
    /// 32 elements, a power of two as scale, 4 bits that are floats: `mxfp4.rs`.
    MXFP4,
    /// 256 elements, two levels of scales, 4 bits that index a table: `iq4_xs.rs`.
    IQ4_XS,
    /// 256 elements, two levels of scales, 3 bits: `q3_k.rs`.
    Q3_K,
    /// 256 elements, two levels of scales and minima, 2 bits: `q2_k.rs`.
    Q2_K,
}

impl DType {
    /// All of them, for tests and benches.
    pub const ALL: [DType; 16] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::IQ4_NL,
        DType::MXFP4,
        DType::IQ4_XS,
        DType::Q3_K,
        DType::Q2_K,
    ];

    /// Those that store integer codes with scales.
    pub const QUANTISED: [DType; 13] = [
        DType::IQ4_NL,
        DType::IQ4_XS,
        DType::MXFP4,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q4_K,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q5_K,
        DType::Q6_K,
        DType::Q8_0,
    ];

    /// Elements per block (1 for plain floats).
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            quantised => with_format!(quantised, F => F::LEN),
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            quantised => with_format!(quantised, F => F::BYTES),
        }
    }

    /// Bytes of a row of `k` elements; `None` if `k` is no multiple of the block or overflows.
    pub fn row_bytes(self, k: usize) -> Option<usize> {
        if !k.is_multiple_of(self.block_len()) {
            return None;
        }
        (k / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether it stores integer codes with scales.
    pub const fn is_quantised(self) -> bool {
        self.block_len() > 1
    }

    /// The type with this number of ggml's (GGUF tensor info).
    pub fn from_ggml(id: u32) -> Option<DType> {
        let number = |d| match d {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::BF16 => 30,
            quantised => with_format!(quantised, F => F::GGML),
        };
        DType::ALL.into_iter().find(|&d| number(d) == id)
    }

    /// The field's name for it: `q4_k`, `bf16`...
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            quantised => with_format!(quantised, F => F::NAME),
        }
    }

    /// The inverse of [`DType::name`], case-insensitive.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name().eq_ignore_ascii_case(name))
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
