//! OLMo 2 and 3: no norms of the inputs of attention and feed-forward, only of their outputs; RMS norms over all query heads
//! together and over all key heads together.
//!
//! OLMo 3 adds windows on three of four layers, where RoPE is not scaled. Its GGUF files name the architecture of OLMo 2.

use serde_json::{Map, Value as Json};

use super::{Family, GgufConfig, Habits, HfConfig, NameMap, llama};
use crate::Result;
use crate::model::ModelSpec;
use crate::model::spec::{Norm, Position, QkNorm, RopePairing, RopeScaling, Window};

pub const FAMILY: Family = Family {
    name: "olmo2",
    gguf: &["olmo2"],
    hf: &["olmo2"],
    from_gguf,
    from_hf,
    names: NAMES,
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Half,
    gguf_windows: false,
    gguf_softcaps: false,
    habits: Habits::NONE,
    experts: false,
    to_hf: llama::to_hf,
};

pub const OLMO3: Family = Family {
    name: "olmo3",
    hf: &["olmo3"],
    from_hf: from_hf_of_3,
    gguf_windows: true,
    to_hf: to_hf_of_3,
    ..FAMILY
};

const NAMES: &NameMap = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("blk.{}.attn_q", "model.layers.{}.self_attn.q_proj"),
    ("blk.{}.attn_k", "model.layers.{}.self_attn.k_proj"),
    ("blk.{}.attn_v", "model.layers.{}.self_attn.v_proj"),
    ("blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_norm"),
    ("blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_norm"),
    ("blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"),
    ("blk.{}.post_attention_norm", "model.layers.{}.post_attention_layernorm"),
    ("blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"),
    ("blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"),
    ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"),
    ("blk.{}.post_ffw_norm", "model.layers.{}.post_feedforward_layernorm"),
];

/// OLMo 3: one layer in this many sees the whole context.
const PATTERN: usize = 4;
const WINDOW_OF_3: usize = 4096;
const THETA_OF_3: f32 = 500_000.0;

fn post_normed(spec: ModelSpec) -> ModelSpec {
    ModelSpec { qk_norm: Some(QkNorm::Whole), pre_norms: false, post_norms: true, ..spec }
}

/// Adds windows, in which RoPE has base `local`, or that of the other layers, and is not scaled.
fn windowed(mut spec: ModelSpec, window: Option<Window>, local: Option<f32>) -> ModelSpec {
    if let Position::Rope(rope) = &mut spec.position {
        let local = local.unwrap_or(rope.theta);
        let differs = local != rope.theta || rope.scaling != RopeScaling::None;
        rope.local_theta = (window.is_some() && differs).then_some(local);
    }
    spec.window = window;
    spec
}

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    let spec = post_normed(llama::gguf_like_llama(c, FAMILY.name, RopePairing::Half)?);
    let Some(size) = c.opt_size("attention.sliding_window")?.filter(|&s| s > 0) else { return Ok(spec) };
    let window = c.window(size, PATTERN, spec.n_layers)?;
    let spec = ModelSpec { family: OLMO3.name.into(), ..spec };
    Ok(windowed(spec, Some(window), c.opt_float("rope.freq_base_swa")?))
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    like_olmo2(c, FAMILY.name)
}

fn like_olmo2(c: &HfConfig, family: &str) -> Result<ModelSpec> {
    let spec = post_normed(llama::from_hf(c, family)?);
    Ok(ModelSpec { norm: Norm::Rms { eps: c.opt_float("rms_norm_eps")?.unwrap_or(1e-5) }, ..spec })
}

fn from_hf_of_3(c: &HfConfig) -> Result<ModelSpec> {
    let spec = like_olmo2(c, OLMO3.name)?;
    let rope = c.rope(spec.head_dim, THETA_OF_3)?;
    let window = match c.size_or_null("sliding_window", Some(WINDOW_OF_3))? {
        Some(size) => c.window(size, PATTERN, spec.n_layers)?,
        None => None,
    };
    let local = rope.local_theta;
    Ok(windowed(ModelSpec { position: Position::Rope(rope), ..spec }, window, local))
}

fn to_hf_of_3(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::to_hf(s, c)?;
    if s.window.is_none() {
        c.insert("sliding_window".to_owned(), Json::Null);
    }
    Ok(())
}
