//! Rotary position embedding: which elements of a head form a pair, and the angle that a position turns each pair by. Models, kernels of
//! every tier, the reference and the devices all stand on it.

mod table;

pub use table::RopeTable;

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Base on sliding-window layers, when it differs (Gemma 3: 10 000; no scaling is applied there).
    pub local_theta: Option<f32>,
    /// Which elements form a pair.
    pub pairing: RopePairing,
    /// Rotated elements per head (usually head_dim).
    pub dim: usize,
    /// Context extension.
    pub scaling: RopeScaling,
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
}
