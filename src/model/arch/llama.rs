//! Llama 2 and 3, and all models with the same structure (SmolLM2, Mistral in GGUF files).
//!
//! GGUF files of this architecture store the rows of Q and K permuted so that RoPE rotates neighbours
//! (`Interleaved`), and Llama 3's frequency scaling as divisors in `rope_freqs.weight`.

use serde_json::{Map, Value as Json, json};

use super::{Family, GgufConfig, HfConfig, names};
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
    to_hf,
};

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    gguf_like_llama(c, "llama", RopePairing::Interleaved)
}

/// The keys that every RMS-norm, SwiGLU family has.
pub fn gguf_like_llama(c: &GgufConfig, family: &str, pairing: RopePairing) -> Result<ModelSpec> {
    c.dense()?;
    let (d_model, n_heads) = (c.size("embedding_length")?, c.size("attention.head_count")?);
    let head_dim = c.head_dim(d_model, n_heads)?;
    Ok(ModelSpec {
        family: family.into(),
        name: c.name(),
        n_layers: c.size("block_count")?,
        d_model,
        n_heads,
        n_kv_heads: c.opt_size("attention.head_count_kv")?.unwrap_or(n_heads),
        head_dim,
        d_ff: c.size("feed_forward_length")?,
        vocab: c.vocab()?,
        max_context: c.size("context_length")?,
        norm: Norm::Rms { eps: c.float("attention.layer_norm_rms_epsilon")? },
        ffn: Ffn::SwiGlu,
        position: Position::Rope(c.rope(pairing, head_dim, 10_000.0)?),
        qkv_bias: false,
        qk_norm: None,
        pre_norms: true,
        post_norms: false,
        embed_scale: 1.0,
        attn_scale: c.opt_float("attention.scale")?.unwrap_or((head_dim as f32).powf(-0.5)),
        attn_softcap: None,
        window: None,
        tied_head: c.tensors.get("output.weight").is_none(),
        logit_softcap: None,
        wide_activations: false,
    })
}

/// The settings that every RMS-norm, SwiGLU family has.
pub fn from_hf(c: &HfConfig, family: &str) -> Result<ModelSpec> {
    c.activation("hidden_act", &["silu", "swish"])?;
    let (d_model, n_heads) = (c.size("hidden_size")?, c.size("num_attention_heads")?);
    let head_dim = c.head_dim(d_model, n_heads)?;
    Ok(ModelSpec {
        family: family.into(),
        name: c.name(),
        n_layers: c.size("num_hidden_layers")?,
        d_model,
        n_heads,
        n_kv_heads: c.opt_size("num_key_value_heads")?.unwrap_or(n_heads),
        head_dim,
        d_ff: c.size("intermediate_size")?,
        vocab: c.size("vocab_size")?,
        max_context: c.size("max_position_embeddings")?,
        norm: Norm::Rms { eps: c.opt_float("rms_norm_eps")?.unwrap_or(1e-6) },
        ffn: Ffn::SwiGlu,
        position: Position::Rope(c.rope(head_dim, 10_000.0)?),
        qkv_bias: false,
        qk_norm: None,
        pre_norms: true,
        post_norms: false,
        embed_scale: 1.0,
        attn_scale: (head_dim as f32).powf(-0.5),
        attn_softcap: None,
        window: None,
        tied_head: c.flag("tie_word_embeddings", false)?,
        logit_softcap: None,
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
        set("rope_theta", r.theta.into());
        match &r.scaling {
            RopeScaling::None => None,
            RopeScaling::Linear { factor } => {
                set("rope_scaling", json!({ "rope_type": "linear", "factor": factor }))
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => set(
                "rope_scaling",
                json!({
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_context,
                }),
            ),
            RopeScaling::Factors(_) => {
                return Err(Error::Unsupported("config.json cannot carry RoPE factors per frequency".into()));
            }
        };
        if let Some(local) = r.local_theta {
            set("rope_local_base_freq", local.into());
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

/// [`hf_like_llama`] with SwiGLU as the activation.
///
/// # Errors
/// As [`hf_like_llama`].
pub fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    hf_like_llama(s, c)?;
    c.insert("hidden_act".to_owned(), "silu".into());
    Ok(())
}
