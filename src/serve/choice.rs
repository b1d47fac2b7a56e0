//! An answer in the making: the parts of its text, and the log-probabilities of the tokens that are that text.
//!
//! A token's text may come with a later token, when a character or what could be a stop string is complete, or never,
//! behind a stop string. Its log-probabilities come with its text: joined, the tokens' bytes are the text.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::engine::Token;
use crate::text::{self, CallFormat, Channels, Ending, Reader, Texts, Tokenizer};

/// Spells tokens: as the text of an answer has them, and by name.
#[derive(Clone)]
pub(super) struct Speller {
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Control tokens that are text.
    pub shown: Arc<[u32]>,
}

impl Speller {
    /// The bytes that a token is in the text of an answer; none for tokens that steer the model.
    fn in_text(&self, id: u32) -> Vec<u8> {
        match &self.tokenizer {
            None => format!("{id} ").into_bytes(),
            Some(t) if (t.is_special(id) || t.is_eog(id)) && !self.shown.contains(&id) => Vec::new(),
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

    /// Tokens with their log-probabilities.
    pub fn names(&self, top: &[(u32, f64)]) -> Vec<(String, Vec<u8>, f64)> {
        let named = |&(id, p): &(u32, f64)| {
            let (name, bytes) = self.name(id);
            (name, bytes, p)
        };
        top.iter().map(named).collect()
    }

    /// Whether a token steers the model: it may be in a text or not.
    pub fn steers(&self, id: u32) -> bool {
        self.tokenizer.as_ref().is_some_and(|t| t.is_special(id) || t.is_eog(id))
    }
}

/// A token's log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scored {
    pub token: String,
    pub bytes: Vec<u8>,
    /// None of the first token of a prompt, which follows nothing.
    pub logprob: Option<f64>,
    /// The likeliest tokens with theirs.
    pub top: Vec<(String, Vec<u8>, f64)>,
    /// Where it begins in the text, in characters; `None`: behind the token before it.
    pub offset: Option<usize>,
    /// Where it begins, in bytes of the text.
    pub(super) start: usize,
}

/// How the text of an answer is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Reading {
    /// How calls are written, if there may be any.
    pub format: Option<CallFormat>,
    /// Parameters whose values are texts, where arguments are elements.
    pub texts: Texts,
    /// Whether it may begin with reasoning.
    pub thinks: bool,
    /// Whether the prompt has begun the reasoning.
    pub begun: bool,
    /// Its channels, if it comes in such.
    pub channels: Option<Channels>,
    /// Makes ids of calls those of this request.
    pub salt: u64,
    /// Whether each token is told that has log-probabilities, also one that ends the answer or of which no character is complete: the
    /// lists of text completions have as many entries as there are tokens. Only those behind a stop string are left out.
    pub lists: bool,
}

/// A part of a call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Call {
    /// Its number in the answer.
    pub index: usize,
    /// Its id and the function's name, where it begins.
    pub begins: Option<(String, String)>,
    /// More of its arguments.
    pub arguments: String,
}

/// New of an answer.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Piece {
    pub text: String,
    pub reasoning: String,
    pub calls: Vec<Call>,
    pub scored: Vec<Scored>,
}

/// What splits an answer into its parts: by its text, or by its tokens.
enum Split {
    Text(Reader),
    Channels(Channels),
}

/// See the [module](self).
pub(super) struct Choice {
    speller: Speller,
    /// Tokens that end it and are no text.
    ends: Vec<u32>,
    /// Whether it ended at one.
    ended: bool,
    lists: bool,
    /// Bytes of text so far.
    text: usize,
    /// Bytes of tokens so far.
    spelled: usize,
    waiting: VecDeque<Scored>,
    reader: Split,
    format: Option<CallFormat>,
    /// Makes ids of calls those of this answer.
    salt: u64,
}

impl Choice {
    /// Answer `index` of a request.
    pub fn new(speller: Speller, ending: &Ending, reading: &Reading, index: usize) -> Choice {
        let Reading { format, thinks, begun, salt, lists, .. } = *reading;
        let reader = match &reading.channels {
            Some(channels) => Split::Channels(channels.clone()),
            None => Split::Text(Reader::new(format, thinks, begun).with_texts(reading.texts.clone())),
        };
        let ends = ending.tokens.clone();
        // The golden ratio spreads successive numbers.
        let salt = salt.wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (waiting, ended) = (VecDeque::new(), false);
        Choice { speller, ends, ended, lists, text: 0, spelled: 0, waiting, reader, format, salt }
    }

    /// Whether functions are called.
    pub fn has_calls(&self) -> bool {
        match &self.reader {
            Split::Text(reader) => reader.calls() > 0,
            Split::Channels(channels) => channels.calls() > 0,
        }
    }

    fn piece(&self, parts: Vec<text::Part>, scored: Vec<Scored>) -> Piece {
        let mut piece = Piece { scored, ..Piece::default() };
        for part in parts {
            match part {
                text::Part::Content(text) => piece.text += &text,
                text::Part::Reasoning(text) => piece.reasoning += &text,
                text::Part::Call(index, name) => {
                    let number = self.salt.rotate_left(32).wrapping_mul(2 * index as u64 + 1);
                    let begins = Some((call_id(self.format, number), name));
                    piece.calls.push(Call { index, begins, arguments: String::new() });
                }
                text::Part::Arguments(index, text) => match piece.calls.last_mut() {
                    Some(call) if call.index == index => call.arguments += &text,
                    _ => piece.calls.push(Call { index, begins: None, arguments: text }),
                },
            }
        }
        piece
    }

    /// Takes the next token.
    pub fn push(&mut self, token: Token) -> Piece {
        self.text += token.text.len();
        self.ended = self.ends.contains(&token.id);
        if let Some(logprobs) = token.logprobs.filter(|_| self.lists || !self.ended) {
            let bytes = self.speller.in_text(token.id);
            let (start, length) = (self.spelled, bytes.len());
            self.spelled += length;
            let (token, top) = (self.speller.name(token.id).0, self.speller.names(&logprobs.top));
            let logprob = Some(logprobs.token);
            self.waiting.push_back(Scored { token, bytes, logprob, top, offset: None, start });
        }
        let mut scored = Vec::new();
        while self.waiting.front().is_some_and(|first| first.start + first.bytes.len() <= self.text) {
            scored.extend(self.waiting.pop_front());
        }
        let parts = match &mut self.reader {
            Split::Text(reader) => reader.push(&token.text),
            Split::Channels(channels) => channels.push(token.id, &token.text),
        };
        self.piece(parts, scored)
    }

    /// The rest: what was held back, and the tokens of which only the beginning is text. `is_cut`: the answer ends because it may have no
    /// more tokens.
    pub fn finish(&mut self, is_cut: bool) -> Piece {
        let (text, all) = (self.text, self.lists && (is_cut || self.ended));
        let scored = self.waiting.drain(..).filter(|scored| all || scored.start < text).collect();
        let parts = match &mut self.reader {
            Split::Text(reader) => reader.finish(),
            Split::Channels(channels) => channels.finish(),
        };
        self.piece(parts, scored)
    }
}

/// The id of a call: no other call has it. Templates of Mistral want nine letters and digits.
fn call_id(format: Option<CallFormat>, number: u64) -> String {
    match format {
        Some(CallFormat::Mistral | CallFormat::MistralArgs) => {
            let mut left = number;
            let digit = |_| {
                let digit = (left % 36) as u32;
                left /= 36;
                char::from_digit(digit, 36).expect("a digit of base 36")
            };
            (0..9).map(digit).collect()
        }
        _ => format!("call_{number:016x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Logprobs;

    fn token(id: u32, text: &str) -> Token {
        let logprobs = Some(Box::new(Logprobs { token: -0.5, rank: 1, top: vec![(id, -0.5), (9, -1.0)] }));
        Token { id, text: text.into(), logprobs }
    }

    fn choice(ending: Ending) -> Choice {
        let speller = Speller { tokenizer: None, shown: Arc::default() };
        Choice::new(speller, &ending, &Reading::default(), 0)
    }

    /// Tokens without a tokenizer are their numbers, with a space behind each.
    #[test]
    fn log_probabilities_come_with_the_text_of_their_token() {
        let mut choice = choice(Ending::at(vec![7]));
        assert_eq!(choice.push(token(12, "12")).scored, [], "its last byte is held back");
        let piece = choice.push(token(3, " 3 "));
        let names: Vec<_> = piece.scored.iter().map(|s| s.token.as_str()).collect();
        assert_eq!(names, ["12 ", "3 "]);
        assert_eq!(piece.scored[1].top[1], ("9 ".into(), b"9 ".to_vec(), -1.0));
        assert_eq!(choice.push(token(7, "")), Piece::default(), "the end of the turn is no text");
    }

    /// Readers of the lists count: the last entry is the last token that was generated.
    #[test]
    fn lists_have_every_token() {
        let speller = Speller { tokenizer: None, shown: Arc::default() };
        let reading = Reading { lists: true, ..Reading::default() };
        let choice = |ending| Choice::new(speller.clone(), &ending, &reading, 0);
        let mut ends = choice(Ending::at(vec![7]));
        assert_eq!(ends.push(token(12, "12 ")).scored.len(), 1);
        let end: Vec<_> =
            [ends.push(token(7, "")), ends.finish(false)].into_iter().flat_map(|p| p.scored).collect();
        assert_eq!(end.len(), 1, "the token that ends it");
        // A token without a complete character.
        let mut cut = choice(Ending::default());
        assert_eq!(cut.push(token(9, "")).scored, []);
        assert_eq!(cut.finish(true).scored.len(), 1);
        let mut stopped = choice(Ending::default());
        assert_eq!(stopped.push(token(9, "")).scored, []);
        assert_eq!(stopped.finish(false).scored, [], "what a stop string cuts off");
    }

    #[test]
    fn tokens_behind_a_stop_string_are_none_of_the_answer() {
        let mut choice = choice(Ending::default());
        // The stop string "2 3" ends the answer behind "1".
        assert_eq!(choice.push(token(1, "1 ")).scored.len(), 1);
        assert_eq!(choice.push(token(42, "4")).scored, []);
        assert_eq!(choice.push(token(35, "")).scored, []);
        let rest: Vec<_> = choice.finish(false).scored.into_iter().map(|s| s.token).collect();
        assert_eq!(rest, ["42 "], "a part of it is text");
    }
}
