//! The pages of one sequence.

use super::{KvGeometry, PAGE_TOKENS, PageList};
use crate::Result;

/// Pages of one sequence in order of position, and the number of tokens in them.
///
/// A table must be [`free`](BlockTable::free)d into its pool: dropping it leaks its pages until the pool is dropped.
#[derive(Debug, Default)]
pub struct BlockTable {
    pages: Vec<u32>,
    len: usize,
}

impl BlockTable {
    /// An empty table.
    pub fn new() -> BlockTable {
        BlockTable::default()
    }

    /// Page ids from position 0 on. There may be room for more tokens than [`len`](BlockTable::len).
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes room for `n_tokens` after the stored ones.
    ///
    /// # Errors
    /// If there are not enough free pages; nothing is changed then.
    pub fn reserve(&mut self, pool: &mut PageList, n_tokens: usize) -> Result<()> {
        let want = KvGeometry::pages_for(self.len + n_tokens).saturating_sub(self.pages.len());
        if want > pool.n_free() {
            return Err(pool.exhausted(want));
        }
        for _ in 0..want {
            self.pages.push(pool.alloc()?);
        }
        Ok(())
    }

    /// Counts `n_tokens` more as stored: their keys and values have been appended.
    ///
    /// # Panics
    /// If they were not [`reserve`](BlockTable::reserve)d.
    pub fn advance(&mut self, n_tokens: usize) {
        let len = self.len + n_tokens;
        assert!(
            len <= self.pages.len() * PAGE_TOKENS,
            "{len} tokens in {} pages of {PAGE_TOKENS}",
            self.pages.len()
        );
        self.len = len;
    }

    /// Appends a full page of another sequence that this one now holds, too.
    ///
    /// # Panics
    /// If the pages so far are not full.
    pub fn adopt(&mut self, page: u32) {
        assert_eq!(self.len, self.pages.len() * PAGE_TOKENS, "a page behind one that is not full");
        self.pages.push(page);
        self.len += PAGE_TOKENS;
    }

    /// Forgets all tokens from position `len` on, and frees the pages that then hold none.
    ///
    /// # Panics
    /// If that cuts a page that other sequences hold, too.
    pub fn truncate(&mut self, pool: &mut PageList, len: usize) {
        let cut = len < self.len && !len.is_multiple_of(PAGE_TOKENS);
        self.len = self.len.min(len);
        for page in self.pages.drain(KvGeometry::pages_for(self.len)..) {
            pool.free(page);
        }
        if let Some(&last) = self.pages.last().filter(|_| cut) {
            pool.cut(last);
        }
    }

    /// Frees all pages.
    pub fn free(&mut self, pool: &mut PageList) {
        self.truncate(pool, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::KvType;
    use crate::cache::PagePool;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Op {
        Grow(usize, usize),
        Truncate(usize, usize),
        Free(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..4usize, 0..100usize).prop_map(|(s, n)| Op::Grow(s, n)),
            2 => (0..4usize, 0..150usize).prop_map(|(s, n)| Op::Truncate(s, n)),
            1 => (0..4usize).prop_map(Op::Free),
        ]
    }

    proptest! {
        #[test]
        fn pages_are_conserved_and_never_shared(ops in prop::collection::vec(op(), 0..60), n_pages in 0..20usize) {
            let g = KvGeometry { n_layers: 2, n_kv_heads: 1, head_dim: 16, dtype: KvType::BF16 };
            let mut pool = PagePool::new(g, n_pages).unwrap();
            let mut tables: Vec<BlockTable> = (0..4).map(|_| BlockTable::new()).collect();
            let mut lens = [0usize; 4];
            for op in ops {
                match op {
                    Op::Grow(s, n) => {
                        let before = tables[s].pages().len();
                        let need = (lens[s] + n).div_ceil(PAGE_TOKENS).saturating_sub(before);
                        let fits = need <= pool.n_free();
                        prop_assert_eq!(tables[s].reserve(&mut pool, n).is_ok(), fits);
                        if fits {
                            tables[s].advance(n);
                            lens[s] += n;
                        } else {
                            prop_assert_eq!(tables[s].pages().len(), before, "a refusal changes nothing");
                        }
                    }
                    Op::Truncate(s, n) => {
                        tables[s].truncate(&mut pool, n);
                        lens[s] = lens[s].min(n);
                    }
                    Op::Free(s) => {
                        tables[s].free(&mut pool);
                        lens[s] = 0;
                    }
                }
                let mut held: Vec<u32> = tables.iter().flat_map(|t| t.pages().to_vec()).collect();
                prop_assert_eq!(held.len() + pool.n_free(), n_pages);
                held.sort_unstable();
                held.dedup();
                prop_assert_eq!(held.len() + pool.n_free(), n_pages, "a page has two owners");
                for (t, &len) in tables.iter().zip(&lens) {
                    prop_assert_eq!(t.len(), len);
                    prop_assert!(t.pages().len() * PAGE_TOKENS >= len);
                }
            }
        }
    }
}
