//! An answer in the making: its text, and the log-probabilities of the tokens that are that text.
//!
//! A token's text may come with a later token, when a character or what could be a stop string is complete, or never,
//! behind a stop string. Its log-probabilities come with its text: joined, the tokens' bytes are the text.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::engine::Token;
use crate::text::{Ending, Tokenizer};

/// Spells tokens: as the text of an answer has them, and by name.
#[derive(Clone)]
pub(super) struct Speller {
    pub tokenizer: Option<Arc<Tokenizer>>,
}

impl Speller {
    /// The bytes that a token is in the text of an answer; none for tokens that steer the model.
    fn in_text(&self, id: u32) -> Vec<u8> {
        match &self.tokenizer {
            None => format!("{id} ").into_bytes(),
            Some(t) if t.is_special(id) || t.is_eog(id) => Vec::new(),
            Some(t) => t.token_bytes(id),
        }
    }

    /// A token by itself, and its bytes.
    pub fn name(&self, id: u32) -> (String, Vec<u8>) {
        let bytes = match &self.tokenizer {
            Some(t) if t.is_special(id) => t.token_text(id).unwrap_or_default().into_bytes(),
            Some(t) => t.token_bytes(id),
            None => self.in_text(id),
        };
        (String::from_utf8_lossy(&bytes).into_owned(), bytes)
    }
}

/// A token's log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scored {
    pub token: String,
    pub bytes: Vec<u8>,
    pub logprob: f64,
    /// The likeliest tokens with theirs.
    pub top: Vec<(String, Vec<u8>, f32)>,
    /// Where it begins, in bytes of the text.
    start: usize,
}

/// New of an answer.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Piece {
    pub text: String,
    pub scored: Vec<Scored>,
}

/// See the [module](self).
pub(super) struct Choice {
    speller: Speller,
    /// Tokens that end it and are no text.
    ends: Vec<u32>,
    /// Bytes of text so far.
    text: usize,
    /// Bytes of tokens so far.
    spelled: usize,
    waiting: VecDeque<Scored>,
}

impl Choice {
    pub fn new(speller: Speller, ending: &Ending) -> Choice {
        Choice { speller, ends: ending.tokens.clone(), text: 0, spelled: 0, waiting: VecDeque::new() }
    }

    /// Takes the next token.
    pub fn push(&mut self, token: Token) -> Piece {
        self.text += token.text.len();
        if let Some(logprobs) = token.logprobs.filter(|_| !self.ends.contains(&token.id)) {
            let bytes = self.speller.in_text(token.id);
            let (start, length) = (self.spelled, bytes.len());
            self.spelled += length;
            let top = logprobs.top.iter().map(|&(id, p)| {
                let (name, bytes) = self.speller.name(id);
                (name, bytes, p)
            });
            let (token, logprob, top) = (self.speller.name(token.id).0, logprobs.token, top.collect());
            self.waiting.push_back(Scored { token, bytes, logprob, top, start });
        }
        let mut scored = Vec::new();
        while self.waiting.front().is_some_and(|first| first.start + first.bytes.len() <= self.text) {
            scored.extend(self.waiting.pop_front());
        }
        Piece { text: token.text, scored }
    }

    /// The tokens of which only the beginning is text.
    pub fn finish(&mut self) -> Vec<Scored> {
        let text = self.text;
        self.waiting.drain(..).filter(|scored| scored.start < text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Logprobs;

    fn token(id: u32, text: &str) -> Token {
        let logprobs = Some(Box::new(Logprobs { token: -0.5, top: vec![(id, -0.5), (9, -1.0)] }));
        Token { id, text: text.into(), logprobs }
    }

    /// Tokens without a tokenizer are their numbers, with a space behind each.
    #[test]
    fn log_probabilities_come_with_the_text_of_their_token() {
        let mut choice = Choice::new(Speller { tokenizer: None }, &Ending::at(vec![7]));
        assert_eq!(choice.push(token(12, "12")).scored, [], "its last byte is held back");
        let piece = choice.push(token(3, " 3 "));
        let names: Vec<_> = piece.scored.iter().map(|s| s.token.as_str()).collect();
        assert_eq!(names, ["12 ", "3 "]);
        assert_eq!(piece.scored[1].top[1], ("9 ".into(), b"9 ".to_vec(), -1.0));
        assert_eq!(choice.push(token(7, "")), Piece::default(), "the end of the turn is no text");
    }

    #[test]
    fn tokens_behind_a_stop_string_are_none_of_the_answer() {
        let mut choice = Choice::new(Speller { tokenizer: None }, &Ending::default());
        // The stop string "2 3" ends the answer behind "1".
        assert_eq!(choice.push(token(1, "1 ")).scored.len(), 1);
        assert_eq!(choice.push(token(42, "4")).scored, []);
        assert_eq!(choice.push(token(35, "")).scored, []);
        let rest: Vec<_> = choice.finish().into_iter().map(|s| s.token).collect();
        assert_eq!(rest, ["42 "], "a part of it is text");
    }
}
