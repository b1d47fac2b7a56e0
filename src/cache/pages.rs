//! The list of free pages, wherever their memory is.

use super::{KvGeometry, PAGE_TOKENS};
use crate::{Error, Result};

/// The free pages of a pool. A page id stands for that page in every layer.
pub struct PageList {
    geometry: KvGeometry,
    n_pages: usize,
    /// Free page ids; the last freed page is taken first, since its memory is already resident.
    free: Vec<u32>,
    used: Vec<bool>,
    /// Copies in flight that read or write a page.
    copies: Vec<u32>,
    /// Number of pages given back while copies were in flight; each becomes free when its last copy ends.
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
            free: (0..n_pages as u32).rev().collect(),
            used: vec![false; n_pages],
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

    /// Free pages.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Pages without an owner that copies in flight still read or write.
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

    /// Takes one page.
    ///
    /// # Errors
    /// If none is free; the message states the total.
    pub fn alloc(&mut self) -> Result<u32> {
        let page = self.free.pop().ok_or_else(|| self.exhausted(1))?;
        self.used[page as usize] = true;
        Ok(page)
    }

    /// Gives a page back. It can be taken again once no copy reads or writes it.
    ///
    /// # Panics
    /// If it has no owner: it was released twice, and continuing would mix two contexts.
    pub fn free(&mut self, page: u32) {
        assert!(std::mem::replace(&mut self.used[page as usize], false), "page {page} freed twice");
        if self.copies[page as usize] == 0 {
            self.free.push(page);
        } else {
            self.waiting += 1;
        }
    }

    /// Reclaims a page that was given back while copies of it were in flight, which must still be so.
    ///
    /// # Panics
    /// If another sequence could have taken it meanwhile.
    pub(super) fn unfree(&mut self, page: u32) {
        let at = page as usize;
        assert!(self.copies[at] > 0 && !self.used[at], "page {page} is not held back by a copy");
        self.used[at] = true;
        self.waiting -= 1;
    }

    /// Records that a copy will read or write `page`.
    pub(super) fn copy_begins(&mut self, page: u32) {
        assert!(self.used[page as usize], "a copy of page {page}, which nobody holds");
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
        if self.copies[at] == 0 && !self.used[at] {
            self.waiting -= 1;
            self.free.push(page);
        }
    }

    /// The error of a request for `want` more pages than there are.
    pub(super) fn exhausted(&self, want: usize) -> Error {
        let g = &self.geometry;
        Error::Capacity(format!(
            "KV cache: {want} more pages of {PAGE_TOKENS} tokens wanted, {} of {} free ({:.1} MiB for {} tokens in all); \
             raise `context` or run fewer sequences",
            self.free.len(),
            self.n_pages,
            (self.n_pages * g.bytes_per_page()) as f64 / (1 << 20) as f64,
            self.capacity_tokens(),
        ))
    }
}
