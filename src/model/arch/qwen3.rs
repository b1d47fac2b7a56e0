//! Qwen3: RMS norms on each query and key head, and an independent head width (h_a·d_h need not be d).

use super::llama::Defaults;
use super::{Family, GgufConfig, Habits, HfConfig, RopeDefaults, llama, names};
use crate::Result;
use crate::model::ModelSpec;
use crate::model::spec::{QkNorm, RopePairing};

pub const FAMILY: Family = Family {
    name: "qwen3",
    gguf: &["qwen3"],
    hf: &["qwen3"],
    from_gguf,
    from_hf,
    names: names::LLAMA,
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Half,
    gguf_windows: false,
    gguf_softcaps: false,
    habits: Habits::NONE,
    experts: false,
    to_hf: llama::to_hf,
};

/// What `transformers` assumes where a file is silent.
pub const DEFAULTS: Defaults = Defaults {
    n_kv_heads: Some(32),
    head_dim: Some(128),
    rope: RopeDefaults { max_context: Some(32_768), ..RopeDefaults::base(10_000.0) },
    ..llama::LLAMA
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    Ok(ModelSpec { qk_norm: Some(QkNorm::PerHead), ..llama::gguf_like_llama(c, "qwen3", RopePairing::Half)? })
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    like_qwen3(c, "qwen3", &DEFAULTS)
}

/// The settings of a family with Qwen3's attention, and defaults of its own.
pub fn like_qwen3(c: &HfConfig, family: &str, or: &Defaults) -> Result<ModelSpec> {
    let mut spec = llama::from_hf_or(c, family, or)?;
    spec.qk_norm = Some(QkNorm::PerHead);
    spec.window = c.qwen_window(spec.n_layers)?;
    Ok(spec)
}
