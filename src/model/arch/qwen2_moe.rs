//! Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts whose weights are those of a softmax over all of them, and an expert of all rows
//! with a sigmoid gate. Some layers may be dense.

use serde_json::{Map, Value as Json};

use super::experts::{HfExperts, experts_to_hf, gguf_experts, hf_experts};
use super::llama::Defaults;
use super::names::like_qwen_moe;
use super::{Family, GgufConfig, Habits, HfConfig, llama, qwen2};
use crate::Result;
use crate::model::ModelSpec;
use crate::model::spec::{RopePairing, RouterWeights};

pub const FAMILY: Family = Family {
    name: "qwen2moe",
    gguf: &["qwen2moe"],
    hf: &["qwen2_moe"],
    from_gguf,
    from_hf,
    names: like_qwen_moe![
        ("blk.{}.ffn_gate_inp_shexp", "model.layers.{}.mlp.shared_expert_gate"),
        ("blk.{}.ffn_gate_shexp", "model.layers.{}.mlp.shared_expert.gate_proj"),
        ("blk.{}.ffn_up_shexp", "model.layers.{}.mlp.shared_expert.up_proj"),
        ("blk.{}.ffn_down_shexp", "model.layers.{}.mlp.shared_expert.down_proj"),
    ],
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
    count: ("num_experts", 60),
    used: 4,
    d_ff: Some(("moe_intermediate_size", 1408)),
    weights: None,
    dense_layers: true,
};
const SHARED: (&str, usize) = ("shared_expert_intermediate_size", 5632);

const DEFAULTS: Defaults = Defaults { n_kv_heads: Some(16), ..qwen2::DEFAULTS };

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    let mut spec = llama::gguf_beside_experts(c, FAMILY.name, RopePairing::Half)?;
    spec.qkv_bias = true;
    let mut experts = gguf_experts(c, &spec, RouterWeights::OfAll)?;
    experts.shared = Some(c.opt_size("expert_shared_feed_forward_length")?.unwrap_or(spec.d_ff));
    // Older files have the width of a row's experts together, or of all.
    if c.opt_size("expert_feed_forward_length")?.is_none() {
        experts.d_ff = spec.d_ff / experts.used.max(1);
    }
    spec.experts = Some(experts);
    Ok(spec)
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    let mut spec = qwen2::like_qwen2(c, FAMILY.name, &DEFAULTS)?;
    spec.qkv_bias = c.flag("qkv_bias", true)?;
    spec.experts = hf_experts(c, &spec, &HF)?;
    let shared = c.opt_size(SHARED.0)?.unwrap_or(SHARED.1);
    if let Some(experts) = &mut spec.experts {
        experts.shared = Some(shared);
    }
    Ok(spec)
}

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::to_hf(s, c)?;
    experts_to_hf(s, c, &HF);
    if let Some(shared) = s.experts.as_ref().and_then(|e| e.shared) {
        c.insert(SHARED.0.to_owned(), shared.into());
    }
    Ok(())
}
