//! An answer under construction: takes tokens and returns the text that is final, up to a stop string or the end of the
//! turn.

use tandem::text::{StreamDecoder, Tokenizer};

/// See the [module](self).
pub struct Answer<'a> {
    /// The tokenizer. Without one (random weights) the text consists of the tokens' numbers.
    tokenizer: Option<&'a Tokenizer>,
    stream: StreamDecoder,
    /// All final text.
    pub text: String,
    /// All tokens, including the last one of a stop string or a turn.
    pub tokens: Vec<u32>,
}

/// The effect of a token.
pub struct Piece {
    /// New text that will not change any more.
    pub text: String,
    /// Whether the answer ends here, by a stop string or the end of the turn.
    pub stops: bool,
}

impl<'a> Answer<'a> {
    /// An answer that also ends at any of these texts.
    pub fn new(tokenizer: Option<&'a Tokenizer>, stop: &[String]) -> Answer<'a> {
        Answer { tokenizer, stream: StreamDecoder::new(stop), text: String::new(), tokens: Vec::new() }
    }

    /// Takes the next token.
    pub fn push(&mut self, id: u32) -> Piece {
        self.tokens.push(id);
        let (text, stops) = match self.tokenizer {
            Some(t) if t.is_eog(id) => (String::new(), true),
            Some(t) if t.is_special(id) => (String::new(), false),
            Some(t) => {
                let out = self.stream.push(&t.token_bytes(id));
                (out.text, out.stopped)
            }
            None => (format!("{id} "), false),
        };
        self.text.push_str(&text);
        Piece { text, stops }
    }

    /// Ends the answer and returns the text that was held back because it could have become a stop string or a
    /// character.
    pub fn finish(&mut self) -> String {
        let rest = self.stream.finish().text;
        self.text.push_str(&rest);
        rest
    }
}
