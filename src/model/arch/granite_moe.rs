//! Granite-MoE (3.0 and 3.1, 1B-A400M and 3B-A800M): Granite with experts, weighted by a softmax over the chosen ones. Safetensors
//! stack the experts, gates and first matrices together.

use serde_json::{Map, Value as Json};

use super::experts::{HfExperts, experts_to_hf, gguf_experts, hf_experts};
use super::names::like_llama;
use super::{Family, GgufConfig, HfConfig, granite};
use crate::Result;
use crate::model::ModelSpec;
use crate::model::spec::RouterWeights;

pub const FAMILY: Family = Family {
    name: "granitemoe",
    gguf: &["granitemoe"],
    hf: &["granitemoe"],
    from_gguf,
    from_hf,
    names: like_llama![
        ("blk.{}.ffn_gate_inp", "model.layers.{}.block_sparse_moe.router.layer"),
        ("blk.{}.ffn_gate_up_exps", "model.layers.{}.block_sparse_moe.input_linear"),
        ("blk.{}.ffn_down_exps", "model.layers.{}.block_sparse_moe.output_linear"),
    ],
    experts: true,
    to_hf,
    ..granite::FAMILY
};

/// What `transformers` assumes where a file is silent.
const HF: HfExperts = HfExperts {
    count: ("num_local_experts", 8),
    used: 2,
    d_ff: None,
    weights: Some(RouterWeights::OfChosen),
    dense_layers: false,
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    let mut spec = granite::gguf_like_granite(c, FAMILY.name)?;
    spec.experts = Some(gguf_experts(c, &spec, RouterWeights::OfChosen)?);
    Ok(spec)
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    let mut spec = granite::like_granite(c, FAMILY.name)?;
    spec.experts = hf_experts(c, &spec, &HF)?;
    Ok(spec)
}

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    granite::to_hf(s, c)?;
    experts_to_hf(s, c, &HF);
    if let Some(e) = &s.experts {
        c.insert("intermediate_size".to_owned(), e.d_ff.into());
    }
    Ok(())
}
