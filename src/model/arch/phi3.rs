//! Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused matrices, a window on every layer, part of each head rotated (Phi-4-mini),
//! and LongRoPE.
//!
//! GGUF files pair halves, and keep the divisors of LongRoPE in two tensors.

use serde_json::{Map, Value as Json, json};

use super::llama::Defaults;
use super::{Family, GgufConfig, Habits, HfConfig, NameMap, RopeDefaults, llama, mistral};
use crate::Result;
use crate::model::ModelSpec;
use crate::model::spec::{Position, RopePairing, RopeScaling, Window};

pub const FAMILY: Family = Family {
    name: "phi3",
    gguf: &["phi3"],
    hf: &["phi3"],
    from_gguf,
    from_hf,
    names: NAMES,
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Half,
    gguf_windows: true,
    gguf_softcaps: false,
    habits: Habits::NONE,
    experts: false,
    to_hf,
};

/// Llama's, with the fused matrices before the parts.
const NAMES: &NameMap = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("blk.{}.attn_norm", "model.layers.{}.input_layernorm"),
    ("blk.{}.attn_qkv", "model.layers.{}.self_attn.qkv_proj"),
    ("blk.{}.attn_q", "model.layers.{}.self_attn.q_proj"),
    ("blk.{}.attn_k", "model.layers.{}.self_attn.k_proj"),
    ("blk.{}.attn_v", "model.layers.{}.self_attn.v_proj"),
    ("blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"),
    ("blk.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"),
    ("blk.{}.ffn_gate_up", "model.layers.{}.mlp.gate_up_proj"),
    ("blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"),
    ("blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"),
    ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"),
];

const DEFAULTS: Defaults = Defaults {
    eps: 1e-5,
    rope: RopeDefaults {
        max_context: Some(4096),
        original_context: Some(4096),
        yarn_is_longrope: true,
        ..RopeDefaults::base(10_000.0)
    },
    ..llama::LLAMA
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    let mut spec = llama::gguf_like_llama(c, "phi3", RopePairing::Half)?;
    let size = c.opt_size("attention.sliding_window")?.filter(|&n| n > 0);
    spec.window = size.map(|size| Window { size, layers: vec![true; spec.n_layers.min(1 << 16)] });
    Ok(without_wide_window(spec))
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    let mut spec = llama::from_hf_or(c, "phi3", &DEFAULTS)?;
    spec.window = mistral::window(c, spec.n_layers, None)?;
    Ok(without_wide_window(spec))
}

/// Most files state a window that no context exceeds.
fn without_wide_window(mut spec: ModelSpec) -> ModelSpec {
    spec.window = spec.window.filter(|w| w.size < spec.max_context);
    spec
}

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::to_hf(s, c)?;
    // Phi-3 keeps the first context beside the other sizes.
    let original = match &s.position {
        Position::Rope(r) => match r.scaling {
            RopeScaling::LongRope { original_context, .. } => original_context,
            _ => s.max_context,
        },
        Position::Learned { .. } => s.max_context,
    };
    let own = json!({ "original_max_position_embeddings": original, "pad_token_id": null });
    c.extend(own.as_object().expect("made above").clone());
    Ok(())
}
