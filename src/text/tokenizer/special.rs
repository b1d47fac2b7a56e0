//! Finds special tokens in text before any other processing: leftmost, then longest.

use std::sync::OnceLock;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

use super::vocab::{TokenKind, Vocab};

/// A fragment of a text: a special token, or the text between two.
#[derive(Debug, PartialEq)]
pub enum Fragment<'t> {
    /// Ordinary text, not empty.
    Text(&'t str),
    /// A special token.
    Token(u32),
}

/// The matchers of one vocabulary, built when first used: one with control tokens, for prompts that a template made,
/// and one with only the added text tokens, for untrusted text.
#[derive(Debug, Default)]
pub struct SpecialTokens {
    with_control: OnceLock<Matcher>,
    without_control: OnceLock<Matcher>,
}

#[derive(Debug)]
struct Matcher {
    automaton: Option<AhoCorasick>,
    ids: Vec<u32>,
}

impl SpecialTokens {
    /// Calls `fragment` with the fragments of `text`, left to right. Control tokens count as
    /// special only if `parse_special`.
    pub fn split<'t>(
        &self,
        vocab: &Vocab,
        text: &'t str,
        parse_special: bool,
        mut fragment: impl FnMut(Fragment<'t>) -> crate::Result<()>,
    ) -> crate::Result<()> {
        let cell = if parse_special { &self.with_control } else { &self.without_control };
        let matcher = cell.get_or_init(|| Matcher::new(vocab, parse_special));
        let mut done = 0;
        for found in matcher.automaton.iter().flat_map(|a| a.find_iter(text)) {
            if found.start() > done {
                fragment(Fragment::Text(&text[done..found.start()]))?;
            }
            fragment(Fragment::Token(matcher.ids[found.pattern().as_usize()]))?;
            done = found.end();
        }
        if done < text.len() {
            fragment(Fragment::Text(&text[done..]))?;
        }
        Ok(())
    }
}

impl Matcher {
    fn new(vocab: &Vocab, control: bool) -> Matcher {
        let wanted = |kind| match kind {
            TokenKind::UserDefined => true,
            TokenKind::Control | TokenKind::Unknown => control,
            _ => false,
        };
        let (ids, texts): (Vec<u32>, Vec<&str>) = (0..vocab.len() as u32)
            .filter(|&id| wanted(vocab.kinds()[id as usize]) && !vocab.text(id).is_empty())
            .map(|id| (id, vocab.text(id)))
            .unzip();
        if texts.is_empty() {
            return Matcher { automaton: None, ids };
        }
        // The automaton without failure tables takes memory linear in the patterns, even hostile ones.
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .kind(Some(AhoCorasickKind::NoncontiguousNFA))
            .build(&texts)
            .ok();
        Matcher { automaton, ids }
    }
}
