//! A Hugging Face `tokenizer.json`, run by the `tokenizers` crate.

use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value as Json;

use super::*;
use crate::small_file;

/// Longest file read. Those of vocabularies of 256 000 tokens have some 35 MB.
const MAX_JSON: u64 = 128 << 20;

/// The crate's tokenizer, and how its token texts spell bytes.
#[derive(Debug)]
pub(super) struct Hf {
    inner: tokenizers::Tokenizer,
    /// The tokenizer without control tokens, for untrusted text. Created on first use.
    plain: OnceLock<tokenizers::Tokenizer>,
    spelling: Spelling,
    adds_space_prefix: bool,
    vocab_size: usize,
}

/// How the vocabulary writes bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Spelling {
    /// In GPT-2's alphabet.
    ByteLevel,
    /// `▁` is a space, `<0xNN>` a byte.
    SentencePiece,
    /// Bytes are written unchanged.
    Plain,
}

pub(super) fn load(path: &Path, tokenizer_config: Option<&str>) -> Result<Tokenizer> {
    let name = || path.display().to_string();
    let json = small_file::read(path, MAX_JSON)?.ok_or_else(|| small_file::missing(path))?;
    let mut inner =
        tokenizers::Tokenizer::from_bytes(&json).map_err(|e| Error::format(name(), e.to_string()))?;
    // Some files carry the truncation and padding of a training run.
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|e| Error::format(name(), e.to_string()))?;

    let vocab_size = inner.get_vocab_size(true);
    if vocab_size == 0 {
        return Err(Error::format(name(), "the vocabulary has no tokens"));
    }
    let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or(Json::Null);
    let spelling = if any(&decoder, &|j| j["type"] == "ByteLevel") {
        Spelling::ByteLevel
    } else if any(&decoder, &|j| j["type"] == "ByteFallback" || j["type"] == "Metaspace") {
        Spelling::SentencePiece
    } else {
        Spelling::Plain
    };
    let adds_space_prefix = any(&decoder, &|j| {
        (j["type"] == "Strip" && j["content"] == " " && j["start"] == 1)
            || (j["type"] == "Metaspace" && j["prepend_scheme"] != "never")
    });

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
        match inner.token_to_id(text) {
            Some(id) => Ok(Some(id)),
            None => Err(Error::format(
                "tokenizer_config.json",
                format!("{key} is {:?}, which is no token of {}", spm::clip(text), name()),
            )),
        }
    };
    let mut special = Roles { bos: role("bos_token")?, eos: role("eos_token")?, ..Roles::default() };
    special.end_of_generation.extend(special.eos);
    let known = |text: &str| inner.token_to_id(text);
    let added = inner.get_added_vocabulary().get_added_tokens_decoder();
    for text in END_OF_GENERATION {
        let id = known(text).filter(|id| is_unmistakable(text) || added.get(id).is_some_and(|t| t.special));
        special.end_of_generation.extend(id);
    }
    if let (Some(_), Some(_), Some(end)) = (known("<|return|>"), known("<|call|>"), known("<|end|>")) {
        special.end_of_generation.remove(&end);
    }
    let hf = Hf { inner, plain: OnceLock::new(), spelling, adds_space_prefix, vocab_size };
    Ok(Tokenizer { engine: Engine::Hf(Box::new(hf)), special })
}

/// Whether any object inside of `json` satisfies `test`.
fn any(json: &Json, test: &dyn Fn(&Json) -> bool) -> bool {
    match json {
        Json::Object(map) => test(json) || map.values().any(|j| any(j, test)),
        Json::Array(list) => list.iter().any(|j| any(j, test)),
        _ => false,
    }
}

impl Hf {
    pub(super) fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        let tokenizer = if parse_special {
            &self.inner
        } else {
            self.plain.get_or_init(|| {
                let mut plain = self.inner.clone();
                plain.set_encode_special_tokens(true);
                plain
            })
        };
        match tokenizer.encode_fast(text, add_special) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(Error::Run(format!("the tokenizer failed on this text: {e}"))),
        }
    }

    pub(super) fn token_bytes(&self, id: u32) -> Vec<u8> {
        if let Some(added) = self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id) {
            return added.content.clone().into_bytes();
        }
        let text = self.token_text(id).unwrap_or_default();
        match self.spelling {
            Spelling::ByteLevel => bytelevel::decode(&text),
            Spelling::SentencePiece => {
                byte_token(&text).map_or_else(|| text.replace(spm::SPACE, " ").into_bytes(), |b| vec![b])
            }
            Spelling::Plain => text.into_bytes(),
        }
    }

    pub(super) fn token_text(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    pub(super) fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(super) fn adds_space_prefix(&self) -> bool {
        self.adds_space_prefix
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id).is_some_and(|token| token.special)
    }
}
