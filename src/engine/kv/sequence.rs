//! The pages of one sequence, in layers of both sides.

use super::kept::KeptPage;
use super::{KvPages, Sides};
use crate::Result;
use crate::cache::{BlockTable, PAGE_TOKENS, PageContent, PageCopy, PageList, SplitTable};
use crate::program::{Far, Kv, RequestId, Side};

/// See the [module](self). It must be [`free`](SequenceKv::free)d.
#[derive(Debug)]
pub(in crate::engine) struct SequenceKv {
    /// Pages of layers with keys and values on the host.
    host: Option<BlockTable>,
    /// Pages of layers with keys and values on the device.
    split: Option<SplitTable>,
    len: usize,
    /// Generation of its slot: how often the slot was used before.
    generation: u32,
}

impl SequenceKv {
    /// A sequence without tokens.
    pub fn new(sides: Sides) -> SequenceKv {
        SequenceKv {
            host: sides.host.then(BlockTable::new),
            split: sides.device.then(SplitTable::on_device),
            len: 0,
            generation: 0,
        }
    }

    /// A sequence without tokens that stores new ones on `side` in layers with keys and values on the device.
    pub fn at(sides: Sides, side: Side) -> SequenceKv {
        let split = match side {
            Side::Device => SplitTable::on_device(),
            Side::Host => SplitTable::on_host(),
        };
        SequenceKv { split: sides.device.then_some(split), ..SequenceKv::new(sides) }
    }

    /// The side where new tokens are stored, in layers with keys and values on the device if there are any.
    pub fn side(&self) -> Side {
        match &self.split {
            Some(split) if !split.grows_on_host() => Side::Device,
            _ => Side::Host,
        }
    }

    /// Assigns the sequence to this request.
    pub fn name(&mut self, id: RequestId) {
        self.generation = id.generation;
    }

    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Pages of layers with keys and values on the host, position 0 first.
    pub fn host_pages(&self) -> &[u32] {
        self.host.as_ref().map_or(&[], BlockTable::pages)
    }

    /// Pages on the device, from that of token [`SequenceKv::boundary`] on.
    pub fn device_pages(&self) -> &[u32] {
        self.split.as_ref().map_or(&[], SplitTable::device_pages)
    }

    /// Pages away from the device, position 0 first.
    pub fn far_pages(&self) -> &[u32] {
        self.split.as_ref().map_or(&[], SplitTable::host_pages)
    }

    /// The first token whose page is on the device.
    pub fn boundary(&self) -> usize {
        self.split.as_ref().map_or(0, SplitTable::boundary)
    }

    /// The sequence's keys and values as a group of its tokens states them; `far` says how tokens before the boundary
    /// are attended.
    pub fn kv(&self, far: Far) -> Kv {
        match &self.split {
            Some(t) if t.grows_on_host() => Kv::Host,
            Some(_) if self.boundary() > 0 => Kv::Split { boundary: self.boundary() as u32, far },
            _ => Kv::Device,
        }
    }

    /// Its pages in layers with keys and values on the device.
    pub(super) fn split(&self) -> Option<&SplitTable> {
        self.split.as_ref()
    }

    /// Its pages in layers with keys and values on the device, mutable, for moves.
    pub(super) fn split_mut(&mut self) -> Option<&mut SplitTable> {
        self.split.as_mut()
    }

    /// Makes room for `n_tokens` after the stored ones, in all layers.
    ///
    /// # Errors
    /// If there are not enough free pages of one kind; nothing is changed then.
    pub fn reserve(&mut self, pages: &mut KvPages, n_tokens: usize) -> Result<()> {
        if let Some(host) = &mut self.host {
            host.reserve(&mut pages.host, n_tokens)?;
        }
        let Some(split) = &mut self.split else { return Ok(()) };
        let done = split.reserve(&mut pages.device, &mut pages.far, n_tokens);
        if let (Err(_), Some(host)) = (&done, &mut self.host) {
            host.truncate(&mut pages.host, self.len);
        }
        done
    }

    /// Counts `n_tokens` more as stored.
    ///
    /// # Panics
    /// If they were not [`reserve`](SequenceKv::reserve)d.
    pub fn advance(&mut self, n_tokens: usize) {
        self.len += n_tokens;
        if let Some(host) = &mut self.host {
            host.advance(n_tokens);
        }
        if let Some(split) = &mut self.split {
            split.advance(n_tokens);
        }
    }

    /// Forgets all tokens from position `len` on, and gives back pages without tokens.
    pub fn truncate(&mut self, pages: &mut KvPages, len: usize) {
        self.len = self.len.min(len);
        if let Some(host) = &mut self.host {
            host.truncate(&mut pages.host, len);
        }
        if let Some(split) = &mut self.split {
            split.truncate(&mut pages.device, &mut pages.far, len);
        }
    }

    /// Remembers the pages of its `i`-th 32 tokens, which are full, in lists where no page is `known` for them.
    pub(super) fn remember(&self, pages: &mut KvPages, i: usize, known: &KeptPage) -> KeptPage {
        let mut kept = KeptPage::default();
        if let Some(table) = self.host.as_ref().filter(|_| known.host.is_none()) {
            kept.host = Some(pages.host.remember(table.pages()[i]));
        }
        if let Some(split) = &self.split {
            let far = split.host_pages();
            match i.checked_sub(far.len()) {
                None if known.far.is_none() => kept.far = Some(pages.far.remember(far[i])),
                Some(i) if known.device.is_none() => {
                    kept.device = Some(pages.device.remember(split.device_pages()[i]));
                }
                _ => {}
            }
        }
        kept
    }

    /// Appends pages that other sequences filled, if they are still there for the side where this one lives.
    pub(super) fn adopt(&mut self, pages: &mut KvPages, kept: &KeptPage) -> bool {
        let on_host = self.split.as_ref().is_some_and(SplitTable::grows_on_host);
        let there = if on_host { (kept.far, &mut pages.far) } else { (kept.device, &mut pages.device) };
        let take = |wanted: bool, (page, list): (Option<PageContent>, &mut PageList)| match page {
            _ if !wanted => Some(None),
            Some(page) if list.take(page) => Some(Some(page.page)),
            _ => None,
        };
        let Some(split) = take(self.split.is_some(), there) else { return false };
        let Some(host) = take(self.host.is_some(), (kept.host, &mut pages.host)) else {
            if let Some(page) = split {
                if on_host { pages.far.free(page) } else { pages.device.free(page) }
            }
            return false;
        };
        if let (Some(table), Some(page)) = (&mut self.split, split) {
            table.adopt(page);
        }
        if let (Some(table), Some(page)) = (&mut self.host, host) {
            table.adopt(page);
        }
        self.len += PAGE_TOKENS;
        true
    }

    /// Gives back all pages.
    pub fn free(&mut self, pages: &mut KvPages) {
        self.truncate(pages, 0);
    }

    /// Undoes moves whose copies failed: see [`SplitTable::undo_evict`] and [`SplitTable::undo_recall`].
    /// `grew_on_host`: new tokens went there before the moves.
    pub(super) fn undo(
        &mut self,
        pages: &mut KvPages,
        to_host: bool,
        grew_on_host: bool,
        copies: &[PageCopy],
    ) {
        let Some(split) = &mut self.split else { return };
        match to_host {
            true => split.undo_evict(&mut pages.device, &mut pages.far, copies),
            false => split.undo_recall(&mut pages.device, &mut pages.far, copies),
        }
        if grew_on_host && !split.grows_on_host() {
            split.grow_on_host(&mut pages.device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{KvGeometry, KvType};

    const G: KvGeometry = KvGeometry { n_layers: 2, n_kv_heads: 1, head_dim: 16, dtype: KvType::BF16 };

    #[test]
    fn room_is_made_on_all_sides_or_on_none() {
        let mut pages = KvPages::new(G, 2, 4, 4).unwrap();
        let mut s = SequenceKv::new(Sides { device: true, host: true });
        s.reserve(&mut pages, 65).expect_err("two pages on the device");
        assert_eq!((pages.device.n_free(), pages.host.n_free()), (2, 4));
        s.reserve(&mut pages, 64).unwrap();
        s.advance(64);
        assert_eq!((s.host_pages().len(), s.device_pages().len(), s.far_pages().len()), (2, 2, 0));
        assert_eq!(s.kv(Far::Attend), Kv::Device);
        let moves = s.split_mut().unwrap().evict(&mut pages.device, &mut pages.far, 1).unwrap();
        assert_eq!(s.kv(Far::Stream), Kv::Split { boundary: 32, far: Far::Stream });
        s.undo(&mut pages, true, false, &moves);
        assert_eq!((s.kv(Far::Attend), s.boundary()), (Kv::Device, 0));
        s.truncate(&mut pages, 40);
        assert_eq!((s.len(), s.host_pages().len(), s.device_pages().len()), (40, 2, 2));
        s.free(&mut pages);
        assert_eq!((pages.device.n_free(), pages.far.n_free(), pages.host.n_free()), (2, 4, 4));
    }

    #[test]
    fn a_placement_of_one_side_needs_no_pages_of_the_other() {
        let mut pages = KvPages::new(G, 0, 0, 3).unwrap();
        let mut s = SequenceKv::new(Sides { device: false, host: true });
        s.reserve(&mut pages, 96).unwrap();
        s.advance(96);
        assert_eq!((s.kv(Far::Attend), s.boundary(), s.device_pages().len()), (Kv::Device, 0, 0));
        s.free(&mut pages);
        assert_eq!(pages.host.n_free(), 3);
    }
}
