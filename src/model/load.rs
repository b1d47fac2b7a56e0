//! The front door: a path or `synth:SPEC` to a checked model.

use std::path::{Path, PathBuf};

use super::arch::{self, GgufConfig};
use super::formats::gguf::{Gguf, Metadata, Value};
use super::formats::{hf, in_file};
use super::{ModelSpec, SamplingDefaults, Weights, synth, validate};
use crate::tensor::{Bytes, DType, Tensor};
use crate::{Error, Result};

/// A model, checked: [`validate`] has passed.
#[derive(Debug, Clone)]
pub struct LoadedModel {
    /// Sizes and switches.
    pub spec: ModelSpec,
    /// Tensors by canonical name. One-dimensional ones (norms, biases) are always f32.
    pub weights: Weights,
    /// What a tokenizer is made from.
    pub text: TextSource,
    /// The chat template (Jinja), if the model has one.
    pub chat_template: Option<String>,
    /// Tokens that end a text, as far as the files say so outside the tokenizer.
    pub eos_ids: Vec<u32>,
    /// What the model's authors recommend for sampling, if they do.
    pub sampling: SamplingDefaults,
    /// Where it came from, for messages.
    pub source: String,
    /// Things worth telling the user (a dtype that had to be replaced...).
    pub notes: Vec<String>,
}

/// What a tokenizer is made from.
#[derive(Debug, Clone)]
pub enum TextSource {
    /// The metadata of a GGUF file (`tokenizer.ggml.*`).
    Gguf(Metadata),
    /// A Hugging Face `tokenizer.json`.
    TokenizerJson {
        /// The file. It exists.
        path: PathBuf,
        /// The text of `tokenizer_config.json` (bos, eos, add_bos...), if there is one. It is valid JSON.
        config: Option<String>,
    },
    /// A folder without one: the file that is missing. The model can be described and measured.
    Missing(PathBuf),
    /// Random weights have no text.
    None,
}

/// Loads `source`: a `.gguf` file, a folder with `config.json`, or `synth:SPEC` (see [`synth`]).
///
/// # Errors
/// Nothing there, not a model, or a model that is damaged or of an unknown kind.
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
        _ => gguf(path).map_err(|e| in_file(path, e)),
    }
}

fn gguf(path: &Path) -> Result<LoadedModel> {
    let bytes = super::formats::map_file(path)?;
    from_gguf(Gguf::parse(bytes)?, path.display().to_string())
}

/// A model from a parsed GGUF file.
///
/// # Errors
/// As [`load`].
pub fn from_gguf(file: Gguf, source: String) -> Result<LoadedModel> {
    let Gguf { metadata, tensors, .. } = file;
    let text = |key: &str| metadata.get(key).and_then(Value::as_str);
    let arch = text("general.architecture")
        .ok_or_else(|| Error::format("general.architecture", "missing; is this a model file?"))?
        .to_owned();
    if let Some(n) = metadata.get("split.count").and_then(Value::as_u64).filter(|&n| n > 1) {
        return Err(Error::Unsupported(format!(
            "one of {n} parts of a split GGUF; merge them into one file first"
        )));
    }
    let family = arch::of_gguf(&arch)?;
    let mut weights = Weights::default();
    for (name, t) in tensors {
        weights.insert(name, t);
    }
    let mut spec = (family.from_gguf)(&GgufConfig { arch: &arch, meta: &metadata, tensors: &weights })?;
    if spec.name.is_empty() {
        spec.name =
            Path::new(&source).file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    }
    // Now part of the spec.
    let weights = vectors_to_f32(weights.into_iter().filter(|(n, _)| n != "rope_freqs.weight"))?;
    validate(&spec, &weights)?;
    let id = |key: &str| metadata.get(key).and_then(Value::as_u64).and_then(|v| u32::try_from(v).ok());
    let mut eos_ids: Vec<u32> = ["eos", "eot", "eom"]
        .into_iter()
        .filter_map(|k| id(&format!("tokenizer.ggml.{k}_token_id")))
        .collect();
    eos_ids.dedup();
    Ok(LoadedModel {
        chat_template: text("tokenizer.chat_template").map(str::to_owned),
        spec,
        weights,
        sampling: SamplingDefaults::from_gguf(&metadata),
        text: TextSource::Gguf(metadata),
        eos_ids,
        source,
        notes: Vec::new(),
    })
}

/// Norms and biases are small and every kernel wants them in f32: convert them once, here.
pub(super) fn vectors_to_f32(tensors: impl Iterator<Item = (String, Tensor)>) -> Result<Weights> {
    let mut weights = Weights::default();
    for (name, t) in tensors {
        let t = if t.shape.len() == 1 && t.dtype != DType::F32 {
            f32_tensor(t.shape.clone(), &crate::reference::dequant::dequantise(&t))?
        } else {
            t
        };
        weights.insert(name, t);
    }
    Ok(weights)
}

/// An owned f32 tensor.
pub(super) fn f32_tensor(shape: Vec<usize>, values: &[f32]) -> Result<Tensor> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor::new(DType::F32, shape, Bytes::copy_of(&bytes))
}
