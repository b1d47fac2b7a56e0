//! A Hugging Face `tokenizer.json`: read into types of our own, bounded, and run in part by the `tokenizers` crate.
//!
//! The file is a program from a stranger, for which the crate panics, takes gigabytes or never ends. So everything in
//! it is read into a fixed set of components whose sizes are bounded, patterns run on an engine that counts its steps,
//! and what the crate does runs where its panics are caught (docs/decisions/0029).
//!
//! ```text
//! text ── added tokens ── normalizer ── pre-tokenizer ── model ── post-processor ──> ids
//!         crate           crate, finder crate, finder    crate, unigram   ours
//! ```

mod budget;
mod decoder;
mod file;
mod finder;
mod matcher;
mod metaspace;
mod model;
mod normalizer;
mod pattern;
mod postprocessor;
mod precompiled;
mod pretokenizer;
mod sequence;
mod unigram;

use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value as Json;
use tokenizers::{AddedToken, AddedVocabulary, OffsetReferential, OffsetType};

use super::*;
use crate::small_file;
use decoder::{Decoder, Spelling};
use file::{Added, File};
use model::Model;
use normalizer::Normalizer;
use pretokenizer::PreTokenizers;

/// Longest file read. Those of vocabularies of 256 000 tokens have some 35 MB.
const MAX_JSON: u64 = 128 << 20;

/// Longest added token. Those of real files have up to some hundred bytes, runs of spaces mostly. A search may look
/// so far ahead at every place of a text.
const MAX_ADDED: usize = 1024;

/// The parts of a tokenizer, and how its token texts spell bytes.
#[derive(Debug)]
pub(super) struct Hf {
    /// For errors of encoding.
    file: String,
    added: AddedVocabulary,
    /// The added tokens without control tokens, for untrusted text. Created on first use.
    plain: OnceLock<AddedVocabulary>,
    normalizer: Option<Normalizer>,
    pre_tokenizer: PreTokenizers,
    model: Model,
    /// What the post-processor puts before and after a text.
    around: (Vec<u32>, Vec<u32>),
    decoder: Decoder,
    vocab_size: usize,
}

pub(super) fn load(path: &Path, tokenizer_config: Option<&str>) -> Result<Tokenizer> {
    let name = || path.display().to_string();
    let json = small_file::read(path, MAX_JSON)?.ok_or_else(|| small_file::missing(path))?;
    let mut hf = budget::guarded(json.len(), || Hf::new(name(), &json))
        .map_err(|problem| Error::format(name(), sentence(&problem)))?;

    let config = match tokenizer_config {
        None => Json::Null,
        Some(text) => small_file::parse_json(text.as_bytes())
            .map_err(|e| Error::format("tokenizer_config.json", format!("not valid JSON: {e}")))?,
    };
    // A token is named by its text, or by an object that has its text as `content`.
    let role = |key: &str| -> Result<Option<u32>> {
        let Some(text) = config[key].as_str().or_else(|| config[key]["content"].as_str()) else {
            return Ok(None);
        };
        match hf.token_id(text) {
            Some(id) => Ok(Some(id)),
            None => Err(Error::format(
                "tokenizer_config.json",
                format!("{key} is {:?}, which is no token of {}", spm::clip(text), name()),
            )),
        }
    };
    let mut special = Roles { bos: role("bos_token")?, eos: role("eos_token")?, ..Roles::default() };
    special.end_of_generation.extend(special.eos);
    let known = |text: &str| hf.token_id(text);
    let added = hf.added.get_added_tokens_decoder();
    for text in END_OF_GENERATION {
        let id = known(text).filter(|id| is_unmistakable(text) || added.get(id).is_some_and(|t| t.special));
        special.end_of_generation.extend(id);
    }
    if let (Some(_), Some(_), Some(end)) = (known("<|return|>"), known("<|call|>"), known("<|end|>")) {
        special.end_of_generation.remove(&end);
    }
    let (before, after) = std::mem::take(&mut hf.around);
    let around = Around {
        before: or_by_flag(&config, "add_bos_token", special.bos, before)?,
        after: or_by_flag(&config, "add_eos_token", special.eos, after)?,
        begins_chats: false,
    };
    Ok(Tokenizer { engine: Engine::Hf(Box::new(hf)), special, around })
}

/// Classes of `transformers` whose `add_bos_token` and `add_eos_token` overrule the post-processor of `tokenizer.json`.
const FLAGGED: [&str; 4] = ["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"];

/// The tokens on one side of a text: the post-processor's, or what a flag of the configuration says, where it counts
/// (docs/decisions/0030).
fn or_by_flag(config: &Json, key: &str, id: Option<u32>, of_file: Vec<u32>) -> Result<Vec<u32>> {
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    if !FLAGGED.contains(&class.strip_suffix("Fast").unwrap_or(class)) {
        return Ok(of_file);
    }
    match (&config[key], id) {
        (Json::Null, _) => Ok(of_file),
        (Json::Bool(true), Some(id)) if of_file.is_empty() => Ok(vec![id]),
        (Json::Bool(true), _) => Ok(of_file),
        // Only the token that the flag is about.
        (Json::Bool(false), Some(id)) => Ok(of_file.into_iter().filter(|&other| other != id).collect()),
        (Json::Bool(false), None) => Ok(of_file),
        (other, _) => {
            let found = spm::clip(&other.to_string());
            Err(Error::format(
                format!("tokenizer_config.json: {key}"),
                format!("{found}, wanted true or false"),
            ))
        }
    }
}

/// What a stranger's file made a crate say, as part of one line.
fn sentence(problem: &str) -> String {
    const LONGEST: usize = 240;
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut shown: String = problem.chars().map(clean).take(LONGEST).collect();
    if problem.chars().nth(LONGEST).is_some() {
        shown.push_str("...");
    }
    shown
}

/// The tokens beside the model's, in the crate's order.
fn add_tokens(
    tokens: Vec<Added>,
    model: &Model,
    normalizer: Option<&Normalizer>,
) -> Result<AddedVocabulary, String> {
    let mut added = AddedVocabulary::new();
    for token in &tokens {
        if token.content.len() > MAX_ADDED {
            return Err(format!("added_tokens: a token of {} bytes", token.content.len()));
        }
    }
    let tokens = tokens.into_iter().map(|token| {
        AddedToken::from(token.content, token.special)
            .single_word(token.single_word)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .normalized(token.normalized)
    });
    added.add_tokens(tokens, model, normalizer).map_err(|e| format!("added_tokens: {e}"))?;
    for (&id, token) in added.get_added_tokens_decoder() {
        // As it is looked for in the text.
        let looked_for = added.simple_id_to_token(id).unwrap_or_default();
        let shown = || spm::clip(&token.content);
        if looked_for.len() > MAX_ADDED {
            return Err(format!("added_tokens: {:?} becomes longer than {MAX_ADDED} bytes", shown()));
        }
        // Each would take the white space around it, which is the others of its kind.
        if (token.lstrip || token.rstrip) && looked_for.chars().all(char::is_whitespace) {
            return Err(format!("added_tokens: {:?} is white space, and may not strip it", shown()));
        }
    }
    Ok(added)
}

impl Hf {
    fn new(file: String, json: &[u8]) -> Result<Hf, String> {
        let mut read: File = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        let model = Model::new(read.model.take().ok_or("model is missing")?)?;
        let normalizer = read.normalizer.as_ref().map(Normalizer::new).transpose()?;
        let pre_tokenizer = read.pre_tokenizer.as_ref().map(PreTokenizers::new).transpose()?;
        let decoder = Decoder::new(read.decoder.as_ref())?;
        let added = add_tokens(read.added_tokens, &model, normalizer.as_ref())?;
        let known = |id| added.simple_id_to_token(id).or_else(|| model.id_to_token(id)).is_some();
        let around = postprocessor::around(read.post_processor.as_ref(), known)?;
        let beside = added.get_vocab().keys().filter(|token| model.token_to_id(token).is_none()).count();
        let vocab_size = model.vocab_size() + beside;
        if vocab_size == 0 {
            return Err("the vocabulary has no tokens".into());
        }
        Ok(Hf {
            file,
            added,
            plain: OnceLock::new(),
            normalizer,
            pre_tokenizer: pre_tokenizer.unwrap_or_default(),
            model,
            around,
            decoder,
            vocab_size,
        })
    }

    pub(super) fn encode(&self, text: &str, parse_special: bool, ids: &mut Vec<u32>) -> Result<()> {
        let added = if parse_special {
            &self.added
        } else {
            self.plain.get_or_init(|| {
                let mut plain = self.added.clone();
                plain.set_encode_special_tokens(true);
                plain
            })
        };
        budget::guarded(text.len(), || self.encode_text(added, text, ids))
            .map_err(|problem| Error::Run(format!("{}: {}", self.file, sentence(&problem))))
    }

    fn encode_text(&self, added: &AddedVocabulary, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        let mut pieces = added.extract_and_normalize(self.normalizer.as_ref(), text);
        self.pre_tokenizer.run(&mut pieces).map_err(|e| format!("pre_tokenizer: {e}"))?;
        for (piece, _, token) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            match token {
                Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
                None if piece.is_empty() => {}
                None => self.model.tokenize(piece, ids)?,
            }
        }
        Ok(())
    }

    pub(super) fn token_bytes(&self, id: u32) -> Vec<u8> {
        if let Some(added) = self.added.get_added_tokens_decoder().get(&id) {
            return added.content.clone().into_bytes();
        }
        let text = self.token_text(id).unwrap_or_default();
        match self.decoder.spelling {
            Spelling::ByteLevel => bytelevel::decode(&text),
            Spelling::SentencePiece => {
                byte_token(&text).map_or_else(|| text.replace(spm::SPACE, " ").into_bytes(), |b| vec![b])
            }
            Spelling::Plain => text.into_bytes(),
        }
    }

    pub(super) fn token_text(&self, id: u32) -> Option<String> {
        self.added.simple_id_to_token(id).or_else(|| self.model.id_to_token(id))
    }

    pub(super) fn token_id(&self, text: &str) -> Option<u32> {
        self.added.get_vocab().get(text).copied().or_else(|| self.model.token_to_id(text))
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(super) fn adds_space_prefix(&self) -> bool {
        self.decoder.strips_space
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.added.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special)
    }
}
