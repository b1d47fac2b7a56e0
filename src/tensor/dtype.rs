//! Element types of weights. Names and numbers are ggml's, so that GGUF files map one to one.

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
    /// 32 elements: f16 d, 32 x i8; x = d*q. 34 bytes.
    Q8_0,
    /// 32 elements: f16 d, 16 bytes (low nibbles = elements 0..16, high = 16..32); x = d*(q-8). 18 bytes.
    Q4_0,
    /// 32 elements: f16 d, f16 m, 16 bytes of nibbles; x = d*q + m. 20 bytes.
    Q4_1,
    /// 32 elements: f16 d, u32 high bits, 16 bytes; x = d*(q-16). 22 bytes.
    Q5_0,
    /// 32 elements: f16 d, f16 m, u32 high bits, 16 bytes; x = d*q + m. 24 bytes.
    Q5_1,
    /// 256 elements: f16 d, f16 dmin, 12 bytes of 6-bit scales/mins, 128 bytes. 144 bytes.
    Q4_K,
    /// 256 elements: f16 d, f16 dmin, 12 bytes of scales/mins, 32 high bits, 128 bytes. 176 bytes.
    Q5_K,
    /// 256 elements: 128 low nibbles, 64 high 2-bits, 16 x i8 scales, f16 d; x = d*sc*(q-32). 210 bytes.
    Q6_K,
}

impl DType {
    /// All of them, for tests and benches.
    pub const ALL: [DType; 11] = [
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
    ];

    /// Those that store integer codes with scales.
    pub const QUANTISED: [DType; 8] = [
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
            DType::Q4_K | DType::Q5_K | DType::Q6_K => 256,
            _ => 32,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q8_0 => 34,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
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

    /// ggml's type number (GGUF tensor info).
    pub const fn from_ggml(id: u32) -> Option<DType> {
        Some(match id {
            0 => DType::F32,
            1 => DType::F16,
            2 => DType::Q4_0,
            3 => DType::Q4_1,
            6 => DType::Q5_0,
            7 => DType::Q5_1,
            8 => DType::Q8_0,
            12 => DType::Q4_K,
            13 => DType::Q5_K,
            14 => DType::Q6_K,
            30 => DType::BF16,
            _ => return None,
        })
    }

    /// The field's name for it: `q4_k`, `bf16`...
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::Q4_1 => "q4_1",
            DType::Q5_0 => "q5_0",
            DType::Q5_1 => "q5_1",
            DType::Q4_K => "q4_k",
            DType::Q5_K => "q5_k",
            DType::Q6_K => "q6_k",
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
