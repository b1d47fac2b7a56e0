//! SentencePiece's unigram model: of all ways to divide a text into tokens, the one whose log-probabilities have the
//! highest sum.
//!
//! One automaton reports every token at every place, in the order of their ends, so that a text takes time in
//! proportion to its length times that of the longest token, and memory in proportion to its length.

use std::sync::OnceLock;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

use super::fallback::Fallback;
use super::special::{Fragment, SpecialTokens};
use super::spm::SPACE;
use super::vocab::{TokenKind, Vocab};
use crate::{Error, Result};

/// How much less likely than the least likely token an unknown character is.
const UNKNOWN_PENALTY: f32 = 10.0;

/// Log-probabilities of a unigram vocabulary, and its treatment of spaces.
#[derive(Debug)]
pub struct Unigram {
    scores: Vec<f32>,
    unknown_score: f32,
    fallback: Fallback,
    /// Whether a space goes in front of the whole text.
    pub add_space_prefix: bool,
    /// Whether rows of spaces become one, and spaces around the text go.
    pub remove_extra_whitespaces: bool,
    matcher: OnceLock<Option<Matcher>>,
}

#[derive(Debug)]
struct Matcher {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

/// The best way to a place in the text: the last token, and where it begins.
#[derive(Debug, Clone, Copy)]
struct Best {
    score: f32,
    start: u32,
    id: u32,
}

const NONE: u32 = u32::MAX;

/// Whether these are the scores of a unigram model. Those of byte-pair merges are ranks: whole numbers.
pub fn is_unigram(vocab: &Vocab, scores: &[f32]) -> bool {
    let normal = |id: usize| vocab.kinds()[id] == TokenKind::Normal;
    let (mut whole, mut parts) = (0, 0);
    for (_, score) in scores.iter().enumerate().filter(|&(id, &s)| normal(id) && s.is_finite()) {
        *if score.fract() == 0.0 { &mut whole } else { &mut parts } += 1;
    }
    parts > whole
}

impl Unigram {
    /// A model with the checked `scores` of `vocab`.
    pub fn new(vocab: &Vocab, scores: &[f32], unknown: Option<u32>) -> Unigram {
        let normal = (0..scores.len()).filter(|&id| vocab.kinds()[id] == TokenKind::Normal);
        let least = normal.map(|id| scores[id]).reduce(f32::min).unwrap_or(0.0);
        Unigram {
            scores: scores.to_vec(),
            unknown_score: least - UNKNOWN_PENALTY,
            fallback: Fallback::new(vocab, unknown),
            add_space_prefix: true,
            remove_extra_whitespaces: false,
            matcher: OnceLock::new(),
        }
    }

    /// Appends the tokens of a whole text to `out`.
    pub fn encode(
        &self,
        vocab: &Vocab,
        special: &SpecialTokens,
        text: &str,
        parse_special: bool,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let mut written = String::new();
        let mut prefix = self.add_space_prefix;
        // Of a row of spaces that become one, the one is written once something follows it.
        let mut after_space = self.remove_extra_whitespaces;
        let mut owed = false;
        special.split(vocab, text, parse_special, |fragment| {
            match fragment {
                Fragment::Token(id) => {
                    let control = vocab.kind(id) != Some(TokenKind::UserDefined);
                    if !control && std::mem::take(&mut prefix) || std::mem::take(&mut owed) {
                        written.push_str(SPACE);
                    }
                    self.segment(vocab, &written, out)?;
                    written.clear();
                    out.push(id);
                    after_space = self.remove_extra_whitespaces && vocab.text(id).ends_with(' ');
                }
                Fragment::Text(text) => {
                    for c in text.chars() {
                        if c == ' ' && self.remove_extra_whitespaces {
                            owed |= !after_space;
                            after_space = true;
                            continue;
                        }
                        after_space = false;
                        if std::mem::take(&mut prefix) {
                            written.push_str(SPACE);
                        }
                        if std::mem::take(&mut owed) {
                            written.push_str(SPACE);
                        }
                        if c == ' ' { written.push_str(SPACE) } else { written.push(c) }
                    }
                }
            }
            Ok(())
        })?;
        self.segment(vocab, &written, out)
    }

    /// Appends the most likely tokens of `text`.
    fn segment(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let matcher = self.matcher.get_or_init(|| Matcher::new(vocab)).as_ref();
        let matcher = matcher.ok_or_else(|| Error::Run("the vocabulary is too large to search".into()))?;
        let mut best = vec![Best { score: 0.0, start: NONE, id: NONE }; text.len() + 1];
        let mut found = matcher.automaton.find_overlapping_iter(text).peekable();
        for (start, c) in text.char_indices() {
            let end = start + c.len_utf8();
            let mut known = false;
            let mut here = Best { score: 0.0, start: NONE, id: NONE };
            while let Some(token) = found.next_if(|token| token.end() <= end) {
                let id = matcher.ids[token.pattern().as_usize()];
                let score = best[token.start()].score + self.scores[id as usize];
                known |= token.start() == start;
                // Of ways that are equally likely, the one with the longest last token.
                let longer = score == here.score && (token.start() as u32) < here.start;
                if here.start == NONE || score > here.score || longer {
                    here = Best { score, start: token.start() as u32, id };
                }
            }
            if !known {
                let score = best[start].score + self.unknown_score;
                if here.start == NONE || score > here.score {
                    here = Best { score, start: start as u32, id: NONE };
                }
            }
            best[end] = here;
        }
        let mut way = Vec::new();
        let mut at = text.len() as u32;
        while at > 0 {
            way.push(at);
            at = best[at as usize].start;
        }
        let mut after_unknown = false;
        for end in way.into_iter().rev() {
            let Best { start, id, .. } = best[end as usize];
            if id == NONE {
                self.fallback.push(&text[start as usize..end as usize], &mut after_unknown, out)?;
            } else {
                out.push(id);
                after_unknown = false;
            }
        }
        Ok(())
    }
}

impl Matcher {
    fn new(vocab: &Vocab) -> Option<Matcher> {
        let ids: Vec<u32> = (0..vocab.len() as u32)
            .filter(|&id| vocab.kinds()[id as usize] == TokenKind::Normal && !vocab.text(id).is_empty())
            .collect();
        // The automaton without failure tables takes memory linear in the patterns, even hostile ones.
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            .kind(Some(AhoCorasickKind::NoncontiguousNFA))
            .build(ids.iter().map(|&id| vocab.text(id)))
            .ok()?;
        Some(Matcher { automaton, ids })
    }
}
