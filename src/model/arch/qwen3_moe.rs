//! Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 with 8 of 128 experts for each row, their weights divided by their sum.

use serde_json::{Map, Value as Json};

use super::experts::{HfExperts, experts_to_hf, gguf_experts, hf_experts};
use super::llama::Defaults;
use super::names::like_qwen_moe;
use super::{Family, GgufConfig, Habits, HfConfig, llama, qwen3};
use crate::Result;
use crate::model::ModelSpec;
use crate::model::spec::{QkNorm, RopePairing, RouterWeights};

pub const FAMILY: Family = Family {
    name: "qwen3moe",
    gguf: &["qwen3moe"],
    hf: &["qwen3_moe"],
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
const HF: HfExperts = HfExperts {
    count: ("num_experts", 128),
    used: 8,
    d_ff: Some(("moe_intermediate_size", 768)),
    weights: None,
    dense_layers: true,
};

const DEFAULTS: Defaults = Defaults { n_kv_heads: Some(4), head_dim: None, ..qwen3::DEFAULTS };

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    let mut spec = llama::gguf_beside_experts(c, FAMILY.name, RopePairing::Half)?;
    spec.qk_norm = Some(QkNorm::PerHead);
    spec.experts = Some(gguf_experts(c, &spec, RouterWeights::OfChosen)?);
    Ok(spec)
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    let mut spec = qwen3::like_qwen3(c, FAMILY.name, &DEFAULTS)?;
    spec.experts = hf_experts(c, &spec, &HF)?;
    Ok(spec)
}

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::to_hf(s, c)?;
    experts_to_hf(s, c, &HF);
    Ok(())
}
