//! Granite 3: Llama with four multipliers, of embeddings, scores, residuals and logits.
//!
//! With h the residual stream and r the multiplier of what a sublayer adds, h/r has r = 1: embeddings are divided by r, and the
//! norms, which see h/r, are the same with eps/r². So the engine needs no multiplier of residuals.
//!
//! GGUF files pair neighbours, as Llama's do.

use serde_json::{Map, Value as Json, json};

use super::llama::Defaults;
use super::{Family, GgufConfig, Habits, HfConfig, RopeDefaults, llama, names};
use crate::model::ModelSpec;
use crate::model::spec::{Norm, RopePairing};
use crate::{Error, Result};

pub const FAMILY: Family = Family {
    name: "granite",
    gguf: &["granite"],
    hf: &["granite"],
    from_gguf,
    from_hf,
    names: names::LLAMA,
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Interleaved,
    gguf_windows: false,
    gguf_softcaps: false,
    habits: Habits::NONE,
    experts: false,
    to_hf,
};

const DEFAULTS: Defaults = Defaults {
    rope: RopeDefaults { max_context: Some(2048), ..RopeDefaults::base(10_000.0) },
    ..llama::LLAMA
};

/// The multipliers under their keys in a file.
struct Multipliers<'a> {
    embedding: (&'a str, f32),
    residual: (&'a str, f32),
    attention: (&'a str, f32),
    logits: (&'a str, f32),
}

impl Multipliers<'_> {
    fn into(self, spec: &mut ModelSpec) -> Result<()> {
        for (key, x) in [self.embedding, self.residual, self.attention, self.logits] {
            if !(x.is_finite() && x > 0.0) {
                return Err(Error::format(key, format!("{x}, wanted a positive number")));
            }
        }
        let residual = self.residual.1;
        spec.embed_scale = self.embedding.1 / residual;
        spec.norm = Norm::Rms { eps: spec.norm.eps() / (residual * residual) };
        spec.attn_scale = self.attention.1;
        spec.logit_scale = 1.0 / self.logits.1;
        Ok(())
    }
}

fn from_gguf(c: &GgufConfig) -> Result<ModelSpec> {
    c.dense()?;
    gguf_like_granite(c, "granite")
}

/// The keys of a family with Granite's multipliers.
pub fn gguf_like_granite(c: &GgufConfig, family: &str) -> Result<ModelSpec> {
    let mut spec = llama::gguf_beside_experts(c, family, RopePairing::Interleaved)?;
    // Zero stands for no multiplier.
    let number = |key| -> Result<f32> { Ok(c.opt_float(key)?.filter(|&x| x != 0.0).unwrap_or(1.0)) };
    let attention = c.opt_float("attention.scale")?.filter(|&x| x != 0.0).unwrap_or(spec.attn_scale);
    Multipliers {
        embedding: (&c.full("embedding_scale"), number("embedding_scale")?),
        residual: (&c.full("residual_scale"), number("residual_scale")?),
        attention: (&c.full("attention.scale"), attention),
        logits: (&c.full("logit_scale"), number("logit_scale")?),
    }
    .into(&mut spec)?;
    Ok(spec)
}

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    like_granite(c, "granite")
}

/// The settings of a family with Granite's multipliers.
pub fn like_granite(c: &HfConfig, family: &str) -> Result<ModelSpec> {
    let mut spec = llama::from_hf_or(c, family, &DEFAULTS)?;
    let number = |key| -> Result<f32> { Ok(c.opt_float(key)?.unwrap_or(1.0)) };
    Multipliers {
        embedding: ("config.json: embedding_multiplier", number("embedding_multiplier")?),
        residual: ("config.json: residual_multiplier", number("residual_multiplier")?),
        attention: ("config.json: attention_multiplier", number("attention_multiplier")?),
        logits: ("config.json: logits_scaling", number("logits_scaling")?),
    }
    .into(&mut spec)?;
    Ok(spec)
}

/// Adds the multipliers.
pub fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::to_hf(s, c)?;
    let own = json!({
        "embedding_multiplier": s.embed_scale,
        "residual_multiplier": 1.0,
        "attention_multiplier": s.attn_scale,
        "logits_scaling": s.logit_scale.recip(),
    });
    c.extend(own.as_object().expect("made above").clone());
    Ok(())
}
