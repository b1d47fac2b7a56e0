//! Qwen2 and Qwen2.5: Llama with biases on Q, K and V.

use super::llama::Defaults;
use super::{Family, GgufConfig, Habits, HfConfig, RopeDefaults, llama, names};
use crate::Result;
use crate::model::ModelSpec;
use crate::model::spec::RopePairing;

pub const FAMILY: Family = Family {
    name: "qwen2",
    gguf: &["qwen2"],
    hf: &["qwen2"],
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
    rope: RopeDefaults { max_context: Some(32_768), ..RopeDefaults::base(10_000.0) },
    ..llama::LLAMA
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    Ok(ModelSpec { qkv_bias: true, ..llama::gguf_like_llama(c, "qwen2", RopePairing::Half)? })
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    like_qwen2(c, "qwen2", &DEFAULTS)
}

/// The settings of a family with Qwen2's attention, and defaults of its own.
pub fn like_qwen2(c: &HfConfig, family: &str, or: &Defaults) -> Result<ModelSpec> {
    let mut spec = llama::from_hf_or(c, family, or)?;
    spec.qkv_bias = true;
    spec.window = c.qwen_window(spec.n_layers)?;
    Ok(spec)
}
