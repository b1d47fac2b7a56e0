//! SentencePiece-style merging: of all adjacent pairs whose union is a token, merge the one whose
//! token scores highest, until none is left; text that is then no token falls back to its bytes.
//!
//! There is no merge table and no pre-tokeniser: any split of a token may lead to it, and merges
//! cross words. Ties go to the leftmost pair.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::fallback::Fallback;
use super::vocab::Vocab;
use crate::{Error, Result};

/// The character for a space in the vocabulary.
pub const SPACE: &str = "\u{2581}";

/// Scores and byte tokens of a SentencePiece vocabulary.
#[derive(Debug)]
pub struct Spm {
    scores: Vec<f32>,
    fallback: Fallback,
}

/// A pair that could merge. `len` reveals a stale candidate, whose sides have grown since.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    len: u32,
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Candidate {}
impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        // `check_scores` rejects NaN, so scores are totally ordered; -0.0 and 0.0 are equal here.
        let by_score = self.score.partial_cmp(&other.score).expect("scores are not NaN");
        by_score.then(other.left.cmp(&self.left))
    }
}

#[derive(Debug, Clone, Copy)]
struct Symbol {
    start: u32,
    /// Zero once merged into its left neighbour.
    len: u32,
    prev: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;

impl Spm {
    /// A model with the checked `scores` of `vocab`. `unknown` stands for text without a token.
    pub fn new(vocab: &Vocab, scores: &[f32], unknown: Option<u32>) -> Spm {
        Spm { scores: scores.to_vec(), fallback: Fallback::new(vocab, unknown) }
    }

    /// Appends the tokens of `text` (spaces already written as [`SPACE`]) to `out`.
    pub fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) -> Result<()> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        for (start, c) in text.char_indices() {
            let at = symbols.len() as u32;
            symbols.push(Symbol {
                start: start as u32,
                len: c.len_utf8() as u32,
                prev: at.wrapping_sub(1),
                next: at + 1,
            });
        }
        let Some(last) = symbols.last_mut() else { return Ok(()) };
        last.next = NONE;

        let mut heap = BinaryHeap::new();
        let offer = |symbols: &[Symbol], heap: &mut BinaryHeap<Candidate>, left: u32, right: u32| {
            let (l, r) = (symbols[left as usize], symbols[right as usize]);
            let len = l.len + r.len;
            if let Some(id) = vocab.id(&text[l.start as usize..(l.start + len) as usize]) {
                heap.push(Candidate { score: self.scores[id as usize], left, right, len });
            }
        };
        for at in 1..symbols.len() as u32 {
            offer(&symbols, &mut heap, at - 1, at);
        }
        while let Some(Candidate { left, right, len, .. }) = heap.pop() {
            let (l, r) = (symbols[left as usize], symbols[right as usize]);
            if l.len == 0 || r.len == 0 || l.len + r.len != len {
                continue;
            }
            symbols[left as usize].len = len;
            symbols[left as usize].next = r.next;
            symbols[right as usize].len = 0;
            if r.next != NONE {
                symbols[r.next as usize].prev = left;
                offer(&symbols, &mut heap, left, r.next);
            }
            if l.prev != NONE {
                offer(&symbols, &mut heap, l.prev, left);
            }
        }
        let mut at = 0;
        let mut after_unknown = false;
        while at != NONE {
            let Symbol { start, len, next, .. } = symbols[at as usize];
            let piece = &text[start as usize..(start + len) as usize];
            match vocab.id(piece) {
                Some(id) => {
                    out.push(id);
                    after_unknown = false;
                }
                None => self.fallback.push(piece, &mut after_unknown, out)?,
            }
            at = next;
        }
        Ok(())
    }
}

/// Checks that each token has a score, and that it is a number.
pub(super) fn check_scores(vocab: &Vocab, scores: &[f32]) -> Result<()> {
    let bad = |problem: String| Error::format("tokenizer.ggml.scores", problem);
    if scores.len() != vocab.len() {
        return Err(bad(format!("{} scores for {} tokens", scores.len(), vocab.len())));
    }
    match scores.iter().position(|s| s.is_nan()) {
        Some(id) => Err(bad(format!("the score of token {id} is not a number"))),
        None => Ok(()),
    }
}

/// At most 40 characters of a text that may be hostile, for an error message.
pub(super) fn clip(text: &str) -> String {
    text.chars().take(40).collect()
}
