//! Llama 2 and 3, and all models with the same structure (SmolLM2, Mistral in GGUF files).
//!
//! GGUF files of this architecture store the rows of Q and K permuted so that RoPE rotates neighbours
//! (`Interleaved`), and Llama 3's frequency scaling as divisors in `rope_freqs.weight`.

use serde_json::{Map, Value as Json, json};

use super::{Family, GgufConfig, Habits, HfConfig, RopeDefaults, names};
use crate::model::ModelSpec;
use crate::model::spec::{Ffn, Norm, Position, RopePairing, RopeScaling};
use crate::{Error, Result};

pub const FAMILY: Family = Family {
    name: "llama",
    gguf: &["llama"],
    hf: &["llama"],
    from_gguf,
    from_hf: |c| from_hf(c, "llama"),
    names: names::LLAMA,
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Interleaved,
    gguf_windows: false,
    gguf_softcaps: false,
    habits: Habits::NONE,
    experts: false,
    to_hf,
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    gguf_like_llama(c, "llama", RopePairing::Interleaved)
}

/// The keys that every RMS-norm, SwiGLU family has; an error for a mixture of experts.
pub fn gguf_like_llama(c: &GgufConfig, family: &str, pairing: RopePairing) -> Result<ModelSpec> {
    c.dense()?;
    gguf_beside_experts(c, family, pairing)
}

/// The same, without looking for experts.
pub fn gguf_beside_experts(c: &GgufConfig, family: &str, pairing: RopePairing) -> Result<ModelSpec> {
    let (d_model, n_heads) = (c.size("embedding_length")?, c.size("attention.head_count")?);
    let head_dim = c.head_dim(d_model, n_heads)?;
    let rope = c.rope(pairing, head_dim, 10_000.0)?;
    Ok(ModelSpec {
        family: family.into(),
        name: c.name(),
        n_layers: c.size("block_count")?,
        d_model,
        n_heads,
        n_kv_heads: c.opt_size("attention.head_count_kv")?.unwrap_or(n_heads),
        head_dim,
        d_ff: c.size("feed_forward_length")?,
        experts: None,
        vocab: c.vocab()?,
        max_context: c.max_context(&rope)?,
        norm: Norm::Rms { eps: c.float("attention.layer_norm_rms_epsilon")? },
        ffn: Ffn::SwiGlu,
        position: Position::Rope(rope),
        qkv_bias: false,
        o_bias: false,
        qk_norm: None,
        pre_norms: true,
        post_norms: false,
        embed_scale: 1.0,
        attn_scale: c.opt_float("attention.scale")?.unwrap_or((head_dim as f32).powf(-0.5)),
        attn_softcap: None,
        sinks: false,
        window: None,
        tied_head: c.tensors.get("output.weight").is_none(),
        logit_softcap: None,
        logit_scale: 1.0,
        wide_activations: false,
    })
}

/// What the configuration class of a family assumes where the file is silent. Null is not silence: it asks for as many key
/// heads as there are query heads, and for heads that share the width.
pub struct Defaults {
    pub n_kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub eps: f32,
    pub rope: RopeDefaults,
}

/// Llama's own; a config without its longest context is refused.
pub const LLAMA: Defaults =
    Defaults { n_kv_heads: None, head_dim: None, eps: 1e-6, rope: RopeDefaults::base(10_000.0) };

/// The settings that every RMS-norm, SwiGLU family has.
pub fn from_hf(c: &HfConfig, family: &str) -> Result<ModelSpec> {
    from_hf_or(c, family, &LLAMA)
}

/// [`from_hf`] of a family with defaults of its own.
pub fn from_hf_or(c: &HfConfig, family: &str, or: &Defaults) -> Result<ModelSpec> {
    c.activation("hidden_act", &["silu", "swish"])?;
    let (d_model, n_heads) = (c.size("hidden_size")?, c.size("num_attention_heads")?);
    let head_dim = match c.size_or_null("head_dim", or.head_dim)? {
        Some(n) => n,
        None => c.head_dim(d_model, n_heads)?,
    };
    let rope = c.rope_or(head_dim, &or.rope)?;
    Ok(ModelSpec {
        family: family.into(),
        name: c.name(),
        n_layers: c.size("num_hidden_layers")?,
        d_model,
        n_heads,
        n_kv_heads: c.size_or_null("num_key_value_heads", or.n_kv_heads)?.unwrap_or(n_heads),
        head_dim,
        d_ff: c.size("intermediate_size")?,
        experts: None,
        vocab: c.size("vocab_size")?,
        max_context: c.max_context(or.rope.max_context, &rope.scaling)?,
        norm: Norm::Rms { eps: c.opt_float("rms_norm_eps")?.unwrap_or(or.eps) },
        ffn: Ffn::SwiGlu,
        position: Position::Rope(rope),
        qkv_bias: false,
        o_bias: false,
        qk_norm: None,
        pre_norms: true,
        post_norms: false,
        embed_scale: 1.0,
        attn_scale: (head_dim as f32).powf(-0.5),
        attn_softcap: None,
        sinks: false,
        window: None,
        tied_head: c.flag("tie_word_embeddings", false)?,
        logit_softcap: None,
        logit_scale: 1.0,
        wide_activations: false,
    })
}

/// Adds the settings of every RMS-norm family in `config.json`, except those that all families share and the
/// activation.
///
/// # Errors
/// If the spec has RoPE factors per frequency, which the file cannot express.
pub fn hf_like_llama(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    let mut set = |key: &str, v: Json| c.insert(key.to_owned(), v);
    set("num_key_value_heads", s.n_kv_heads.into());
    set("head_dim", s.head_dim.into());
    set("intermediate_size", s.d_ff.into());
    let eps = s.norm.eps();
    set("rms_norm_eps", eps.into());
    if let Position::Rope(r) = &s.position {
        let full = scaling_to_hf(&r.scaling)?;
        let local = scaling_to_hf(&r.local_scaling)?;
        let parts = |scaling: Option<Json>, theta: f32| {
            let mut all = scaling.unwrap_or_else(|| json!({ "rope_type": "default" }));
            all["rope_theta"] = theta.into();
            if let Some(q) = &r.query_scaling {
                all["llama_4_scaling_beta"] = q.beta.into();
                all["original_max_position_embeddings"] = q.original_context.into();
            }
            all
        };
        if r.dim != s.head_dim {
            set("partial_rotary_factor", (r.dim as f64 / s.head_dim as f64).into());
        }
        match (r.local_theta, local) {
            (Some(theta), Some(local)) => {
                let by_layer = json!({
                    "full_attention": parts(full, r.theta), "sliding_attention": parts(Some(local), theta),
                });
                set("rope_parameters", by_layer);
            }
            _ if r.query_scaling.is_some() => {
                set("rope_parameters", parts(full, r.theta));
            }
            (local, _) => {
                set("rope_theta", r.theta.into());
                if let Some(full) = full {
                    set("rope_scaling", full);
                }
                if let Some(theta) = local {
                    set("rope_local_base_freq", theta.into());
                }
            }
        }
        // The file states the context before these stretch it.
        match r.scaling {
            RopeScaling::Linear { factor } => {
                let context = (s.max_context as f64 / f64::from(factor)).round();
                set("max_position_embeddings", (context as usize).into());
            }
            RopeScaling::Dynamic { original_context, .. } => {
                set("max_position_embeddings", original_context.into());
            }
            _ => {}
        }
    }
    if let Some(w) = &s.window {
        let kinds = w.layers.iter().map(|&l| if l { "sliding_attention" } else { "full_attention" });
        set("sliding_window", w.size.into());
        set("layer_types", kinds.collect());
        set("use_sliding_window", true.into());
    }
    Ok(())
}

/// A scaling as `rope_scaling`; `None` for none.
fn scaling_to_hf(scaling: &RopeScaling) -> Result<Option<Json>> {
    Ok(Some(match scaling {
        RopeScaling::None => return Ok(None),
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Dynamic { factor, .. } => json!({ "rope_type": "dynamic", "factor": factor }),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_context,
        }),
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, attention_factor } => {
            json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_context,
                "beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate,
                "attention_factor": attention_factor,
            })
        }
        RopeScaling::LongRope { short, long, original_context, attention_factor } => json!({
            "rope_type": "longrope", "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": original_context, "attention_factor": attention_factor,
        }),
        RopeScaling::Factors(_) => {
            return Err(Error::Unsupported("config.json cannot carry RoPE factors per frequency".into()));
        }
    }))
}

/// [`hf_like_llama`] with SwiGLU as the activation.
///
/// # Errors
/// As [`hf_like_llama`].
pub fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    hf_like_llama(s, c)?;
    c.insert("hidden_act".to_owned(), "silu".into());
    Ok(())
}
