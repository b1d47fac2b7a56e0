//! The tokens of a prompt with their log-probabilities: of an echoed one as OpenAI has them, with where in its text they are, or as vLLM has
//! them (`prompt_logprobs`).

use serde_json::{Map, Value, json};

use super::choice::{Scored, Speller};
use super::form::LEAST;
use crate::engine::Logprobs;

/// Collects them for an answer: the engine tells them in parts.
pub(super) struct Scoring {
    ids: Vec<u32>,
    scores: Vec<Logprobs>,
}

impl Scoring {
    /// Of a prompt of at least one token.
    pub fn of(ids: Vec<u32>) -> Scoring {
        Scoring { scores: Vec::with_capacity(ids.len() - 1), ids }
    }

    /// Takes the next ones.
    pub fn push(&mut self, scores: Vec<Logprobs>) {
        self.scores.extend(scores);
    }

    /// Whether all are there: of each token but the first, which follows nothing.
    pub fn is_complete(&self) -> bool {
        self.scores.len() + 1 >= self.ids.len()
    }

    /// All tokens, each but the first with its score.
    fn all(&self) -> impl Iterator<Item = (u32, Option<&Logprobs>)> {
        let scores = std::iter::once(None).chain(self.scores.iter().map(Some));
        self.ids.iter().copied().zip(scores)
    }

    /// As vLLM has them: of each token but the first an object by token ids, of itself and of the `k` likeliest.
    pub fn ranked(&self, speller: &Speller, k: usize) -> Value {
        let entry = |id: u32, logprob: f64, rank: usize| json!({ "logprob": logprob.max(LEAST), "rank": rank, "decoded_token": speller.name(id).0 });
        let of = |(id, score): (u32, Option<&Logprobs>)| {
            let Some(score) = score else { return Value::Null };
            let mut entries = Map::new();
            entries.insert(id.to_string(), entry(id, score.token, score.rank));
            for (rank, &(other, logprob)) in (1..).zip(score.top.iter().take(k)) {
                entries.entry(other.to_string()).or_insert_with(|| entry(other, logprob, rank));
            }
            entries.into()
        };
        self.all().map(of).collect()
    }

    /// All tokens with the `k` likeliest beside each. `text` is the prompt as it is put in front of the answer.
    pub fn echoed(&self, speller: &Speller, text: &str, k: usize) -> Vec<Scored> {
        let mut place = Place { text: text.as_bytes(), at: 0, chars: 0 };
        let scored = |(id, score): (u32, Option<&Logprobs>)| {
            let (token, bytes) = speller.name(id);
            let offset = Some(place.of(&bytes, speller.steers(id)));
            let (logprob, top) = match score {
                None => (None, Vec::new()),
                Some(score) => (Some(score.token), speller.names(&score.top[..k.min(score.top.len())])),
            };
            Scored { token, bytes, logprob, top, offset, start: 0 }
        };
        self.all().map(scored).collect()
    }
}

/// A place in a text.
struct Place<'a> {
    text: &'a [u8],
    at: usize,
    /// Characters that begin before it.
    chars: usize,
}

impl Place<'_> {
    /// Where the next token begins, in characters. `steers`: it may be none of the text, as the token that begins a text is.
    fn of(&mut self, token: &[u8], steers: bool) -> usize {
        let rest = &self.text[self.at..];
        // A token that begins inside of a character is at that character.
        let inside = rest.first().is_some_and(|byte| !begins(byte));
        let offset = self.chars - usize::from(inside);
        let word = token.trim_ascii_start();
        let length = if rest.starts_with(token) {
            token.len()
        } else if !word.is_empty() && rest.starts_with(word) {
            // Some tokenizers put a space in front of a text.
            word.len()
        } else if steers {
            0
        } else {
            // Others change a text, as to another form of its characters.
            token.len().min(rest.len())
        };
        self.chars += rest[..length].iter().filter(|byte| begins(byte)).count();
        self.at += length;
        offset
    }
}

/// Whether a byte of UTF-8 begins a character.
fn begins(byte: &u8) -> bool {
    byte & 0xc0 != 0x80
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_characters_of_the_text() {
        let offsets = |text: &str, tokens: &[(&[u8], bool)]| {
            let mut place = Place { text: text.as_bytes(), at: 0, chars: 0 };
            tokens.iter().map(|(token, steers)| place.of(token, *steers)).collect::<Vec<_>>()
        };
        // A beginning that is no text; a character of three tokens; a control token in the text.
        let euro = "€".as_bytes();
        let text = "a €b<e>c";
        let tokens: [(&[u8], bool); 8] = [
            (b"<s>", true),
            (b"a", false),
            (b" \xe2", false),
            (&euro[1..2], false),
            (&euro[2..], false),
            (b"b", false),
            (b"<e>", true),
            (b"c", false),
        ];
        assert_eq!(offsets(text, &tokens), [0, 0, 1, 2, 2, 3, 4, 7]);
        // A space in front that the text does not have, and a token that is longer than the rest.
        assert_eq!(offsets("ab c", &[(b" ab", false), (b" d", false), (b"long", false)]), [0, 2, 4]);
    }
}
