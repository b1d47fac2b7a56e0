//! Mistral Small 3.1 and later, and Ministral 3, text only: Mistral without a window, with YaRN, and with queries that grow
//! beyond the first context (`llama_4_scaling_beta`).
//!
//! Checkpoints hold a vision tower, which is left out. GGUF files pair neighbours, as Llama's do.

use serde_json::{Map, Value as Json, json};

use super::llama::Defaults;
use super::{Family, GgufConfig, Habits, HfConfig, RopeDefaults, llama, mistral, names};
use crate::Result;
use crate::model::ModelSpec;
use crate::model::spec::{Position, QueryScaling, RopePairing, RopeScaling};

pub const FAMILY: Family = Family {
    name: "mistral3",
    gguf: &["mistral3"],
    hf: &["ministral3", "mistral3"],
    from_gguf: |c: &GgufConfig| llama::gguf_like_llama(c, "mistral3", RopePairing::Interleaved),
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

/// Of Ministral 3.
const DEFAULTS: Defaults = Defaults {
    n_kv_heads: Some(8),
    head_dim: Some(128),
    eps: 1e-5,
    rope: RopeDefaults { max_context: Some(262_144), ..RopeDefaults::base(10_000.0) },
};

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    // The text part of Mistral Small is a Mistral.
    if c.opt_text("model_type")?.is_some_and(|kind| mistral::FAMILY.hf.contains(&kind)) {
        let mut spec = llama::from_hf_or(c, "mistral3", &mistral::DEFAULTS)?;
        spec.window = mistral::window(c, spec.n_layers, Some(4096))?;
        return Ok(spec);
    }
    let mut spec = llama::from_hf_or(c, "mistral3", &DEFAULTS)?;
    spec.window = mistral::window(c, spec.n_layers, None)?;
    if let (None, None, Position::Rope(rope)) =
        (c.get("rope_parameters"), c.get("rope_scaling"), &mut spec.position)
    {
        // What a file without any setting means.
        rope.theta = c.opt_float("rope_theta")?.unwrap_or(1_000_000.0);
        rope.scaling = RopeScaling::Yarn {
            factor: 16.0,
            original_context: 16_384,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.0,
        };
        rope.query_scaling = Some(QueryScaling { beta: 0.1, original_context: 16_384 });
        spec.max_context = c.max_context(DEFAULTS.rope.max_context, &rope.scaling)?;
    }
    Ok(spec)
}

fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    mistral::to_hf(s, c)?;
    // Silence would mean the scaling of Ministral 3.
    if let Position::Rope(r) = &s.position {
        let mut all = c.remove("rope_scaling").or_else(|| c.remove("rope_parameters")).unwrap_or(json!({}));
        all["rope_theta"] = r.theta.into();
        if all.get("llama_4_scaling_beta").is_none() {
            all["llama_4_scaling_beta"] = json!(0.0);
        }
        if all.get("original_max_position_embeddings").is_none() {
            all["original_max_position_embeddings"] = s.max_context.into();
        }
        c.insert("rope_parameters".to_owned(), all);
    }
    Ok(())
}
