//! Pages of earlier sequences, found by the tokens that they and all pages before them hold.
//!
//! ```text
//! tokens  0 …… 31 │ 32 …… 63 │ 64 …
//! key     k1 = H(0, tokens) │ k2 = H(k1, tokens) │ …          H is SHA-256: equal keys are equal tokens from the start on
//! ```
//! Pages without a holder stay where they are until their list needs them ([`PageList`](crate::cache::PageList)): the cache takes no memory
//! that the plan does not have, and nothing is copied to find or to use a page.

use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};

use super::kept::KeptPage;
use super::{KvPages, SequenceKv};
use crate::cache::PAGE_TOKENS;

/// Names a page by all tokens up to its end.
type Key = [u8; 32];

/// The full pages of a sequence from its start on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::engine) struct PageChain {
    key: Key,
    pages: usize,
}

impl PageChain {
    /// Full pages so far.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// With the next page, of the sequence's `tokens`.
    fn next(&self, tokens: &[u32]) -> PageChain {
        let mut hash = Sha256::new();
        hash.update(self.key);
        for token in &tokens[self.pages * PAGE_TOKENS..(self.pages + 1) * PAGE_TOKENS] {
            hash.update(token.to_le_bytes());
        }
        PageChain { key: hash.finalize().into(), pages: self.pages + 1 }
    }
}

/// See the [module](self).
#[derive(Default)]
pub(in crate::engine) struct PrefixIndex {
    pages: FxHashMap<Key, KeptPage>,
    /// The key of each page of each list, so that there are no more keys than pages.
    keys: [FxHashMap<u32, Key>; 3],
}

impl PrefixIndex {
    /// Lets an empty sequence begin with the pages of the longest known beginning of `tokens`.
    pub fn begin(&self, sequence: &mut SequenceKv, pages: &mut KvPages, tokens: &[u32]) -> PageChain {
        let mut chain = PageChain::default();
        for _ in 0..tokens.len() / PAGE_TOKENS {
            let next = chain.next(tokens);
            let Some(kept) = self.pages.get(&next.key) else { break };
            if !sequence.adopt(pages, kept) {
                break;
            }
            chain = next;
        }
        chain
    }

    /// Remembers the full pages of a sequence behind those of `chain`; `tokens` are the sequence's, stored or not.
    pub fn remember(
        &mut self,
        sequence: &SequenceKv,
        pages: &mut KvPages,
        chain: &mut PageChain,
        tokens: &[u32],
    ) {
        while (chain.pages + 1) * PAGE_TOKENS <= sequence.len().min(tokens.len()) {
            let next = chain.next(tokens);
            self.put(next.key, sequence, pages, chain.pages);
            *chain = next;
        }
    }

    /// Remembers a sequence's `i`-th page under `key`, in lists that have no page for it yet.
    fn put(&mut self, key: Key, sequence: &SequenceKv, pages: &mut KvPages, i: usize) {
        let mut known = self.pages.get(&key).copied().unwrap_or_default();
        for (known, list) in known.lists().into_iter().zip([&pages.host, &pages.device, &pages.far]) {
            *known = known.filter(|&page| list.has(page));
        }
        let mut new = sequence.remember(pages, i, &known);
        for ((list, known), new) in known.lists().into_iter().enumerate().zip(new.lists()) {
            let Some(page) = *new else { continue };
            *known = Some(page);
            if let Some(old) = self.keys[list].insert(page.page, key).filter(|old| *old != key) {
                self.forget(list, &old, page.page);
            }
        }
        self.pages.insert(key, known);
    }

    /// A page of a list has other content than the key says.
    fn forget(&mut self, list: usize, key: &Key, page: u32) {
        let Some(kept) = self.pages.get_mut(key) else { return };
        let entry = kept.lists().into_iter().nth(list).expect("three lists");
        *entry = entry.filter(|of| of.page != page);
        if kept.is_empty() {
            self.pages.remove(key);
        }
    }
}
