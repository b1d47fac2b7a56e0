//! Model families. Each has a file, and one line in [`FAMILIES`].
//!
//! A family states which files belong to it, how their settings become a [`ModelSpec`], and Hugging Face's names for
//! its tensors. No family computes anything: families differ only in values of the spec.

mod config;
mod experts;
mod gemma2;
mod gemma3;
mod gpt_oss;
mod granite;
mod granite_moe;
mod llama;
mod mistral;
mod mistral3;
mod mixtral;
mod names;
mod olmo2;
mod olmoe;
mod opt;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod rope;

pub use config::{GgufConfig, HfConfig};
pub use names::{NameMap, canonical_name, file_name};
pub use rope::{LONG_FACTORS, RopeDefaults, SHORT_FACTORS, mscale};

use serde_json::{Map, Value as Json};

use super::ModelSpec;
use super::spec::RopePairing;
use crate::{Error, Result};

/// A model family.
pub struct Family {
    /// The value of [`ModelSpec::family`].
    pub name: &'static str,
    /// Its `general.architecture` values in GGUF files.
    pub gguf: &'static [&'static str],
    /// Its `model_type` values in `config.json`.
    pub hf: &'static [&'static str],
    /// The spec of a GGUF file.
    pub from_gguf: fn(&GgufConfig) -> Result<ModelSpec>,
    /// The spec of a `config.json`.
    pub from_hf: fn(&HfConfig) -> Result<ModelSpec>,
    /// Hugging Face's names for the tensors.
    pub names: &'static NameMap,
    /// Whether Hugging Face stores norm weights as w and multiplies by 1 + w (Gemma), where GGUF stores 1 + w.
    pub hf_norms_are_offsets: bool,
    /// How its GGUF files pair the elements that RoPE rotates. Hugging Face checkpoints pair halves, so with
    /// `Interleaved` the rows of Q and K are permuted.
    pub gguf_pairing: RopePairing,
    /// Whether a GGUF file can state which layers have a window.
    pub gguf_windows: bool,
    /// Whether a GGUF file states the soft-caps of scores and logits (0: none).
    pub gguf_softcaps: bool,
    /// Where its files differ from those of all other families.
    pub habits: Habits,
    /// Whether its models are mixtures of experts. Files of two families of one architecture are told apart by this.
    pub experts: bool,
    /// Adds the family's own settings to a `config.json`, beyond those that all families share.
    pub to_hf: fn(&ModelSpec, &mut Map<String, Json>) -> Result<()>,
}

/// Where the files of a family differ from those of all others.
pub struct Habits {
    /// Names in GGUF files that differ from the canonical ones: (canonical, GGUF), without layer and kind.
    pub gguf_names: &'static [(&'static str, &'static str)],
    /// Whether YaRN's ramp begins and ends at whole pairs in a GGUF file, which has no key for it.
    pub gguf_yarn_truncates: bool,
    /// Whether gates and first matrices alternate in one stack of experts in safetensors ([`interleaved`](super::interleaved)).
    pub hf_interleaves: bool,
}

impl Habits {
    /// Those of all families but one.
    pub const NONE: Habits = Habits { gguf_names: &[], gguf_yarn_truncates: true, hf_interleaves: false };
}

/// Every family, in the order that messages list them.
pub const FAMILIES: [&Family; 18] = [
    &llama::FAMILY,
    &mistral::FAMILY,
    &mistral3::FAMILY,
    &mixtral::FAMILY,
    &qwen2::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &olmo2::FAMILY,
    &olmo2::OLMO3,
    &olmoe::FAMILY,
    &phi3::FAMILY,
    &granite::FAMILY,
    &granite_moe::FAMILY,
    &gpt_oss::FAMILY,
    &opt::FAMILY,
];

/// The family of a GGUF file's `general.architecture`, with or without experts.
///
/// # Errors
/// No family knows it.
pub fn of_gguf(architecture: &str, experts: bool) -> Result<&'static Family> {
    let named = || FAMILIES.into_iter().filter(|f| f.gguf.contains(&architecture));
    named().find(|f| f.experts == experts).or(named().next()).ok_or_else(|| {
        unknown("general.architecture", architecture, FAMILIES.iter().flat_map(|f| f.gguf.iter().copied()))
    })
}

/// The family of a `config.json`'s `model_type`.
///
/// # Errors
/// No family knows it.
pub fn of_hf(model_type: &str) -> Result<&'static Family> {
    FAMILIES.into_iter().find(|f| f.hf.contains(&model_type)).ok_or_else(|| {
        unknown("config.json: model_type", model_type, FAMILIES.iter().flat_map(|f| f.hf.iter().copied()))
    })
}

/// The family called `name` (as in [`ModelSpec::family`]).
pub fn by_name(name: &str) -> Option<&'static Family> {
    FAMILIES.into_iter().find(|f| f.name == name)
}

/// Families that people ask for, by their names in both formats, and what of them is missing.
const MISSING: [(&[&str], &str); 2] = [
    (
        &["deepseek2", "deepseek_v2", "deepseek_v3"],
        "attention over compressed keys and values (MLA) is not computed yet",
    ),
    (&["qwen3next", "qwen3_next"], "linear attention is not computed yet"),
];

fn unknown(key: &str, found: &str, known: impl Iterator<Item = &'static str>) -> Error {
    if let Some((_, why)) = MISSING.iter().find(|(names, _)| names.contains(&found)) {
        return Error::Unsupported(format!("{key} is `{found}`, which is not supported: {why}"));
    }
    let mut known: Vec<_> = known.collect();
    known.dedup();
    Error::Unsupported(format!(
        "{key} is `{found}`, which is not supported; supported are {}",
        known.join(", ")
    ))
}
