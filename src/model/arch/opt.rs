//! OPT: LayerNorm, learned positions (two rows in), ReLU, biases everywhere, head tied to the embedding.
//!
//! Only the pre-norm models: OPT-350m puts its norms after each half and projects its embeddings.

use serde_json::{Map, Value as Json, json};

use super::{Family, GgufConfig, Habits, HfConfig, NameMap};
use crate::model::ModelSpec;
use crate::model::spec::{Ffn, Norm, Position, RopePairing};
use crate::{Error, Result};

pub const FAMILY: Family = Family {
    name: "opt",
    gguf: &[],
    hf: &["opt"],
    from_gguf: |_: &GgufConfig| {
        Err(Error::Unsupported("OPT has no GGUF form; use its safetensors folder".into()))
    },
    from_hf,
    names: NAMES,
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Half,
    gguf_windows: false,
    gguf_softcaps: false,
    habits: Habits::NONE,
    experts: false,
    to_hf,
};

const NAMES: &NameMap = &[
    ("token_embd", "model.decoder.embed_tokens"),
    ("position_embd", "model.decoder.embed_positions"),
    ("output_norm", "model.decoder.final_layer_norm"),
    ("output", "lm_head"),
    ("blk.{}.attn_norm", "model.decoder.layers.{}.self_attn_layer_norm"),
    ("blk.{}.attn_q", "model.decoder.layers.{}.self_attn.q_proj"),
    ("blk.{}.attn_k", "model.decoder.layers.{}.self_attn.k_proj"),
    ("blk.{}.attn_v", "model.decoder.layers.{}.self_attn.v_proj"),
    ("blk.{}.attn_output", "model.decoder.layers.{}.self_attn.out_proj"),
    ("blk.{}.ffn_norm", "model.decoder.layers.{}.final_layer_norm"),
    ("blk.{}.ffn_up", "model.decoder.layers.{}.fc1"),
    ("blk.{}.ffn_down", "model.decoder.layers.{}.fc2"),
];

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    let own = json!({
        "ffn_dim": s.d_ff,
        "word_embed_proj_dim": s.d_model,
        "do_layer_norm_before": true,
        "activation_function": "relu",
    });
    c.extend(own.as_object().expect("made above").clone());
    Ok(())
}

/// Rows of the position table that padding once used.
const OFFSET: usize = 2;

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    c.activation("activation_function", &["relu"])?;
    if !c.flag("do_layer_norm_before", true)? {
        return Err(Error::Unsupported(
            "config.json: do_layer_norm_before is false (OPT-350m); only pre-norm OPT models are supported"
                .into(),
        ));
    }
    if c.flag("_remove_final_layer_norm", false)? {
        return Err(Error::Unsupported("config.json: _remove_final_layer_norm".into()));
    }
    let (d_model, n_heads) = (c.size("hidden_size")?, c.size("num_attention_heads")?);
    match c.opt_size("word_embed_proj_dim")? {
        Some(p) if p != d_model => {
            return Err(Error::Unsupported(format!(
                "config.json: word_embed_proj_dim {p} differs from hidden_size {d_model}; projected embeddings are \
                 not supported"
            )));
        }
        _ => {}
    }
    if !c.flag("enable_bias", true)? || !c.flag("layer_norm_elementwise_affine", true)? {
        return Err(Error::Unsupported("config.json: OPT without biases or norm weights".into()));
    }
    let head_dim = c.head_dim(d_model, n_heads)?;
    Ok(ModelSpec {
        family: "opt".into(),
        name: c.name(),
        n_layers: c.size("num_hidden_layers")?,
        d_model,
        n_heads,
        n_kv_heads: n_heads,
        head_dim,
        d_ff: c.size("ffn_dim")?,
        experts: None,
        vocab: c.size("vocab_size")?,
        max_context: c.size("max_position_embeddings")?,
        norm: Norm::Layer { eps: 1e-5 },
        ffn: Ffn::Relu,
        position: Position::Learned { offset: OFFSET },
        qkv_bias: true,
        o_bias: true,
        qk_norm: None,
        pre_norms: true,
        post_norms: false,
        embed_scale: 1.0,
        attn_scale: (head_dim as f32).powf(-0.5),
        attn_softcap: None,
        sinks: false,
        window: None,
        tied_head: c.flag("tie_word_embeddings", true)?,
        logit_softcap: None,
        logit_scale: 1.0,
        wide_activations: false,
    })
}
