//! What the decoder of a `tokenizer.json` says about the spelling of its tokens. Text is made of tokens' bytes
//! elsewhere, so none of them runs.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value as Json;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;

use super::finder::{Finder, PatternOf};
use super::metaspace::SpelledMetaspace;
use super::sequence::flatten;

/// As the file spells it. What does not matter here must still be there.
#[derive(Deserialize)]
#[serde(tag = "type")]
#[allow(dead_code, reason = "read to see that the file has it")]
enum Spelled {
    BPEDecoder {
        suffix: String,
    },
    ByteLevel {
        add_prefix_space: bool,
        trim_offsets: bool,
        use_regex: Option<bool>,
    },
    WordPiece {
        prefix: String,
        cleanup: bool,
    },
    Metaspace(SpelledMetaspace),
    #[allow(clippy::upper_case_acronyms, reason = "spelled so in the file")]
    CTC {
        pad_token: String,
        word_delimiter_token: String,
        cleanup: bool,
    },
    Replace {
        pattern: PatternOf,
        content: String,
    },
    Fuse(Option<IgnoredAny>),
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    ByteFallback,
}

/// How the vocabulary writes bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Spelling {
    /// In GPT-2's alphabet.
    ByteLevel,
    /// `▁` is a space, `<0xNN>` a byte.
    SentencePiece,
    /// Bytes are written unchanged.
    Plain,
}

#[derive(Debug)]
pub(super) struct Decoder {
    pub(super) spelling: Spelling,
    /// A space at the beginning of a text is the tokenizer's.
    pub(super) strips_space: bool,
}

impl Decoder {
    /// # Errors
    /// Which part of `json` is no decoder.
    pub(super) fn new(json: Option<&Json>) -> Result<Decoder, String> {
        let mut decoder = Decoder { spelling: Spelling::Plain, strips_space: false };
        let Some(json) = json else { return Ok(decoder) };
        flatten(json, "decoder", "decoders", |spelled| {
            let sentence_piece = if decoder.spelling == Spelling::ByteLevel {
                Spelling::ByteLevel
            } else {
                Spelling::SentencePiece
            };
            match spelled {
                Spelled::ByteLevel { .. } => decoder.spelling = Spelling::ByteLevel,
                Spelled::ByteFallback => decoder.spelling = sentence_piece,
                Spelled::Metaspace(metaspace) => {
                    decoder.spelling = sentence_piece;
                    decoder.strips_space |= metaspace.scheme()? != PrependScheme::Never;
                }
                Spelled::Strip { content, start, .. } => decoder.strips_space |= content == ' ' && start == 1,
                Spelled::Replace { pattern, .. } => {
                    Finder::new(pattern)?;
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(decoder)
    }
}
