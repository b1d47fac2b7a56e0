//! The list of free pages, wherever their memory is.

use super::{KvGeometry, PAGE_TOKENS};
use crate::{Error, Result};

/// Which pages of a pool are free. A page id stands for that page of every layer.
pub struct PageList {
    geometry: KvGeometry,
    n_pages: usize,
    /// Free page ids; the last freed is handed out first, since its memory is resident already.
    free: Vec<u32>,
    used: Vec<bool>,
}

impl PageList {
    /// Of exactly `n_pages` pages, all free.
    ///
    /// # Errors
    /// More pages than ids, or than their bytes could be counted.
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
        })
    }

    /// The sizes that this pool was made for.
    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Pages in all.
    pub fn n_pages(&self) -> usize {
        self.n_pages
    }

    /// Pages that nobody holds.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Tokens that fit in all (of sequences whose lengths are multiples of the page).
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
    /// None is free; says how many there are.
    pub fn alloc(&mut self) -> Result<u32> {
        let page = self.free.pop().ok_or_else(|| self.exhausted(1))?;
        self.used[page as usize] = true;
        Ok(page)
    }

    /// Gives a page back.
    ///
    /// # Panics
    /// If nobody holds it: then two owners exist, and going on would mix their contexts.
    pub fn free(&mut self, page: u32) {
        assert!(std::mem::replace(&mut self.used[page as usize], false), "page {page} freed twice");
        self.free.push(page);
    }

    /// The error of a request for `want` more pages than there are.
    pub(super) fn exhausted(&self, want: usize) -> Error {
        let g = &self.geometry;
        Error::Capacity(format!(
            "KV cache: {want} more pages of {PAGE_TOKENS} tokens wanted, {} of {} free ({:.1} MiB for {} tokens in all); \
             raise --ctx or run fewer sequences",
            self.free.len(),
            self.n_pages,
            (self.n_pages * g.bytes_per_page()) as f64 / (1 << 20) as f64,
            self.capacity_tokens(),
        ))
    }
}
