//! Mixtral: Mistral with 2 of 8 experts for each row, weighted by a softmax over the two. GGUF files name the llama architecture.

use serde_json::{Map, Value as Json};

use super::experts::{HfExperts, experts_to_hf, gguf_experts, hf_experts};
use super::llama::Defaults;
use super::names::like_llama;
use super::{Family, GgufConfig, Habits, HfConfig, RopeDefaults, llama, mistral};
use crate::Result;
use crate::model::ModelSpec;
use crate::model::spec::{RopePairing, RouterWeights};

pub const FAMILY: Family = Family {
    name: "mixtral",
    gguf: &["llama"],
    hf: &["mixtral"],
    from_gguf,
    from_hf,
    names: like_llama![
        ("blk.{}.ffn_gate_inp", "model.layers.{}.block_sparse_moe.gate"),
        ("blk.{}.ffn_gate.{}", "model.layers.{}.block_sparse_moe.experts.{}.w1"),
        ("blk.{}.ffn_up.{}", "model.layers.{}.block_sparse_moe.experts.{}.w3"),
        ("blk.{}.ffn_down.{}", "model.layers.{}.block_sparse_moe.experts.{}.w2"),
    ],
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Interleaved,
    gguf_windows: false,
    gguf_softcaps: false,
    habits: Habits::NONE,
    experts: true,
    to_hf,
};

/// What `transformers` assumes where a file is silent.
const HF: HfExperts = HfExperts {
    count: ("num_local_experts", 8),
    used: 2,
    d_ff: None,
    weights: Some(RouterWeights::OfChosen),
    dense_layers: false,
};
const DEFAULTS: Defaults = Defaults {
    eps: 1e-5,
    rope: RopeDefaults { max_context: Some(131_072), ..RopeDefaults::base(1_000_000.0) },
    ..mistral::DEFAULTS
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    let mut spec = llama::gguf_beside_experts(c, FAMILY.name, RopePairing::Interleaved)?;
    spec.experts = Some(gguf_experts(c, &spec, RouterWeights::OfChosen)?);
    Ok(spec)
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    let mut spec = llama::from_hf_or(c, FAMILY.name, &DEFAULTS)?;
    spec.window = mistral::window(c, spec.n_layers, None)?;
    spec.experts = hf_experts(c, &spec, &HF)?;
    Ok(spec)
}

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    mistral::to_hf(s, c)?;
    experts_to_hf(s, c, &HF);
    if let Some(e) = &s.experts {
        c.insert("intermediate_size".to_owned(), e.d_ff.into());
    }
    Ok(())
}
