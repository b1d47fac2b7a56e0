//! Rotary position embedding: which elements of a head form a pair, and the angle that a position turns each pair by. Models, kernels of
//! every tier, the reference and the devices all stand on it.

mod scaling;
mod table;

pub use table::RopeTable;

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Base on sliding-window layers, when it differs (Gemma 3: 10 000).
    pub local_theta: Option<f32>,
    /// Context extension of sliding-window layers, where `local_theta` gives them a base of their own.
    pub local_scaling: RopeScaling,
    /// Which elements form a pair.
    pub pairing: RopePairing,
    /// Rotated elements per head (usually head_dim).
    pub dim: usize,
    /// Context extension.
    pub scaling: RopeScaling,
    /// Growth of the queries with their position.
    pub query_scaling: Option<QueryScaling>,
}

/// Queries grow with their position: by 1 + beta·ln(1 + floor(position / original_context)), which is 1 within the original
/// context (Ministral 3: `llama_4_scaling_beta`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryScaling {
    /// Strength.
    pub beta: f32,
    /// The first position where the factor differs from 1.
    pub original_context: usize,
}

/// Which elements of a head RoPE rotates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// (i, i + dim/2): Hugging Face / NeoX.
    Half,
    /// (2i, 2i + 1): the original; GGUF files of the llama architecture are permuted for it.
    Interleaved,
}

/// Frequency scaling.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Stretch of the context.
        factor: f32,
    },
    /// Llama 3's piecewise scaling (`rope_type: llama3`).
    Llama3 {
        /// Stretch of long wavelengths.
        factor: f32,
        /// Wavelengths above context/low are fully stretched.
        low_freq_factor: f32,
        /// Wavelengths below context/high are kept.
        high_freq_factor: f32,
        /// The context the model was first trained with.
        original_context: usize,
    },
    /// Explicit divisors per frequency (GGUF `rope_freqs.weight`), dim/2 of them.
    Factors(Vec<f32>),
    /// YaRN: waves that turn often within the original context are kept, slow ones stretched, those between blended along the
    /// index of the pair.
    Yarn {
        /// Stretch of slow waves.
        factor: f32,
        /// The context the model was first trained with.
        original_context: usize,
        /// Pairs that turn at least this often keep their frequency.
        beta_fast: f32,
        /// Pairs that turn at most this often are stretched in full.
        beta_slow: f32,
        /// Whether the ends of the blend are rounded to whole pairs.
        truncate: bool,
        /// Factor of cosines and sines.
        attention_factor: f32,
    },
    /// LongRoPE: one of two lists of divisors, by the context of a run.
    LongRope {
        /// Divisors in contexts up to the original one.
        short: Vec<f32>,
        /// Divisors in longer contexts.
        long: Vec<f32>,
        /// The context the model was first trained with.
        original_context: usize,
        /// Factor of cosines and sines.
        attention_factor: f32,
    },
    /// Dynamic NTK: a larger base in contexts longer than the original one.
    Dynamic {
        /// Stretch of the context.
        factor: f32,
        /// The context the model was first trained with.
        original_context: usize,
    },
}
