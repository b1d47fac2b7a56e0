//! An answer under construction: takes tokens and returns the text that is final, up to a stop string or the end of the
//! turn.

use std::sync::Arc;

use super::{SamplerParams, StreamDecoder, StreamOutput, Tokenizer};

/// What ends an answer, and what of it is text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ending {
    /// Tokens that end it: those of the end of the turn, and the user's.
    pub tokens: Vec<u32>,
    /// Texts that end it.
    pub stop: Vec<String>,
    /// Texts end it only behind so many tokens.
    pub min_tokens: usize,
    /// Whether the text includes the stop string, or the text of the token, that ended it.
    pub keep_stop: bool,
    /// Whether special tokens are text.
    pub show_special: bool,
    /// Special tokens that are text in any case.
    pub shown: Arc<[u32]>,
    /// Tokens that part the text and are none of it: what was held back in front of one is released, and no stop string
    /// reaches across.
    pub parting: Arc<[u32]>,
}

impl Ending {
    /// An answer that ends at one of these tokens.
    pub fn at(tokens: Vec<u32>) -> Ending {
        Ending { tokens, ..Ending::default() }
    }

    /// Excludes the tokens that end the answer where it is too short.
    pub fn withhold(&self, params: &mut SamplerParams) {
        if self.min_tokens > 0 && !self.tokens.is_empty() {
            params.withheld.push((self.min_tokens, self.tokens.clone().into()));
        }
    }
}

/// See the [module](self).
pub struct Answer {
    /// Without one (random weights) the text consists of the tokens' numbers.
    tokenizer: Option<Arc<Tokenizer>>,
    ending: Ending,
    stream: StreamDecoder,
    /// Tokens so far.
    tokens: usize,
}

/// The effect of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// New text that will not change any more.
    pub text: String,
    /// Whether the answer ends here, by a stop string or the end of the turn.
    pub stops: bool,
}

impl Answer {
    /// An answer that ends so.
    pub fn new(tokenizer: Option<Arc<Tokenizer>>, ending: Ending) -> Answer {
        let stops: &[String] = if ending.min_tokens == 0 { &ending.stop } else { &[] };
        let stream = StreamDecoder::new(stops).keep_stop(ending.keep_stop);
        Answer { tokenizer, ending, stream, tokens: 0 }
    }

    /// Takes the next token.
    pub fn push(&mut self, id: u32) -> Piece {
        self.tokens += 1;
        let ends = self.ending.tokens.contains(&id);
        let out = match &self.tokenizer {
            _ if ends && !self.ending.keep_stop => StreamOutput::default(),
            Some(_) if self.ending.parting.contains(&id) && !self.ending.show_special => self.stream.finish(),
            None => self.stream.push(format!("{id} ").as_bytes()),
            Some(t) if t.is_special(id) && (self.ending.show_special || self.ending.shown.contains(&id)) => {
                self.stream.push(t.token_text(id).unwrap_or_default().as_bytes())
            }
            Some(t) if t.is_special(id) || t.is_eog(id) => StreamOutput::default(),
            Some(t) => self.stream.push(&t.token_bytes(id)),
        };
        if self.tokens == self.ending.min_tokens {
            self.stream.stop_at(&self.ending.stop);
        }
        Piece { text: out.text, stops: ends || out.stopped }
    }

    /// Ends the answer and returns the text that was held back because it could have become a stop string or a
    /// character.
    pub fn finish(&mut self) -> String {
        self.stream.finish().text
    }
}
