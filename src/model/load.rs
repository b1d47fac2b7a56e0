//! The entry point: loads a checked model from a path or `synth:SPEC`.

use std::borrow::Cow;
use std::path::Path;

use super::arch::{self, GgufConfig};
use super::block::tensor_name;
use super::formats::gguf::{Gguf, PartName, Value};
use super::formats::in_file;
use super::fused::split_fused;
use super::stacks::{in_block, split_stacks};
use super::vectors::vectors_to_f32;
use super::{LoadedModel, SamplingDefaults, TextSource, Weights, hf, synth, validate};
use crate::{Error, Result};

/// Loads `source`: a `.gguf` file or the first of several, a folder with `config.json`, or `synth:SPEC` (see [`synth`]).
///
/// # Errors
/// If nothing is there, it is not a model, or the model is damaged or of an unknown kind.
pub fn load(source: &str) -> Result<LoadedModel> {
    if let Some(spec) = source.strip_prefix("synth:") {
        return synth::load(spec);
    }
    let path = Path::new(source);
    let meta = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if meta.is_dir() {
        return hf::load(path);
    }
    match path.extension().and_then(|e| e.to_str()) {
        Some("safetensors" | "json") => Err(Error::usage(format!(
            "{source}: a single file of a Hugging Face model; give the folder that holds it and its config.json"
        ))),
        _ => from_gguf(Gguf::open(path)?, source.into()).map_err(|e| in_file(path, e)),
    }
}

/// `weights` under canonical names, where a family's GGUF files have others. What has both keeps both, for the check of all tensors to
/// refuse.
fn canonical_names(names: &[(&str, &str)], weights: Weights) -> Weights {
    let renamed = |name: &str| {
        let (layer, stem, kind) = in_block(name)?;
        let (canonical, _) = names.iter().find(|(_, gguf)| *gguf == stem)?;
        Some(tensor_name(layer, canonical, kind)).filter(|to| weights.get(to).is_none())
    };
    weights.iter().map(|(name, t)| (renamed(name).unwrap_or_else(|| name.to_owned()), t.clone())).collect()
}

/// A model from a parsed GGUF file.
///
/// # Errors
/// As [`load`].
pub fn from_gguf(file: Gguf, source: String) -> Result<LoadedModel> {
    let Gguf { metadata, tensors, files, .. } = file;
    let arch = match metadata.get("general.architecture") {
        None => return Err(Error::format("general.architecture", "missing; is this a model file?")),
        Some(Value::String(arch)) => arch.clone(),
        Some(_) => return Err(Error::format("general.architecture", "not UTF-8 text")),
    };
    if let Some(n) = metadata.get("split.count").and_then(Value::as_u64).filter(|&n| n > 1) {
        return Err(Error::Unsupported(format!(
            "one of the {n} files of a split model; it is opened by the path of the first"
        )));
    }
    let experts = metadata.get(&format!("{arch}.expert_count")).and_then(Value::as_u64);
    let family = arch::of_gguf(&arch, experts.is_some_and(|n| n > 0))?;
    let mut weights = Weights::default();
    for (name, t) in tensors {
        weights.insert(name, t);
    }
    let config = GgufConfig { arch: &arch, meta: &metadata, tensors: &weights };
    config.causal()?;
    let mut spec = (family.from_gguf)(&config)?;
    if spec.name.is_empty() {
        let path = Path::new(&source);
        let file = path.file_name().map(|n| n.to_string_lossy()).unwrap_or_default();
        let stem = || path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        spec.name = PartName::parse(&file).map_or_else(stem, |part| part.stem.to_owned());
    }
    // The spec now holds the RoPE factors.
    let factors = ["rope_freqs.weight", arch::LONG_FACTORS, arch::SHORT_FACTORS];
    let weights = weights.into_iter().filter(|(n, _)| !factors.contains(&n.as_str()));
    // Before parts are taken out of stacks: their number is checked, and not yet the tensors.
    spec.check()?;
    let weights = canonical_names(family.habits.gguf_names, weights.collect());
    let weights = split_stacks(&spec, weights)?;
    let weights = split_fused(&spec, vectors_to_f32(weights.into_iter())?)?;
    validate(&spec, &weights)?;
    let id = |key: &str| metadata.get(key).and_then(Value::as_u64).and_then(|v| u32::try_from(v).ok());
    let mut eos_ids: Vec<u32> = ["eos", "eot", "eom"]
        .into_iter()
        .filter_map(|k| id(&format!("tokenizer.ggml.{k}_token_id")))
        .collect();
    eos_ids.dedup();
    let mut notes = Vec::new();
    let vocabulary = |key: &str| metadata.get(&format!("tokenizer.ggml.{key}")).and_then(Value::as_str);
    if vocabulary("model") == Some("gpt2") && vocabulary("pre").is_none_or(str::is_empty) {
        notes.push(
            "tokenizer.ggml.pre: missing, so text is divided by the default rule; if the model was trained with another, its \
             answers are worse than they should be: convert it again with a newer converter"
                .into(),
        );
    }
    let template = metadata.get("tokenizer.chat_template");
    if matches!(template, Some(Value::Bytes(_))) {
        notes.push("tokenizer.chat_template: not UTF-8; what is not is replaced by U+FFFD".into());
    }
    Ok(LoadedModel {
        chat_template: template.and_then(Value::as_lossy_str).map(Cow::into_owned),
        spec,
        weights,
        sampling: SamplingDefaults::from_gguf(&metadata),
        text: TextSource::Gguf(metadata),
        eos_ids,
        source,
        files,
        notes,
    })
}
