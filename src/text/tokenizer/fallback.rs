//! What SentencePiece writes for a piece of text that is no token.

use super::raw;
use super::vocab::Vocab;
use crate::{Error, Result};

/// The tokens of bytes, and the one for text that is unknown.
#[derive(Debug)]
pub struct Fallback {
    bytes: Box<[Option<u32>; 256]>,
    unknown: Option<u32>,
}

impl Fallback {
    /// Finds the byte tokens.
    pub fn new(vocab: &Vocab, unknown: Option<u32>) -> Fallback {
        let mut bytes = Box::new([None; 256]);
        for b in 0..=255u8 {
            let literal = || vocab.id(&raw::spelled(&[b]));
            bytes[b as usize] = vocab.id(&format!("<0x{b:02X}>")).or_else(literal);
        }
        Fallback { bytes, unknown }
    }

    /// Appends the tokens of `piece`: its bytes, or the unknown token, of which a row of unknown pieces has one.
    /// `after_unknown` says whether the piece before was unknown, and is brought up to date.
    pub fn push(&self, piece: &str, after_unknown: &mut bool, out: &mut Vec<u32>) -> Result<()> {
        if piece.bytes().all(|b| self.bytes[b as usize].is_some()) {
            out.extend(piece.bytes().filter_map(|b| self.bytes[b as usize]));
            *after_unknown = false;
        } else if !std::mem::replace(after_unknown, true) {
            out.push(self.unknown.ok_or_else(|| {
                Error::Run(format!(
                    "the tokenizer cannot encode {piece:?}: it has no token for it, no byte token and no unknown token"
                ))
            })?);
        }
        Ok(())
    }
}
