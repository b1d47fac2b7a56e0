//! OLMoE: 8 of 64 experts for each row, weighted by a softmax over all; RMS norms over all query heads together and over all key
//! heads together.

use serde_json::{Map, Value as Json};

use super::experts::{HfExperts, experts_to_hf, gguf_experts, hf_experts};
use super::llama::Defaults;
use super::names::like_qwen_moe;
use super::{Family, GgufConfig, Habits, HfConfig, RopeDefaults, llama};
use crate::model::ModelSpec;
use crate::model::spec::{QkNorm, RopePairing, RouterWeights};
use crate::{Error, Result};

pub const FAMILY: Family = Family {
    name: "olmoe",
    gguf: &["olmoe"],
    hf: &["olmoe"],
    from_gguf,
    from_hf,
    names: like_qwen_moe![],
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Half,
    gguf_windows: false,
    gguf_softcaps: false,
    habits: Habits::NONE,
    experts: true,
    to_hf,
};

/// What `transformers` assumes where a file is silent.
const HF: HfExperts =
    HfExperts { count: ("num_experts", 64), used: 8, d_ff: None, weights: None, dense_layers: false };
const DEFAULTS: Defaults = Defaults {
    eps: 1e-5,
    rope: RopeDefaults { max_context: Some(4096), ..RopeDefaults::base(10_000.0) },
    ..llama::LLAMA
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    let mut spec = llama::gguf_beside_experts(c, FAMILY.name, RopePairing::Half)?;
    spec.qk_norm = Some(QkNorm::Whole);
    spec.experts = Some(gguf_experts(c, &spec, RouterWeights::OfAll)?);
    Ok(spec)
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    if let Some(clip) = c.get("clip_qkv") {
        return Err(Error::Unsupported(format!(
            "config.json: clip_qkv is {clip}; queries, keys and values that are clipped are not supported"
        )));
    }
    let mut spec = llama::from_hf_or(c, FAMILY.name, &DEFAULTS)?;
    spec.qk_norm = Some(QkNorm::Whole);
    spec.experts = hf_experts(c, &spec, &HF)?;
    Ok(spec)
}

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::to_hf(s, c)?;
    experts_to_hf(s, c, &HF);
    if let Some(e) = &s.experts {
        c.insert("intermediate_size".to_owned(), e.d_ff.into());
    }
    Ok(())
}
