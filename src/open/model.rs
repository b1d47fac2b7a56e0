//! A model that has been read: sizes, weights, and what its text is made from.

use std::sync::Arc;
use std::time::Instant;

use super::source::{ModelSource, resolve};
use crate::model::{self, LoadedModel, TextSource, synth};
use crate::progress::Progress;
use crate::text::{Chat, Tokenizer};
use crate::{Error, Result};

/// A model that has been read but not yet prepared for a device or a tier of kernels.
pub struct Model {
    /// The user's name for it.
    pub name: String,
    /// Sizes, weights, and material for text.
    pub loaded: LoadedModel,
    pub(super) began: Instant,
}

impl Model {
    /// Reads the model that `name` means: a `.gguf` file, a folder, `synth:SPEC` for random weights, or a name that the
    /// hub knows, which is fetched on first use. Weights are mapped, not copied.
    ///
    /// # Errors
    /// Nothing has that name, it cannot be fetched, or its files are damaged or of a family that cannot run.
    pub fn open(name: &str, progress: &dyn Progress) -> Result<Model> {
        Model::named(Some(name), progress)
    }

    /// The model of `name`, or the default one.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn named(name: Option<&str>, progress: &dyn Progress) -> Result<Model> {
        let resolved = resolve(name, progress)?;
        let began = Instant::now();
        let loaded = match &resolved.source {
            ModelSource::Path(path) => model::load(&path.to_string_lossy())?,
            ModelSource::Synth(spec) => {
                // Reject a bad specification before starting.
                synth::parse(spec)?;
                progress.note(&format!("making random weights for {spec}"));
                model::load(&format!("synth:{spec}"))?
            }
        };
        // For example a dtype that had to be replaced: measurements must not hide it.
        loaded.notes.iter().for_each(|note| progress.note(note));
        Ok(Model { name: resolved.name, loaded, began })
    }

    /// The model of `name` for a description: random weights are not generated.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn outline(name: &str, progress: &dyn Progress) -> Result<LoadedModel> {
        match resolve(Some(name), progress)?.source {
            ModelSource::Synth(spec) => synth::outline(&spec),
            ModelSource::Path(path) => model::load(&path.to_string_lossy()),
        }
    }

    /// The tokenizer; `None` for random weights, which have none.
    ///
    /// # Errors
    /// It is missing or damaged.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        let mut tokenizer = match &self.loaded.text {
            TextSource::Gguf(metadata) => Tokenizer::from_gguf(metadata)?,
            TextSource::TokenizerJson { path, config } => Tokenizer::from_json_file(path, config.as_deref())?,
            TextSource::Missing(path) => {
                return Err(Error::format(
                    path.display().to_string(),
                    "missing; without a tokenizer there is no text (inspect and bench work); is the download complete?",
                ));
            }
            TextSource::None => return Ok(None),
        };
        self.loaded.eos_ids.iter().for_each(|&id| tokenizer.add_eog(id));
        Ok(Some(tokenizer))
    }

    /// How its prompts become tokens: by its own chat template, or one that its special tokens imply.
    pub fn chat(&self, tokenizer: Option<Arc<Tokenizer>>) -> Chat {
        Chat::new(tokenizer, self.loaded.chat_template.as_deref(), self.loaded.spec.vocab)
    }
}
