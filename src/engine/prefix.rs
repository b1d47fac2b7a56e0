//! Sequences that begin as earlier ones did: their first pages need not be computed again.

use super::kv::PageChain;
use super::sequences::Engine;
use crate::program::{RequestId, Side};

impl Engine {
    /// Whether full pages of keys and values are kept when their sequences end, for as long as nobody needs the room.
    pub fn keep_prefixes(&mut self, keep: bool) {
        match keep {
            true => drop(self.prefixes.get_or_insert_default()),
            false => self.prefixes = None,
        }
    }

    /// Whether pages are kept.
    pub fn keeps_prefixes(&self) -> bool {
        self.prefixes.is_some()
    }

    /// Pages of ended sequences that are still there, in the list that has the most.
    pub fn kept_pages(&self) -> usize {
        let pages = &self.machine.kv_ref().pages;
        [&pages.host, &pages.device, &pages.far]
            .map(|list| list.n_kept())
            .into_iter()
            .max()
            .unwrap_or_default()
    }

    /// The same on the device and on the host, where a scheduler counts free pages.
    pub(super) fn kept_on_sides(&mut self) -> [usize; 2] {
        let (homes, home) = (self.has_homes(), self.home());
        let pages = &self.machine.kv_ref().pages;
        match (homes, home) {
            (true, _) => [pages.device.n_kept(), pages.far.n_kept()],
            (false, Side::Device) => [pages.device.n_kept(), 0],
            (false, Side::Host) => [0, pages.host.n_kept()],
        }
    }

    /// Lets an empty sequence begin with pages that hold the keys and values of `tokens`, as many as are there. Its length
    /// is then that of the returned pages.
    pub(super) fn begin_with(&mut self, id: RequestId, tokens: &[u32]) -> PageChain {
        let (Some(index), Some(sequence)) = (&self.prefixes, self.sequences.get_mut(id)) else {
            return PageChain::default();
        };
        match sequence.len() {
            0 => index.begin(sequence, &mut self.machine.kv().pages, tokens),
            _ => PageChain::default(),
        }
    }

    /// Remembers a sequence's full pages behind those of `chain`, by its tokens.
    pub(super) fn remember(&mut self, id: RequestId, chain: &mut PageChain, tokens: &[u32]) {
        if let (Some(index), Some(sequence)) = (&mut self.prefixes, self.sequences.get(id)) {
            index.remember(sequence, &mut self.machine.kv().pages, chain, tokens);
        }
    }
}
