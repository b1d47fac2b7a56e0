//! A tokenizer's tokens as llguidance sees them: bytes in a trie.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use super::super::Tokenizer;
use super::super::calls::MARKERS;

/// The tokens of a model with `vocab` of them. Control tokens are no text; [`MARKERS`] are, whatever the vocabulary calls them.
pub(super) fn environment(tokenizer: &Tokenizer, vocab: usize) -> TokEnv {
    let known = vocab.min(tokenizer.vocab_size());
    let mut words: Vec<Vec<u8>> = (0..known as u32).map(|id| bytes(tokenizer, id)).collect();
    // Rows of the model without a token are never allowed.
    words.resize(vocab, Vec::new());
    let mut ends: Vec<u32> = tokenizer.end_of_generation().filter(|&id| (id as usize) < vocab).collect();
    ends.sort_unstable();
    if ends.is_empty() {
        // A token that no model has, for answers that may end but need not.
        ends.push(words.len() as u32);
        words.push(special("<|end of the answer|>"));
    }
    let info = TokRxInfo::new(words.len() as u32, ends[0]);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
    Arc::new(ApproximateTokEnv::new(trie))
}

fn bytes(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    if tokenizer.is_special(id) || tokenizer.is_eog(id) {
        let text = tokenizer.token_text(id).unwrap_or_default();
        return if MARKERS.contains(&&*text) { text.into_bytes() } else { special(&text) };
    }
    let bytes = tokenizer.token_bytes(id);
    // No text has this byte, which marks what is none.
    if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) { Vec::new() } else { bytes }
}

/// A word that no text matches.
fn special(text: &str) -> Vec<u8> {
    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    word.extend_from_slice(text.as_bytes());
    word
}
