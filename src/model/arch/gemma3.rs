//! Gemma 3, text only: windowed layers with their own RoPE base, norms before and after each half of the block, q/k
//! norms, GeGLU, embeddings scaled by sqrt(d), head tied to the embedding.
//!
//! Every sixth layer sees the whole context, the others a window. Checkpoints of Hugging Face store norm
//! weights as w and multiply by 1 + w; GGUF files and this engine have 1 + w.

use serde_json::{Map, Value as Json, json};

use super::{Family, GgufConfig, Habits, HfConfig, NameMap, RopeDefaults, llama};
use crate::model::ModelSpec;
use crate::model::spec::{Ffn, Norm, Position, QkNorm, RopePairing, RopeScaling};
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
    gguf_softcaps: true,
    habits: Habits::NONE,
    experts: false,
    to_hf,
};

/// Of Gemma 2, too, which has no norms of queries and keys.
pub const NAMES: &NameMap = &[
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

/// Settings in a `config.json` of Gemma 2 or 3.
///
/// # Errors
/// As [`llama::hf_like_llama`].
pub fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::hf_like_llama(s, c)?;
    let own = json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": s.attn_scale.powi(-2),
        "attn_logit_softcapping": s.attn_softcap,
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

/// What a generation of Gemma has of its own: where a file is silent, these values hold.
pub struct Generation {
    pub family: &'static str,
    pub qk_norm: Option<QkNorm>,
    /// Base of RoPE, and on windowed layers if it differs there.
    pub theta: f32,
    pub local_theta: Option<f32>,
    pub window: Option<usize>,
    /// One layer in this many sees the whole context.
    pub pattern: usize,
    /// `None`: scores have no cap whatever a file says.
    pub attn_softcap: Option<f32>,
    pub logit_softcap: Option<f32>,
    pub vocab: usize,
    pub max_context: usize,
    /// Layers of the 27B model. It scales scores by (d / heads)^-1/2, for which GGUF has no key: the depth identifies it.
    pub layers_27b: usize,
}

const GEMMA3: Generation = Generation {
    family: "gemma3",
    qk_norm: Some(QkNorm::PerHead),
    theta: 1_000_000.0,
    local_theta: Some(10_000.0),
    window: None,
    pattern: 6,
    attn_softcap: None,
    logit_softcap: None,
    vocab: 262_208,
    max_context: 131_072,
    layers_27b: 62,
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    gguf_like_gemma(c, &GEMMA3)
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    // transformers has the setting for this generation, too, and ignores it.
    if c.get("attn_logit_softcapping").is_some() {
        return Err(Error::Unsupported(
            "config.json: attn_logit_softcapping; scores of Gemma 3 have no soft-cap, wanted null".into(),
        ));
    }
    hf_like_gemma(c, &GEMMA3)
}

/// The spec of a GGUF file of either generation.
///
/// # Errors
/// Missing or malformed settings.
pub fn gguf_like_gemma(c: &GgufConfig, own: &Generation) -> Result<ModelSpec> {
    let mut spec = llama::gguf_like_llama(c, own.family, RopePairing::Half)?;
    let mut rope = c.rope(RopePairing::Half, spec.head_dim, own.theta)?;
    if spec.n_layers == own.layers_27b && c.opt_float("attention.scale")?.is_none() && spec.n_heads > 0 {
        spec.attn_scale = (spec.d_model as f32 / spec.n_heads as f32).powf(-0.5);
    }
    if let Some(size) = c.opt_size("attention.sliding_window")?.or(own.window).filter(|&s| s > 0) {
        spec.window = Some(c.window(size, own.pattern, spec.n_layers)?);
        rope.local_theta = match own.local_theta {
            Some(local) => Some(c.opt_float("rope.freq_base_swa")?.unwrap_or(local)),
            None => None,
        };
    }
    let cap = |key: &str, default: Option<f32>| -> Result<Option<f32>> {
        Ok(c.opt_float(key)?.or(default).filter(|&cap| cap != 0.0))
    };
    Ok(ModelSpec {
        ffn: Ffn::GeGlu,
        qk_norm: own.qk_norm,
        post_norms: true,
        embed_scale: (spec.d_model as f32).sqrt(),
        position: Position::Rope(rope),
        attn_softcap: match own.attn_softcap {
            Some(_) => cap("attn_logit_softcapping", own.attn_softcap)?,
            None => None,
        },
        logit_softcap: cap("final_logit_softcapping", own.logit_softcap)?,
        wide_activations: true,
        ..spec
    })
}

/// The spec of a `config.json` of either generation.
///
/// # Errors
/// Missing, malformed or unsupported settings.
pub fn hf_like_gemma(c: &HfConfig, own: &Generation) -> Result<ModelSpec> {
    c.activation("hidden_activation", &["gelu_pytorch_tanh"])?;
    // Released configs leave out the library's defaults: heads 8, kv 4, width 256.
    let (d_model, n_heads) = (c.size("hidden_size")?, c.opt_size("num_attention_heads")?.unwrap_or(8));
    let head_dim = c.opt_size("head_dim")?.unwrap_or(256);
    let n_layers = c.size("num_hidden_layers")?;
    let window = match c.size_or_null("sliding_window", Some(4096))? {
        Some(size) => c.window(size, own.pattern, n_layers)?,
        None => None,
    };
    let defaults = RopeDefaults { max_context: Some(own.max_context), ..RopeDefaults::base(own.theta) };
    let mut rope = match own.local_theta {
        Some(local) => c.rope_by_layer(head_dim, &defaults, local)?,
        None => c.rope_or(head_dim, &defaults)?,
    };
    if window.is_none() {
        (rope.local_theta, rope.local_scaling) = (None, RopeScaling::None);
    }
    Ok(ModelSpec {
        family: own.family.into(),
        name: c.name(),
        n_layers,
        d_model,
        n_heads,
        n_kv_heads: c.opt_size("num_key_value_heads")?.unwrap_or(4),
        head_dim,
        d_ff: c.size("intermediate_size")?,
        experts: None,
        vocab: c.opt_size("vocab_size")?.unwrap_or(own.vocab),
        max_context: c.opt_size("max_position_embeddings")?.unwrap_or(own.max_context),
        norm: Norm::Rms { eps: c.opt_float("rms_norm_eps")?.unwrap_or(1e-6) },
        ffn: Ffn::GeGlu,
        position: Position::Rope(rope),
        qkv_bias: false,
        o_bias: false,
        qk_norm: own.qk_norm,
        pre_norms: true,
        post_norms: true,
        embed_scale: (d_model as f32).sqrt(),
        attn_scale: c.opt_float("query_pre_attn_scalar")?.unwrap_or(256.0).powf(-0.5),
        attn_softcap: match own.attn_softcap {
            Some(_) => c.float_or_null("attn_logit_softcapping", own.attn_softcap)?,
            None => None,
        },
        sinks: false,
        window,
        tied_head: c.flag("tie_word_embeddings", true)?,
        logit_softcap: c.float_or_null("final_logit_softcapping", own.logit_softcap)?,
        logit_scale: 1.0,
        wide_activations: true,
    })
}
