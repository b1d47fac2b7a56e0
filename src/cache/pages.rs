//! The list of free pages, wherever their memory is.
//!
//! ```text
//!           alloc                 free, by the last holder
//! blank ────────────► held ──────────────────────────────────► blank
//!   ▲                 │  ▲ take (one more holder, too)           (in between it waits for copies of it in flight)
//!   │        remember │  │
//!   │                 ▼  │        free, by the last holder
//!   │                 held, remembered ──────────────────────► kept
//!   └───────────────────────────────────────────── alloc, the least recently used first, when no blank page is left
//! ```
//! A page may have several holders, who only read it; a holder that writes is its only one. What is kept takes no memory
//! of its own: kept pages count as free.

use std::collections::BTreeMap;

use super::{KvGeometry, PAGE_TOKENS};
use crate::{Error, Result};

/// A page with the content that it had when it was [remembered](PageList::remember).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageContent {
    /// The page.
    pub page: u32,
    content: u64,
}

/// The free pages of a pool. A page id stands for that page in every layer.
pub struct PageList {
    geometry: KvGeometry,
    n_pages: usize,
    /// Blank page ids; the last freed page is taken first, since its memory is already resident.
    blank: Vec<u32>,
    /// Pages without a holder whose content is remembered, by when they were freed.
    kept: BTreeMap<u64, u32>,
    /// When each page was kept; of kept pages only.
    since: Vec<u64>,
    clock: u64,
    /// Holders of each page.
    holders: Vec<u32>,
    /// Which content each page has: another number whenever it may be written.
    contents: Vec<u64>,
    remembered: Vec<bool>,
    /// Copies in flight that read or write a page.
    copies: Vec<u32>,
    /// Number of pages without a holder that copies are in flight of; each becomes free when its last copy ends.
    waiting: usize,
}

impl PageList {
    /// A list of exactly `n_pages` pages, all free.
    ///
    /// # Errors
    /// If there are more pages than ids, or their bytes cannot be counted.
    pub fn new(geometry: KvGeometry, n_pages: usize) -> Result<PageList> {
        let g = &geometry;
        [n_pages, PAGE_TOKENS, 4, g.n_kv_heads, g.head_dim, g.n_layers]
            .iter()
            .try_fold(1usize, |a, &b| a.checked_mul(b))
            .filter(|&bytes| u32::try_from(n_pages).is_ok() && bytes < isize::MAX as usize / 2)
            .ok_or_else(|| {
                Error::Capacity(format!(
                    "KV cache: {n_pages} pages of {PAGE_TOKENS} tokens, {} layers, {} KV heads of {} are more than can be addressed",
                    g.n_layers, g.n_kv_heads, g.head_dim
                ))
            })?;
        Ok(PageList {
            geometry,
            n_pages,
            blank: (0..n_pages as u32).rev().collect(),
            kept: BTreeMap::new(),
            since: vec![0; n_pages],
            clock: 0,
            holders: vec![0; n_pages],
            contents: vec![0; n_pages],
            remembered: vec![false; n_pages],
            copies: vec![0; n_pages],
            waiting: 0,
        })
    }

    /// The sizes of this pool's pages.
    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Total number of pages.
    pub fn n_pages(&self) -> usize {
        self.n_pages
    }

    /// Free pages: blank ones, and those that are only kept.
    pub fn n_free(&self) -> usize {
        self.blank.len() + self.kept.len()
    }

    /// Free pages whose content is remembered.
    pub fn n_kept(&self) -> usize {
        self.kept.len()
    }

    /// Pages without a holder that copies in flight still read or write.
    pub fn n_waiting(&self) -> usize {
        self.waiting
    }

    /// Tokens that fit in total (if all sequences have lengths that are multiples of the page).
    pub fn capacity_tokens(&self) -> usize {
        self.n_pages * PAGE_TOKENS
    }

    /// Bytes reserved (an upper bound of what is resident).
    pub fn bytes(&self) -> usize {
        self.n_pages * self.geometry.bytes_per_page()
    }

    /// Takes one page, to write it.
    ///
    /// # Errors
    /// If none is free; the message states the total.
    pub fn alloc(&mut self) -> Result<u32> {
        let kept = |kept: &mut BTreeMap<u64, u32>| kept.pop_first().map(|(_, page)| page);
        let page = self.blank.pop().or_else(|| kept(&mut self.kept)).ok_or_else(|| self.exhausted(1))?;
        self.holders[page as usize] = 1;
        self.forget(page);
        Ok(page)
    }

    /// A holder gives a page back. Once it has none, and no copy reads or writes it, it can be taken again.
    ///
    /// # Panics
    /// If it has no holder: it was released too often, and continuing would mix two contexts.
    pub fn free(&mut self, page: u32) {
        let at = page as usize;
        self.holders[at] =
            self.holders[at].checked_sub(1).unwrap_or_else(|| panic!("page {page} freed twice"));
        match (self.holders[at], self.copies[at]) {
            (0, 0) => self.put_back(page),
            (0, _) => self.waiting += 1,
            _ => {}
        }
    }

    fn put_back(&mut self, page: u32) {
        if self.remembered[page as usize] {
            self.clock += 1;
            self.since[page as usize] = self.clock;
            self.kept.insert(self.clock, page);
        } else {
            self.blank.push(page);
        }
    }

    /// The content of a page that is full, by which it can be [taken](PageList::take) from now on, until it is written
    /// again.
    ///
    /// # Panics
    /// If nobody holds it.
    pub fn remember(&mut self, page: u32) -> PageContent {
        assert!(self.holders[page as usize] > 0, "page {page} is to be remembered, and nobody holds it");
        self.remembered[page as usize] = true;
        PageContent { page, content: self.contents[page as usize] }
    }

    /// Whether a page still has this content.
    pub fn has(&self, of: PageContent) -> bool {
        self.contents.get(of.page as usize) == Some(&of.content)
    }

    /// Becomes a holder of a page, to read it, if it still has this content.
    pub fn take(&mut self, of: PageContent) -> bool {
        if !self.has(of) {
            return false;
        }
        let at = of.page as usize;
        match (self.holders[at], self.copies[at]) {
            (0, 0) => drop(self.kept.remove(&self.since[at])),
            (0, _) => self.waiting -= 1,
            _ => {}
        }
        self.holders[at] += 1;
        true
    }

    /// A page is about to be written from its middle on, by its only holder.
    ///
    /// # Panics
    /// If there are others, whose content would change.
    pub(super) fn cut(&mut self, page: u32) {
        assert_eq!(self.holders[page as usize], 1, "page {page} is shared, and would be written");
        self.forget(page);
    }

    fn forget(&mut self, page: u32) {
        self.contents[page as usize] += 1;
        self.remembered[page as usize] = false;
    }

    /// Becomes a holder again of a page that was given back while copies of it were in flight, which must still be so.
    ///
    /// # Panics
    /// If another sequence could have written it meanwhile.
    pub(super) fn unfree(&mut self, page: u32) {
        let at = page as usize;
        assert!(self.copies[at] > 0, "page {page} is not held back by a copy");
        self.waiting -= usize::from(self.holders[at] == 0);
        self.holders[at] += 1;
    }

    /// Records that a copy will read or write `page`.
    pub(super) fn copy_begins(&mut self, page: u32) {
        assert!(self.holders[page as usize] > 0, "a copy of page {page}, which nobody holds");
        self.copies[page as usize] += 1;
    }

    /// Records that a copy of `page` has ended.
    ///
    /// # Panics
    /// If none was in flight.
    pub(super) fn copy_ended(&mut self, page: u32) {
        let at = page as usize;
        assert!(self.copies[at] > 0, "no copy of page {page} is in flight");
        self.copies[at] -= 1;
        if self.copies[at] == 0 && self.holders[at] == 0 {
            self.waiting -= 1;
            self.put_back(page);
        }
    }

    /// The error of a request for `want` more pages than there are.
    pub(super) fn exhausted(&self, want: usize) -> Error {
        let g = &self.geometry;
        Error::Capacity(format!(
            "KV cache: {want} more pages of {PAGE_TOKENS} tokens wanted, {} of {} free ({:.1} MiB for {} tokens in all); \
             raise `context` or run fewer sequences",
            self.n_free(),
            self.n_pages,
            (self.n_pages * g.bytes_per_page()) as f64 / (1 << 20) as f64,
            self.capacity_tokens(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::KvType;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const G: KvGeometry = KvGeometry { n_layers: 2, n_kv_heads: 1, head_dim: 16, dtype: KvType::BF16 };

    #[test]
    fn kept_pages_go_the_oldest_first_and_after_the_blank_ones() {
        let mut list = PageList::new(G, 3).unwrap();
        let pages: Vec<u32> = (0..3).map(|_| list.alloc().unwrap()).collect();
        let contents: Vec<PageContent> = pages[..2].iter().map(|&p| list.remember(p)).collect();
        for &page in &pages {
            list.free(page);
        }
        assert_eq!((list.n_free(), list.n_kept()), (3, 2));
        assert_eq!(list.alloc().unwrap(), pages[2], "the blank one");
        // Used again: now the other is the older.
        assert!(list.take(contents[0]));
        list.free(pages[0]);
        assert_eq!(list.alloc().unwrap(), pages[1]);
        assert!(!list.take(contents[1]) && list.has(contents[0]));
        assert_eq!(list.alloc().unwrap(), pages[0]);
        assert!(!list.has(contents[0]));
        list.alloc().expect_err("none is left");
    }

    #[test]
    #[should_panic(expected = "is shared")]
    fn a_shared_page_is_not_written() {
        let mut list = PageList::new(G, 1).unwrap();
        let page = list.alloc().unwrap();
        let content = list.remember(page);
        assert!(list.take(content));
        list.cut(page);
    }

    proptest! {
        /// Against a model: the holders of each page, and what was written to it.
        #[test]
        fn a_taken_page_has_what_was_remembered(
            ops in prop::collection::vec((0..6u8, 0..64usize), 0..200),
            n_pages in 1..8usize,
        ) {
            let mut list = PageList::new(G, n_pages).unwrap();
            // What each page holds: a number for every time that it is written.
            let mut written = vec![0u64; n_pages];
            let mut clock = 0;
            let mut holds: Vec<u32> = Vec::new();
            let mut known: Vec<(PageContent, u64)> = Vec::new();
            let mut copies: Vec<u32> = Vec::new();
            for (op, i) in ops {
                let held = (!holds.is_empty()).then(|| i % holds.len().max(1));
                match op {
                    0 => if let Ok(page) = list.alloc() {
                        prop_assert!(!holds.contains(&page) && !copies.contains(&page));
                        clock += 1;
                        written[page as usize] = clock;
                        holds.push(page);
                    } else {
                        prop_assert_eq!(list.n_free(), 0);
                    },
                    1 => if let Some(at) = held {
                        list.free(holds.swap_remove(at));
                    },
                    2 => if let Some(at) = held {
                        known.push((list.remember(holds[at]), written[holds[at] as usize]));
                    },
                    3 => if !known.is_empty() {
                        let (content, was) = known[i % known.len()];
                        if list.take(content) {
                            prop_assert_eq!(written[content.page as usize], was);
                            holds.push(content.page);
                        } else {
                            prop_assert_ne!(written[content.page as usize], was, "it is still there");
                        }
                    },
                    4 => if let Some(at) = held {
                        let page = holds[at];
                        list.copy_begins(page);
                        copies.push(page);
                        if i % 2 == 0 {
                            list.free(holds.swap_remove(at));
                            if i % 4 == 0 {
                                list.unfree(page);
                                holds.push(page);
                            }
                        }
                    },
                    _ => if !copies.is_empty() {
                        list.copy_ended(copies.swap_remove(i % copies.len()));
                    },
                }
                let mut count = HashMap::new();
                holds.iter().for_each(|&p| *count.entry(p).or_insert(0u32) += 1);
                let waiting = (0..n_pages as u32).filter(|p| copies.contains(p) && !count.contains_key(p)).count();
                prop_assert_eq!(list.n_waiting(), waiting);
                prop_assert_eq!(list.n_free() + waiting + count.len(), n_pages);
            }
        }
    }
}
