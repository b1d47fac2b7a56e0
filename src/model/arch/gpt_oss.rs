//! gpt-oss (20b, 120b): attention with sinks and a window on every other layer, biases everywhere, 4 of 32 or 128 experts chosen by
//! biased logits and weighted by a softmax over the chosen, a clamped SwiGLU, YaRN.
//!
//! The models were trained with a YaRN ramp that begins and ends between whole pairs (`truncate` is false in config.json). GGUF has no
//! key for this and llama.cpp rounds the ends; here files of either format compute what was trained.
//! GGUF files call the norm before the feed-forward `post_attention_norm`, as llama.cpp's converter does.

use serde_json::{Map, Value as Json, json};

use super::experts::{HfExperts, experts_to_hf, gguf_experts, hf_experts};
use super::llama::Defaults;
use super::names::like_llama;
use super::{Family, GgufConfig, Habits, HfConfig, RopeDefaults, llama, mscale};
use crate::model::ModelSpec;
use crate::model::check::MAX_LAYERS;
use crate::model::spec::{Ffn, Position, RopePairing, RopeScaling, RouterWeights};
use crate::reference::activation::{SWIGLU_GAIN, SWIGLU_LIMIT};
use crate::{Error, Result};

pub const FAMILY: Family = Family {
    name: "gpt-oss",
    gguf: &["gpt-oss"],
    hf: &["gpt_oss"],
    from_gguf,
    from_hf,
    names: like_llama![
        ("blk.{}.attn_sinks", "model.layers.{}.self_attn.sinks"),
        ("blk.{}.ffn_gate_inp", "model.layers.{}.mlp.router"),
        ("blk.{}.ffn_gate_up_exps", "model.layers.{}.mlp.experts.gate_up_proj"),
        ("blk.{}.ffn_down_exps", "model.layers.{}.mlp.experts.down_proj"),
    ],
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Half,
    gguf_windows: true,
    gguf_softcaps: false,
    habits: Habits {
        gguf_names: &[("ffn_norm", "post_attention_norm")],
        gguf_yarn_truncates: false,
        hf_interleaves: true,
    },
    experts: true,
    to_hf,
};

/// What `transformers` assumes where a file is silent.
const HF: HfExperts = HfExperts {
    count: ("num_local_experts", 128),
    used: 4,
    d_ff: None,
    weights: Some(RouterWeights::OfChosen),
    dense_layers: false,
};
const DEFAULTS: Defaults = Defaults {
    n_kv_heads: Some(8),
    head_dim: Some(64),
    eps: 1e-5,
    rope: RopeDefaults { max_context: Some(131_072), ..RopeDefaults::base(150_000.0) },
};
const WINDOW: usize = 128;
/// One layer in this many sees the whole context: the second, the fourth and so on.
const PATTERN: usize = 2;

/// What every model of the family has, whatever a file says.
fn complete(spec: &mut ModelSpec) {
    spec.ffn = Ffn::ClampedSwiGlu;
    spec.sinks = true;
    spec.wide_activations = true;
    if let Some(experts) = &mut spec.experts {
        experts.biases = true;
        experts.weights = RouterWeights::OfChosen;
    }
}

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    let mut spec = llama::gguf_beside_experts(c, FAMILY.name, RopePairing::Half)?;
    let mut experts = gguf_experts(c, &spec, RouterWeights::OfChosen)?;
    experts.layers = vec![true; spec.n_layers.min(MAX_LAYERS + 1)];
    spec.experts = Some(experts);
    if let size @ 1.. = c.size("attention.sliding_window")? {
        spec.window = Some(c.window(size, PATTERN, spec.n_layers)?);
    }
    if let Position::Rope(rope) = &mut spec.position
        && let RopeScaling::Yarn { truncate, .. } = &mut rope.scaling
    {
        *truncate = FAMILY.habits.gguf_yarn_truncates;
    }
    (spec.qkv_bias, spec.o_bias) = (true, true);
    complete(&mut spec);
    Ok(spec)
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    for (key, only) in [("swiglu_alpha", SWIGLU_GAIN), ("swiglu_limit", SWIGLU_LIMIT)] {
        if let Some(x) = c.opt_float(key)?.filter(|&x| x != only) {
            return Err(Error::Unsupported(format!("config.json: {key} is {x}; {only} is supported")));
        }
    }
    let mut spec = llama::from_hf_or(c, FAMILY.name, &DEFAULTS)?;
    if let (Position::Rope(rope), None, None) =
        (&mut spec.position, c.get("rope_scaling"), c.get("rope_parameters"))
    {
        rope.scaling = RopeScaling::Yarn {
            factor: 32.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: false,
            attention_factor: mscale(32.0, 1.0) as f32,
        };
    }
    spec.experts = hf_experts(c, &spec, &HF)?;
    if let Some(size) = c.size_or_null("sliding_window", Some(WINDOW))? {
        spec.window = c.window(size, PATTERN, spec.n_layers)?;
    }
    let biased = c.flag("attention_bias", true)?;
    (spec.qkv_bias, spec.o_bias) = (biased, biased);
    complete(&mut spec);
    Ok(spec)
}

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::to_hf(s, c)?;
    experts_to_hf(s, c, &HF);
    let own = json!({
        "attention_bias": s.o_bias,
        "swiglu_limit": SWIGLU_LIMIT,
        "intermediate_size": s.experts.as_ref().map_or(s.d_ff, |e| e.d_ff),
    });
    c.extend(own.as_object().expect("made above").clone());
    if s.window.is_none() {
        c.insert("sliding_window".to_owned(), Json::Null);
    }
    // Unlike other families, the file states the stretched context.
    c.insert("max_position_embeddings".to_owned(), s.max_context.into());
    Ok(())
}
