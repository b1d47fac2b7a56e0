//! The model that is served, once it is loaded.

use std::sync::Arc;

use super::error::ApiError;
use super::options::Options;
use super::places::Places;
use crate::engine::Client;
use crate::sched::Targets;
use crate::text::{Chat, Ending, Grammars, SamplerParams, Tokenizer};

/// A loaded model, and what its requests have where they say nothing.
pub struct Model {
    /// The service that computes.
    pub client: Client,
    /// How prompts become tokens.
    pub chat: Chat,
    /// The tokenizer; random weights have none, and their text consists of the tokens' numbers.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Compiles the forms that answers are asked to have.
    pub grammars: Grammars,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Sequences that run at a time.
    pub sequences: usize,
    /// How tokens are chosen.
    pub sampling: SamplerParams,
    /// What ends an answer.
    pub ending: Ending,
    /// What is asked of latency by requests that ask nothing for themselves.
    pub targets: Targets,
    /// Where it runs, in a sentence.
    pub placement: String,
}

impl Model {
    /// The text of tokens, control tokens included.
    pub(super) fn text_of(&self, ids: &[u32]) -> String {
        match &self.tokenizer {
            Some(t) => t.decode(ids, false),
            None => ids.iter().map(|id| format!("{id} ")).collect(),
        }
    }

    /// # Errors
    /// If the service has ended: its device is lost, or it panicked.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        self.client.check().map_err(|e| ApiError::from_engine(&e, ""))
    }
}

/// A model in use.
pub(super) struct Loaded {
    pub model: Model,
    pub places: Places,
}

impl Loaded {
    pub fn new(model: Model, options: &Options) -> Loaded {
        let n = model.sequences;
        let places = Places::new(n + options.queue, options.keys.len(), options.queue_per_key.map(|q| n + q));
        Loaded { model, places }
    }
}
