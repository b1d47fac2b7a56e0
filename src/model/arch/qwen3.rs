//! Qwen3: RMS norms on each query and key head, and an independent head width (h_a·d_h need not be d).

use super::{Family, GgufConfig, HfConfig, llama, names};
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
    to_hf: llama::to_hf,
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    Ok(ModelSpec { qk_norm: Some(QkNorm::PerHead), ..llama::gguf_like_llama(c, "qwen3", RopePairing::Half)? })
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    let mut spec = llama::from_hf(c, "qwen3")?;
    // The head width that the family assumes when a config leaves it out.
    if c.opt_size("head_dim")?.is_none() {
        spec.head_dim = 128;
        spec.attn_scale = 128f32.powf(-0.5);
        spec.position = crate::model::spec::Position::Rope(c.rope(128, 10_000.0)?);
    }
    spec.qk_norm = Some(QkNorm::PerHead);
    spec.window = c.qwen_window(spec.n_layers)?;
    Ok(spec)
}
