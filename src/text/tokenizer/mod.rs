//! Converts text to token ids and back, with the tokenizer that the model file contains.
//!
//! There are two sources:
//!
//! - [`Tokenizer::from_gguf`]: vocabulary and rule named in GGUF metadata. Byte-level BPE
//!   (`bpe`, after `pretokenize`) or SentencePiece (`spm`, `unigram`), on tables that load in
//!   milliseconds.
//! - [`Tokenizer::from_json_file`]: a Hugging Face `tokenizer.json`, run by the `tokenizers` crate.

mod around;
mod bpe;
mod bytelevel;
mod fallback;
mod gguf;
mod hash;
mod hf;
mod pretokenize;
mod raw;
mod special;
mod spm;
mod unigram;
mod vocab;

use std::collections::BTreeSet;
use std::path::Path;

use crate::model::formats::gguf::Metadata;
use crate::{Error, Result};

use around::Around;
use bpe::Bpe;
use pretokenize::PreTokenizer;
use special::{Fragment, SpecialTokens};
use spm::Spm;
use unigram::Unigram;
use vocab::{TokenKind, Vocab};

/// A model's tokenizer. Cheap to share by reference between threads.
#[derive(Debug)]
pub struct Tokenizer {
    engine: Engine,
    special: Roles,
    around: Around,
}

#[derive(Debug)]
enum Engine {
    Bpe { vocab: Vocab, special: SpecialTokens, pre: PreTokenizer, bpe: Bpe },
    Spm { vocab: Vocab, special: SpecialTokens, spm: Spm, add_space_prefix: bool },
    Unigram { vocab: Vocab, special: SpecialTokens, unigram: Unigram },
    Hf(Box<hf::Hf>),
}

/// Tokens with a role.
#[derive(Debug, Default)]
struct Roles {
    bos: Option<u32>,
    eos: Option<u32>,
    end_of_generation: BTreeSet<u32>,
}

/// Tokens that end a turn in some family, recognised by their text: files often name only one.
const END_OF_GENERATION: [&str; 20] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Whether a token with this text marks turns whatever the file says. Others, such as `</s>`, are HTML in some
/// vocabularies, and count only if the file calls them special.
fn is_unmistakable(text: &str) -> bool {
    text.starts_with("<|") || text.starts_with("<｜") || text == "<end_of_turn>"
}

/// Longer texts are refused: positions are kept in 32 bits.
const MAX_TEXT: usize = 1 << 30;

impl Tokenizer {
    /// The tokenizer described by a GGUF file's metadata.
    pub fn from_gguf(metadata: &Metadata) -> Result<Tokenizer> {
        gguf::load(metadata)
    }

    /// The tokenizer of a Hugging Face model folder: `tokenizer.json`, and the text of
    /// `tokenizer_config.json` if there is one (it names the special tokens).
    pub fn from_json_file(path: &Path, tokenizer_config: Option<&str>) -> Result<Tokenizer> {
        hf::load(path, tokenizer_config)
    }

    /// The tokens of `text`.
    ///
    /// With `add_special` the tokens that the model expects around a text (usually one at the
    /// beginning) are added. With `parse_special` control tokens written out in the text, such as
    /// `<|im_start|>`, become those tokens: right for the output of a chat template, wrong for untrusted text.
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        if text.len() > MAX_TEXT {
            return Err(Error::Capacity(format!(
                "a text of {} bytes is too long to tokenize; the limit is {MAX_TEXT}",
                text.len()
            )));
        }
        let mut out = Vec::new();
        if add_special {
            out.extend(&self.around.before);
        }
        match &self.engine {
            Engine::Bpe { vocab, special, pre, bpe } => {
                let mut scratch = bpe::Scratch::default();
                special.split(vocab, text, parse_special, |fragment| {
                    match fragment {
                        Fragment::Token(id) => out.push(id),
                        Fragment::Text(text) => {
                            pre.split(text, |piece| bpe.encode_piece(vocab, piece, &mut scratch, &mut out));
                        }
                    }
                    Ok(())
                })?;
            }
            Engine::Spm { vocab, special, spm, add_space_prefix } => {
                let mut after_special = true;
                special.split(vocab, text, parse_special, |fragment| {
                    match fragment {
                        Fragment::Token(id) => {
                            out.push(id);
                            after_special = true;
                        }
                        Fragment::Text(text) => {
                            let mut escaped = text.replace(' ', spm::SPACE);
                            if *add_space_prefix && after_special {
                                escaped.insert_str(0, spm::SPACE);
                            }
                            after_special = false;
                            spm.encode(vocab, &escaped, &mut out)?;
                        }
                    }
                    Ok(())
                })?;
            }
            Engine::Unigram { vocab, special, unigram } => {
                unigram.encode(vocab, special, text, parse_special, &mut out)?;
            }
            Engine::Hf(hf) => hf.encode(text, parse_special, &mut out)?,
        }
        if add_special {
            out.extend(&self.around.after);
        }
        Ok(out)
    }

    /// The text of a whole sequence. Ids outside of the vocabulary yield nothing; bytes that are no
    /// UTF-8 become U+FFFD. `skip_special` leaves control tokens out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        let mut strip = self.adds_space_prefix();
        for &id in ids {
            let special = self.is_special(id);
            if special && skip_special {
                continue;
            }
            let token = self.token_bytes(id);
            // `encode` put the space in front of the text.
            let token = if strip && !special { token.strip_prefix(b" ").unwrap_or(&token) } else { &token };
            strip &= special;
            bytes.extend_from_slice(token);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that token `id` stands for: perhaps part of a character, perhaps none.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match &self.engine {
            Engine::Bpe { vocab, .. } => match (vocab.get(id), vocab.kind(id)) {
                (Some(text), Some(TokenKind::Normal | TokenKind::Byte | TokenKind::Unused)) => {
                    bytelevel::decode(text)
                }
                (text, _) => raw::bytes_of(text.unwrap_or_default()),
            },
            Engine::Spm { vocab, .. } | Engine::Unigram { vocab, .. } => {
                match (vocab.get(id), vocab.kind(id)) {
                    (Some(text), Some(TokenKind::Byte)) => {
                        byte_token(text).map_or(raw::bytes_of(text), |b| vec![b])
                    }
                    (Some(text), Some(TokenKind::Normal | TokenKind::Unused)) => {
                        raw::bytes_of(&text.replace(spm::SPACE, " "))
                    }
                    (text, _) => raw::bytes_of(text.unwrap_or_default()),
                }
            }
            Engine::Hf(hf) => hf.token_bytes(id),
        }
    }

    /// The token's text as the vocabulary writes it (`Ġthe`, `▁the`, `<0x0A>`).
    pub fn token_text(&self, id: u32) -> Option<String> {
        match &self.engine {
            Engine::Bpe { vocab, .. } | Engine::Spm { vocab, .. } | Engine::Unigram { vocab, .. } => {
                vocab.get(id).map(str::to_owned)
            }
            Engine::Hf(hf) => hf.token_text(id),
        }
    }

    /// The id of the token written exactly so in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        match &self.engine {
            Engine::Bpe { vocab, .. } | Engine::Spm { vocab, .. } | Engine::Unigram { vocab, .. } => {
                vocab.id(text)
            }
            Engine::Hf(hf) => hf.token_id(text),
        }
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        match &self.engine {
            Engine::Bpe { vocab, .. } | Engine::Spm { vocab, .. } | Engine::Unigram { vocab, .. } => {
                vocab.len()
            }
            Engine::Hf(hf) => hf.vocab_size(),
        }
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.special.eos
    }

    /// Whether generation ends with this token: end of sequence, of turn, of message.
    pub fn is_eog(&self, id: u32) -> bool {
        self.special.end_of_generation.contains(&id)
    }

    /// The tokens that end a generation, in no particular order.
    pub fn end_of_generation(&self) -> impl Iterator<Item = u32> {
        self.special.end_of_generation.iter().copied()
    }

    /// Adds an end-of-generation token (`generation_config.json` may list several).
    pub fn add_eog(&mut self, id: u32) {
        self.special.end_of_generation.insert(id);
    }

    /// Whether the token steers the model and is not text.
    pub fn is_special(&self, id: u32) -> bool {
        match &self.engine {
            Engine::Bpe { vocab, .. } | Engine::Spm { vocab, .. } | Engine::Unigram { vocab, .. } => {
                matches!(vocab.kind(id), Some(TokenKind::Control | TokenKind::Unknown))
            }
            Engine::Hf(hf) => hf.is_special(id),
        }
    }

    /// Whether `encode` puts a space in front of the text, which decoding removes.
    pub fn adds_space_prefix(&self) -> bool {
        match &self.engine {
            Engine::Bpe { .. } => false,
            Engine::Spm { add_space_prefix, .. } => *add_space_prefix,
            Engine::Unigram { unigram, .. } => unigram.add_space_prefix,
            Engine::Hf(hf) => hf.adds_space_prefix(),
        }
    }

    /// The kind of tokenizer, for display: `byte-level BPE`, `SentencePiece`, `SentencePiece (unigram)`, `tokenizer.json`.
    pub fn kind(&self) -> &'static str {
        match self.engine {
            Engine::Bpe { .. } => "byte-level BPE",
            Engine::Spm { .. } => "SentencePiece",
            Engine::Unigram { .. } => "SentencePiece (unigram)",
            Engine::Hf(_) => "tokenizer.json",
        }
    }
}

/// The byte that `<0xNN>` stands for.
fn byte_token(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    // `from_str_radix` would accept a sign.
    (hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
        .then(|| u8::from_str_radix(hex, 16).ok())?
}
