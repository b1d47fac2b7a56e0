//! A loaded model.

use std::path::PathBuf;

use super::formats::Files;
use super::formats::gguf::Metadata;
use super::{ModelSpec, SamplingDefaults, Weights};

/// A model, checked: [`validate`](super::validate) has passed.
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
    /// Tokens that end a text, as far as the files state them outside the tokenizer.
    pub eos_ids: Vec<u32>,
    /// The authors' recommendation for sampling, if any.
    pub sampling: SamplingDefaults,
    /// Where it came from, for messages.
    pub source: String,
    /// The files with its weights; none for random ones.
    pub files: Files,
    /// Notes for the user (a dtype that had to be replaced...).
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
    /// The missing file of a folder without a tokenizer. The model can still be described and measured.
    Missing(PathBuf),
    /// Random weights have no text.
    None,
}
