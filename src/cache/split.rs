//! The pages of one sequence on two sides: the older tokens on the host, the newer ones on a device.
//!
//! ```text
//! token   0 ……………………… boundary ……………………… len
//!         │ host pages │ device pages │        the boundary is a multiple of the page
//! ```
//!
//! Moving the boundary returns a list of [`PageCopy`]s. The caller copies these pages and reports the end of the
//! copies. Until then no other sequence can take a page of the list, even if this sequence is freed: the copy reads the
//! old pages and writes the new ones.

use super::{KvGeometry, PAGE_TOKENS, PageList};
use crate::Result;

/// A page to copy from one side to the other, in all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The page on the device.
    pub device: u32,
    /// The page on the host.
    pub host: u32,
    /// Tokens stored in it, from its first slot on.
    pub tokens: usize,
}

impl PageCopy {
    /// Records that these copies have ended, and frees pages that have no owner.
    ///
    /// # Panics
    /// If they are not in flight.
    pub fn finish(moves: &[PageCopy], device: &mut PageList, host: &mut PageList) {
        for m in moves {
            device.copy_ended(m.device);
            host.copy_ended(m.host);
        }
    }
}

/// See the [module](self). As a [`BlockTable`](super::BlockTable), it must be [`free`](SplitTable::free)d.
#[derive(Debug)]
pub struct SplitTable {
    host: Vec<u32>,
    device: Vec<u32>,
    len: usize,
    /// Whether new tokens go to the host; then no page is on the device.
    on_host: bool,
}

impl SplitTable {
    /// An empty table that stores tokens on the device.
    pub fn on_device() -> SplitTable {
        SplitTable { host: Vec::new(), device: Vec::new(), len: 0, on_host: false }
    }

    /// An empty table that stores tokens on the host.
    pub fn on_host() -> SplitTable {
        SplitTable { on_host: true, ..SplitTable::on_device() }
    }

    /// Pages on the host, which hold the tokens before the boundary, from position 0 on.
    pub fn host_pages(&self) -> &[u32] {
        &self.host
    }

    /// Pages on the device, which hold the tokens from the boundary on. There may be room for more tokens than are
    /// stored.
    pub fn device_pages(&self) -> &[u32] {
        &self.device
    }

    /// The first token that is not on the host, at the beginning of a page; beyond the last token if all are on the
    /// host.
    pub fn boundary(&self) -> usize {
        self.host.len() * PAGE_TOKENS
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether new tokens are stored on the host.
    pub fn grows_on_host(&self) -> bool {
        self.on_host
    }

    /// Number of full pages on the device, which [`SplitTable::evict`] can move.
    pub fn n_evictable(&self) -> usize {
        self.len.saturating_sub(self.boundary()) / PAGE_TOKENS
    }

    /// Makes room for `n_tokens` after the stored ones, on the side where the sequence grows.
    ///
    /// # Errors
    /// If there are not enough free pages there; nothing is changed then.
    pub fn reserve(&mut self, device: &mut PageList, host: &mut PageList, n_tokens: usize) -> Result<()> {
        let have = self.host.len() + self.device.len();
        let want = KvGeometry::pages_for(self.len + n_tokens).saturating_sub(have);
        let (pages, list) = if self.on_host { (&mut self.host, host) } else { (&mut self.device, device) };
        pages.extend(take(list, want)?);
        Ok(())
    }

    /// Counts `n_tokens` more as stored: their keys and values have been appended.
    ///
    /// # Panics
    /// If they were not [`reserve`](SplitTable::reserve)d.
    pub fn advance(&mut self, n_tokens: usize) {
        let (len, pages) = (self.len + n_tokens, self.host.len() + self.device.len());
        assert!(len <= pages * PAGE_TOKENS, "{len} tokens in {pages} pages of {PAGE_TOKENS}");
        self.len = len;
    }

    /// Moves the boundary up by `n` pages: the oldest pages on the device, all full, go to the host.
    ///
    /// # Errors
    /// If there are not enough free pages on the host; nothing is changed then.
    ///
    /// # Panics
    /// If fewer pages are [evictable](SplitTable::n_evictable).
    pub fn evict(&mut self, device: &mut PageList, host: &mut PageList, n: usize) -> Result<Vec<PageCopy>> {
        assert!(n <= self.n_evictable(), "{n} pages to evict, {} are full", self.n_evictable());
        self.move_up(device, host, n)
    }

    /// Moves all pages to the host, including a last one that is not full; new tokens also go there.
    ///
    /// # Errors
    /// As [`SplitTable::evict`].
    pub fn swap_out(&mut self, device: &mut PageList, host: &mut PageList) -> Result<Vec<PageCopy>> {
        let stored = KvGeometry::pages_for(self.len).saturating_sub(self.host.len());
        let moves = self.move_up(device, host, stored)?;
        // Reserved room without tokens is not worth a copy.
        self.device.drain(..).for_each(|page| device.free(page));
        self.on_host = true;
        Ok(moves)
    }

    fn move_up(&mut self, device: &mut PageList, host: &mut PageList, n: usize) -> Result<Vec<PageCopy>> {
        let first = self.host.len();
        let to = take(host, n)?;
        let moves: Vec<PageCopy> = to
            .iter()
            .zip(self.device.drain(..n))
            .enumerate()
            .map(|(i, (&host, device))| PageCopy { device, host, tokens: tokens_of(self.len, first + i) })
            .collect();
        self.host.extend(to);
        for m in &moves {
            device.copy_begins(m.device);
            host.copy_begins(m.host);
            device.free(m.device);
        }
        Ok(moves)
    }

    /// Moves the boundary down by `n` pages: the newest pages on the host go to the device, where new tokens are stored
    /// from now on.
    ///
    /// # Errors
    /// If there are not enough free pages on the device; nothing is changed then.
    ///
    /// # Panics
    /// If fewer pages are on the host, or if `n` is 0 for a sequence that grows on the host and whose last page is not
    /// full.
    pub fn recall(&mut self, device: &mut PageList, host: &mut PageList, n: usize) -> Result<Vec<PageCopy>> {
        let stored = KvGeometry::pages_for(self.len).min(self.host.len());
        let rest = stored.checked_sub(n).expect("as many pages on the host as are recalled");
        assert!(n > 0 || !self.on_host || self.len.is_multiple_of(PAGE_TOKENS), "the last page is not full");
        let to = take(device, n)?;
        self.host.drain(stored..).for_each(|page| host.free(page));
        let moves: Vec<PageCopy> = to
            .iter()
            .zip(self.host.drain(rest..))
            .enumerate()
            .map(|(i, (&device, host))| PageCopy { device, host, tokens: tokens_of(self.len, rest + i) })
            .collect();
        self.device.splice(..0, to);
        self.on_host = false;
        for m in &moves {
            device.copy_begins(m.device);
            host.copy_begins(m.host);
            host.free(m.host);
        }
        Ok(moves)
    }

    /// Moves all pages to the device; new tokens also go there.
    ///
    /// # Errors
    /// As [`SplitTable::recall`].
    pub fn swap_in(&mut self, device: &mut PageList, host: &mut PageList) -> Result<Vec<PageCopy>> {
        self.recall(device, host, KvGeometry::pages_for(self.len).min(self.host.len()))
    }

    /// Undoes the last [`evict`](SplitTable::evict) or [`swap_out`](SplitTable::swap_out) after its copies failed (none
    /// is in flight any more): the pages on the device are still valid, and no other sequence can have taken them.
    ///
    /// # Panics
    /// If the sequence's newest host pages are not those that `moves` went to.
    pub fn undo_evict(&mut self, device: &mut PageList, host: &mut PageList, moves: &[PageCopy]) {
        if moves.is_empty() {
            return;
        }
        // There may be room reserved since the pages left; the failed copies are of the last pages that hold tokens.
        let stored = KvGeometry::pages_for(self.len).min(self.host.len());
        self.host.drain(stored..).for_each(|page| host.free(page));
        let rest = self.host.len().checked_sub(moves.len()).expect("the pages moved");
        let same = self.host[rest..].iter().zip(moves).all(|(&page, m)| page == m.host);
        assert!(same, "not the last pages moved of this sequence");
        self.host.truncate(rest);
        self.device.splice(..0, moves.iter().map(|m| m.device));
        self.on_host = false;
        for m in moves {
            device.unfree(m.device);
            host.free(m.host);
        }
        PageCopy::finish(moves, device, host);
    }

    /// Undoes the last [`recall`](SplitTable::recall) after its copies failed: the pages on the host are still valid.
    ///
    /// # Panics
    /// If the sequence's oldest device pages are not those that `moves` went to.
    pub fn undo_recall(&mut self, device: &mut PageList, host: &mut PageList, moves: &[PageCopy]) {
        if moves.is_empty() {
            return;
        }
        let same = self.device.iter().zip(moves).all(|(&page, m)| page == m.device);
        assert!(same && self.device.len() >= moves.len(), "not the last pages moved of this sequence");
        self.device.drain(..moves.len());
        self.host.extend(moves.iter().map(|m| m.host));
        for m in moves {
            host.unfree(m.host);
            device.free(m.device);
        }
        PageCopy::finish(moves, device, host);
        if self.boundary() > self.len {
            self.grow_on_host(device);
        }
    }

    /// Lets the sequence grow on the host again, where all of its pages are. Completes the undoing of a
    /// [`swap_in`](SplitTable::swap_in) of a sequence that grew there.
    ///
    /// # Panics
    /// If a page with tokens is on the device.
    pub fn grow_on_host(&mut self, device: &mut PageList) {
        assert!(self.boundary() >= self.len, "tokens from {} on are on the device", self.boundary());
        self.device.drain(..).for_each(|page| device.free(page));
        self.on_host = true;
    }

    /// Appends a full page of another sequence that this one now holds, too, on the side where it grows.
    ///
    /// # Panics
    /// If the pages so far are not full.
    pub fn adopt(&mut self, page: u32) {
        let pages = self.host.len() + self.device.len();
        assert_eq!(self.len, pages * PAGE_TOKENS, "a page behind one that is not full");
        if self.on_host {
            self.host.push(page)
        } else {
            self.device.push(page)
        }
        self.len += PAGE_TOKENS;
    }

    /// Forgets all tokens from position `len` on, and frees the pages that then hold none. If the last remaining page
    /// is on the host and not full, the sequence grows there from now on.
    ///
    /// # Panics
    /// If that cuts a page that other sequences hold, too.
    pub fn truncate(&mut self, device: &mut PageList, host: &mut PageList, len: usize) {
        let cut = len < self.len && !len.is_multiple_of(PAGE_TOKENS);
        self.len = self.len.min(len);
        let pages = KvGeometry::pages_for(self.len);
        let on_device = pages.saturating_sub(self.host.len());
        self.device.drain(on_device..).for_each(|page| device.free(page));
        let on_host = pages.min(self.host.len());
        self.host.drain(on_host..).for_each(|page| host.free(page));
        match (self.device.last(), self.host.last()) {
            (Some(&last), _) if cut => device.cut(last),
            (None, Some(&last)) if cut => host.cut(last),
            _ => {}
        }
        self.on_host |= self.boundary() > self.len;
    }

    /// Frees all pages.
    pub fn free(&mut self, device: &mut PageList, host: &mut PageList) {
        self.truncate(device, host, 0);
    }
}

/// Tokens in page `page` of a sequence of `len`.
fn tokens_of(len: usize, page: usize) -> usize {
    (len - page * PAGE_TOKENS).min(PAGE_TOKENS)
}

/// Takes `n` pages, or none.
fn take(list: &mut PageList, n: usize) -> Result<Vec<u32>> {
    if n > list.n_free() {
        return Err(list.exhausted(n));
    }
    (0..n).map(|_| list.alloc()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::KvType;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const G: KvGeometry = KvGeometry { n_layers: 2, n_kv_heads: 1, head_dim: 16, dtype: KvType::BF16 };

    fn lists(device: usize, host: usize) -> (PageList, PageList) {
        (PageList::new(G, device).unwrap(), PageList::new(G, host).unwrap())
    }

    #[test]
    fn the_oldest_full_pages_leave_first_and_wait_for_their_copy() {
        let (mut device, mut host) = lists(4, 4);
        let mut t = SplitTable::on_device();
        t.reserve(&mut device, &mut host, 100).unwrap();
        t.advance(100);
        let before = t.device_pages().to_vec();
        assert_eq!((t.boundary(), t.n_evictable()), (0, 3));
        let moves = t.evict(&mut device, &mut host, 2).unwrap();
        assert_eq!(moves.iter().map(|m| m.device).collect::<Vec<_>>(), before[..2]);
        assert_eq!(moves.iter().map(|m| m.host).collect::<Vec<_>>(), t.host_pages());
        assert!(moves.iter().all(|m| m.tokens == PAGE_TOKENS));
        assert_eq!((t.boundary(), t.device_pages()), (64, &before[2..]));
        assert_eq!((device.n_free(), device.n_waiting()), (0, 2), "the copy reads them still");
        t.reserve(&mut device, &mut host, 40).expect_err("no free page yet");
        PageCopy::finish(&moves, &mut device, &mut host);
        assert_eq!((device.n_free(), device.n_waiting()), (2, 0));
        t.reserve(&mut device, &mut host, 40).unwrap();
        assert_eq!(t.device_pages().len(), 3);
    }

    #[test]
    fn a_sequence_swapped_out_takes_its_last_tokens_along_and_grows_on_the_host() {
        let (mut device, mut host) = lists(4, 4);
        let mut t = SplitTable::on_device();
        t.reserve(&mut device, &mut host, 90).unwrap();
        t.advance(40);
        let moves = t.swap_out(&mut device, &mut host).unwrap();
        assert_eq!(moves.iter().map(|m| m.tokens).collect::<Vec<_>>(), [32, 8]);
        assert_eq!((device.n_free(), device.n_waiting()), (2, 2), "what held no token is free at once");
        t.reserve(&mut device, &mut host, 30).unwrap();
        t.advance(30);
        assert_eq!((t.host_pages().len(), t.device_pages().len(), t.grows_on_host()), (3, 0, true));
        PageCopy::finish(&moves, &mut device, &mut host);
        let back = t.recall(&mut device, &mut host, 2).unwrap();
        assert_eq!(back.iter().map(|m| m.tokens).collect::<Vec<_>>(), [32, 6]);
        assert_eq!((t.boundary(), t.device_pages().len(), t.grows_on_host()), (32, 2, false));
    }

    #[test]
    fn a_sequence_cut_inside_its_host_pages_grows_there() {
        let (mut device, mut host) = lists(4, 4);
        let mut t = SplitTable::on_device();
        t.reserve(&mut device, &mut host, 128).unwrap();
        t.advance(128);
        let moves = t.evict(&mut device, &mut host, 3).unwrap();
        PageCopy::finish(&moves, &mut device, &mut host);
        t.truncate(&mut device, &mut host, 64);
        assert_eq!((t.boundary(), t.grows_on_host()), (64, false), "the last page is full");
        t.truncate(&mut device, &mut host, 50);
        assert_eq!((t.boundary(), t.grows_on_host()), (64, true));
        t.reserve(&mut device, &mut host, 14).unwrap();
        assert_eq!(t.host_pages().len(), 2, "there was room");
        t.free(&mut device, &mut host);
        assert_eq!((device.n_free(), host.n_free()), (4, 4));
    }

    #[test]
    fn a_copy_that_failed_leaves_everything_as_it_was() {
        let (mut device, mut host) = lists(4, 4);
        let mut t = SplitTable::on_device();
        t.reserve(&mut device, &mut host, 128).unwrap();
        t.advance(128);
        let before = t.device_pages().to_vec();
        let moves = t.evict(&mut device, &mut host, 2).unwrap();
        t.undo_evict(&mut device, &mut host, &moves);
        assert_eq!((t.device_pages(), t.boundary()), (&before[..], 0));
        assert_eq!((device.n_waiting(), host.n_free(), host.n_waiting()), (0, 4, 0));
    }

    #[test]
    #[should_panic(expected = "no copy of page")]
    fn a_move_that_is_reported_twice_is_caught() {
        let (mut device, mut host) = lists(2, 2);
        let mut t = SplitTable::on_device();
        t.reserve(&mut device, &mut host, 32).unwrap();
        t.advance(32);
        let moves = t.evict(&mut device, &mut host, 1).unwrap();
        PageCopy::finish(&moves, &mut device, &mut host);
        PageCopy::finish(&moves, &mut device, &mut host);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Grow(usize, usize),
        Evict(usize, usize),
        SwapOut(usize),
        Recall(usize, usize),
        Truncate(usize, usize),
        Free(usize),
        /// The oldest copies in flight end.
        Finish,
        /// The newest fail, if they can be taken back.
        Fail,
    }

    fn op() -> impl Strategy<Value = Op> {
        let seq = || 0..3usize;
        prop_oneof![
            5 => (seq(), 0..100usize).prop_map(|(s, n)| Op::Grow(s, n)),
            4 => (seq(), 0..4usize).prop_map(|(s, n)| Op::Evict(s, n)),
            1 => seq().prop_map(Op::SwapOut),
            2 => (seq(), 1..4usize).prop_map(|(s, n)| Op::Recall(s, n)),
            2 => (seq(), 0..200usize).prop_map(|(s, n)| Op::Truncate(s, n)),
            1 => seq().prop_map(Op::Free),
            3 => Just(Op::Finish),
            1 => Just(Op::Fail),
        ]
    }

    proptest! {
        #[test]
        fn pages_are_conserved_and_none_is_reused_while_a_copy_needs_it(
            ops in prop::collection::vec(op(), 0..80),
            n_device in 0..12usize,
            n_host in 0..12usize,
        ) {
            let (mut device, mut host) = lists(n_device, n_host);
            let mut tables = [SplitTable::on_device(), SplitTable::on_device(), SplitTable::on_host()];
            let mut lens = [0usize; 3];
            let mut flying: Vec<Vec<PageCopy>> = Vec::new();
            // The newest moves, if their sequence has not changed since: the sequence, and whether they went to the
            // host.
            let mut undoable: Option<(usize, bool)> = None;
            for op in ops {
                let before: Vec<_> = tables.iter().map(|t| (t.host.clone(), t.device.clone())).collect();
                let mut undo = None;
                let mut moved = None;
                let mut refused = None;
                match op {
                    Op::Grow(s, n) => match tables[s].reserve(&mut device, &mut host, n) {
                        Ok(()) => {
                            tables[s].advance(n);
                            lens[s] += n;
                        }
                        Err(_) => refused = Some(s),
                    },
                    Op::Evict(s, n) => {
                        let n = n.min(tables[s].n_evictable());
                        match tables[s].evict(&mut device, &mut host, n) {
                            Ok(moves) => (moved, undo) = (Some(moves), Some((s, true))),
                            Err(_) => refused = Some(s),
                        }
                    }
                    Op::SwapOut(s) => match tables[s].swap_out(&mut device, &mut host) {
                        Ok(moves) => (moved, undo) = (Some(moves), Some((s, true))),
                        Err(_) => refused = Some(s),
                    },
                    Op::Recall(s, n) if n <= KvGeometry::pages_for(lens[s]).min(tables[s].host.len()) => {
                        match tables[s].recall(&mut device, &mut host, n) {
                            Ok(moves) => (moved, undo) = (Some(moves), Some((s, false))),
                            Err(_) => refused = Some(s),
                        }
                    }
                    Op::Recall(..) => {}
                    Op::Truncate(s, n) => {
                        tables[s].truncate(&mut device, &mut host, n);
                        lens[s] = lens[s].min(n);
                    }
                    Op::Free(s) => {
                        tables[s].free(&mut device, &mut host);
                        lens[s] = 0;
                    }
                    Op::Finish if !flying.is_empty() => {
                        PageCopy::finish(&flying.remove(0), &mut device, &mut host);
                    }
                    Op::Fail if undoable.is_some() && !flying.is_empty() => {
                        let moves = flying.pop().expect("not empty");
                        let (s, evicted) = undoable.expect("checked");
                        match evicted {
                            true => tables[s].undo_evict(&mut device, &mut host, &moves),
                            false => tables[s].undo_recall(&mut device, &mut host, &moves),
                        }
                    }
                    Op::Finish | Op::Fail => {}
                }
                if let Some(s) = refused {
                    let now = (tables[s].host.clone(), tables[s].device.clone());
                    prop_assert_eq!(&now, &before[s], "a refusal changes nothing");
                }
                let moved = moved.filter(|m| !m.is_empty());
                undoable = undo.filter(|_| moved.is_some());
                flying.extend(moved);
                for (side, list, n_pages) in [(0, &device, n_device), (1, &host, n_host)] {
                    let of = |t: &SplitTable| if side == 0 { t.device.clone() } else { t.host.clone() };
                    let held: Vec<u32> = tables.iter().flat_map(of).collect();
                    let distinct: HashSet<u32> = held.iter().copied().collect();
                    prop_assert_eq!(distinct.len(), held.len(), "a page has two owners");
                    prop_assert_eq!(held.len() + list.n_free() + list.n_waiting(), n_pages);
                    // A page that a copy in flight reads or writes belongs to the sequence that moved it, or to none.
                    let copied = flying.iter().flatten().map(|m| if side == 0 { m.device } else { m.host });
                    let abandoned = copied.collect::<HashSet<u32>>();
                    let waiting = abandoned.iter().filter(|p| !distinct.contains(p)).count();
                    prop_assert_eq!(waiting, list.n_waiting(), "pages wait for copies and nothing else");
                }
                for (t, &len) in tables.iter().zip(&lens) {
                    prop_assert_eq!(t.len(), len);
                    prop_assert!((t.host.len() + t.device.len()) * PAGE_TOKENS >= len);
                    prop_assert!(!t.on_host || t.device.is_empty(), "a sequence that grows on the host is there");
                    prop_assert!(t.on_host || t.boundary() <= len, "host pages are full but where it grows");
                }
            }
            flying.iter().for_each(|m| PageCopy::finish(m, &mut device, &mut host));
            tables.iter_mut().for_each(|t| t.free(&mut device, &mut host));
            prop_assert_eq!((device.n_free(), host.n_free()), (n_device, n_host));
        }
    }
}
