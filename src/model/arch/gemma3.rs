//! Gemma 3, text only: windowed layers with their own RoPE base, norms before and after each half of the block, q/k
//! norms, GeGLU, embeddings scaled by sqrt(d), head tied to the embedding.
//!
//! Every sixth layer sees the whole context, the others a window. Checkpoints of Hugging Face store norm
//! weights as w and multiply by 1 + w; GGUF files and this engine have 1 + w.

use serde_json::{Map, Value as Json, json};

use super::{Family, GgufConfig, HfConfig, NameMap, RopeDefaults, llama};
use crate::model::ModelSpec;
use crate::model::spec::{Ffn, Position, RopePairing, Window};
use crate::{Error, Result};

pub const FAMILY: Family = Family {
    name: "gemma3",
    gguf: &["gemma3"],
    hf: &["gemma3_text", "gemma3"],
    from_gguf,
    from_hf,
    names: NAMES,
    hf_norms_are_offsets: true,
    gguf_pairing: RopePairing::Half,
    gguf_windows: true,
    to_hf,
};

const NAMES: &NameMap = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("blk.{}.attn_norm", "model.layers.{}.input_layernorm"),
    ("blk.{}.attn_q", "model.layers.{}.self_attn.q_proj"),
    ("blk.{}.attn_k", "model.layers.{}.self_attn.k_proj"),
    ("blk.{}.attn_v", "model.layers.{}.self_attn.v_proj"),
    ("blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_norm"),
    ("blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_norm"),
    ("blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"),
    ("blk.{}.post_attention_norm", "model.layers.{}.post_attention_layernorm"),
    ("blk.{}.ffn_norm", "model.layers.{}.pre_feedforward_layernorm"),
    ("blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"),
    ("blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"),
    ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"),
    ("blk.{}.post_ffw_norm", "model.layers.{}.post_feedforward_layernorm"),
];

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::hf_like_llama(s, c)?;
    let own = json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": s.attn_scale.powi(-2),
        "final_logit_softcapping": s.logit_softcap,
    });
    c.extend(own.as_object().expect("made above").clone());
    // Unlike other families, the file states the stretched context.
    c.insert("max_position_embeddings".to_owned(), s.max_context.into());
    if s.window.is_none() {
        c.insert("sliding_window".to_owned(), Json::Null);
    }
    Ok(())
}

/// One layer in this many sees the whole context.
const PATTERN: usize = 6;
const LOCAL_THETA: f32 = 10_000.0;
const GLOBAL_THETA: f32 = 1_000_000.0;

/// Layers 0..n of which every `pattern`-th is global.
fn windows(size: usize, pattern: usize, n_layers: usize) -> Window {
    // Sizes are checked after the spec is built, so the number of layers cannot be trusted yet.
    let layers = (0..n_layers.min(1 << 16)).map(|i| pattern == 0 || i % pattern < pattern - 1).collect();
    Window { size, layers }
}

fn finish(mut spec: ModelSpec, local_theta: f32) -> ModelSpec {
    spec.ffn = Ffn::GeGlu;
    spec.qk_norm = true;
    spec.post_norms = true;
    spec.embed_scale = (spec.d_model as f32).sqrt();
    if let Position::Rope(rope) = &mut spec.position {
        rope.local_theta = spec.window.as_ref().map(|_| local_theta);
    }
    spec
}

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    let mut spec = llama::gguf_like_llama(c, "gemma3", RopePairing::Half)?;
    if c.opt_float("rope.freq_base")?.is_none() {
        spec.position = Position::Rope(c.rope(RopePairing::Half, spec.head_dim, GLOBAL_THETA)?);
    }
    // The 27B model scales by (d / heads)^-1/2; the file format has no key for it, so the depth identifies it.
    if spec.n_layers == 62 && c.opt_float("attention.scale")?.is_none() && spec.n_heads > 0 {
        spec.attn_scale = (spec.d_model as f32 / spec.n_heads as f32).powf(-0.5);
    }
    if let Some(size) = c.opt_size("attention.sliding_window")?.filter(|&s| s > 0) {
        spec.window = Some(match c.opt_ints("attention.sliding_window_pattern") {
            Some(per_layer) => Window { size, layers: per_layer.iter().map(|&x| x != 0).collect() },
            None => {
                let pattern = c.opt_size("attention.sliding_window_pattern")?.unwrap_or(PATTERN);
                windows(size, pattern, spec.n_layers)
            }
        });
    }
    spec.logit_softcap = c.opt_float("final_logit_softcapping")?.filter(|&x| x != 0.0);
    spec.wide_activations = true;
    Ok(finish(spec, c.opt_float("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA)))
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    c.activation("hidden_activation", &["gelu_pytorch_tanh"])?;
    if c.get("attn_logit_softcapping").is_some() {
        return Err(Error::Unsupported("config.json: attn_logit_softcapping".into()));
    }
    if c.flag("use_bidirectional_attention", false)? {
        return Err(Error::Unsupported("config.json: use_bidirectional_attention".into()));
    }
    // Released configs leave out the library's defaults: heads 8, kv 4, width 256.
    let (d_model, n_heads) = (c.size("hidden_size")?, c.opt_size("num_attention_heads")?.unwrap_or(8));
    let head_dim = c.opt_size("head_dim")?.unwrap_or(256);
    let n_layers = c.size("num_hidden_layers")?;
    let defaults = RopeDefaults { max_context: Some(131_072), ..RopeDefaults::base(GLOBAL_THETA) };
    let rope = c.rope_by_layer(head_dim, &defaults, LOCAL_THETA)?;
    let local = rope.local_theta.unwrap_or(LOCAL_THETA);
    let window = match c.size_or_null("sliding_window", Some(4096))? {
        None => None,
        Some(size) => {
            let w = match c.layer_types(n_layers)? {
                Some(layers) => Window { size, layers },
                None => {
                    let pattern = match c.opt_size("sliding_window_pattern")? {
                        Some(p) => p,
                        None => c.opt_size("_sliding_window_pattern")?.unwrap_or(PATTERN),
                    };
                    windows(size, pattern, n_layers)
                }
            };
            w.layers.contains(&true).then_some(w)
        }
    };
    let scalar = c.opt_float("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(finish(
        ModelSpec {
            family: "gemma3".into(),
            name: c.name(),
            n_layers,
            d_model,
            n_heads,
            n_kv_heads: c.opt_size("num_key_value_heads")?.unwrap_or(4),
            head_dim,
            d_ff: c.size("intermediate_size")?,
            vocab: c.opt_size("vocab_size")?.unwrap_or(262_208),
            max_context: c.opt_size("max_position_embeddings")?.unwrap_or(131_072),
            norm: crate::model::spec::Norm::Rms { eps: c.opt_float("rms_norm_eps")?.unwrap_or(1e-6) },
            ffn: Ffn::GeGlu,
            position: Position::Rope(rope),
            qkv_bias: false,
            qk_norm: true,
            post_norms: true,
            embed_scale: 1.0,
            attn_scale: scalar.powf(-0.5),
            window,
            tied_head: c.flag("tie_word_embeddings", true)?,
            logit_softcap: c.opt_float("final_logit_softcapping")?,
            logit_scale: 1.0,
            wide_activations: true,
        },
        local,
    ))
}
