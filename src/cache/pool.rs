//! The memory of all pages, sized once, and the list of free ones.

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::layer::LARGEST_HEAD;
use super::{KvGeometry, LayerKv, PAGE_TOKENS, PageList};
use crate::host::Mapping;
use crate::{Error, Result};

/// Size of one layer (one huge page) from which huge pages are requested: below, zeroing 2 MiB per layer at the first
/// token would cost more than the TLB misses they save.
pub const HUGE_FROM: usize = 2 << 20;

/// All pages of all layers, layer outermost: page `p` exists in each layer, and one id stands for
/// all of them. Memory is reserved up front and becomes resident only as pages are written.
///
/// Derefs to its [`PageList`], which block tables take pages from.
pub struct PagePool {
    pages: PageList,
    base: NonNull<u8>,
    /// Keeps the memory.
    _memory: Box<dyn Any + Send + Sync>,
}

// SAFETY: plain memory that the pool keeps; views of it promise not to race (`LayerKv`).
unsafe impl Send for PagePool {}
// SAFETY: as above.
unsafe impl Sync for PagePool {}

impl Deref for PagePool {
    type Target = PageList;
    fn deref(&self) -> &PageList {
        &self.pages
    }
}

impl DerefMut for PagePool {
    fn deref_mut(&mut self) -> &mut PageList {
        &mut self.pages
    }
}

impl PagePool {
    /// A pool of exactly `n_pages` pages.
    ///
    /// # Errors
    /// If head_dim is no multiple of 16, or sizes overflow, or the system refuses the memory.
    pub fn new(geometry: KvGeometry, n_pages: usize) -> Result<PagePool> {
        let pages = PagePool::pages(geometry, n_pages)?;
        let layer = n_pages * PAGE_TOKENS * geometry.bytes_per_token_layer();
        let memory = Mapping::new(pages.bytes(), layer >= HUGE_FROM, "KV cache")?;
        let base = NonNull::new(memory.base()).expect("a mapping is not at 0");
        Ok(PagePool { pages, base, _memory: Box::new(memory) })
    }

    /// A pool of `n_pages` pages in the caller's memory, `len` zeroed bytes from `base` on: pinned memory, to and from
    /// which an accelerator copies pages. `owner` keeps the memory alive and is dropped with the pool.
    ///
    /// # Errors
    /// As [`PagePool::new`], and if the memory is too small or not aligned to 64 bytes.
    ///
    /// # Safety
    /// The memory is valid until `owner` is dropped, and meanwhile touched only through this pool, or by copies of
    /// pages that nothing reads or writes through the pool at the same time.
    pub unsafe fn over(
        geometry: KvGeometry,
        n_pages: usize,
        base: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<PagePool> {
        let pages = PagePool::pages(geometry, n_pages)?;
        if len < pages.bytes() {
            return Err(Error::Capacity(format!(
                "KV cache: {n_pages} pages take {} bytes, the memory has {len}",
                pages.bytes()
            )));
        }
        if !(base.as_ptr() as usize).is_multiple_of(64) {
            return Err(Error::Unsupported("KV cache: memory that is not aligned to 64 bytes".into()));
        }
        Ok(PagePool { pages, base, _memory: owner })
    }

    fn pages(g: KvGeometry, n_pages: usize) -> Result<PageList> {
        if g.head_dim == 0 || !g.head_dim.is_multiple_of(16) {
            return Err(Error::Unsupported(format!(
                "KV cache: head_dim {}, wanted a positive multiple of 16",
                g.head_dim
            )));
        }
        if g.dtype.is_scaled() && g.head_dim > LARGEST_HEAD {
            return Err(Error::Unsupported(format!(
                "KV cache: head_dim {}, in {} at most {LARGEST_HEAD}",
                g.head_dim,
                g.dtype.name()
            )));
        }
        PageList::new(g, n_pages)
    }

    /// The view of layer `layer`, for appends and attention.
    pub fn layer(&self, layer: usize) -> LayerKv<'_> {
        let g = self.geometry();
        assert!(layer < g.n_layers, "layer {layer} of a KV cache with {}", g.n_layers);
        let layer_bytes = self.n_pages() * PAGE_TOKENS * g.bytes_per_token_layer();
        // SAFETY: the memory holds n_layers regions of layer_bytes (`new` made it so, `over` checked), base is aligned
        // to 64 bytes, and any bits are valid; the view borrows the pool, so it cannot outlive it.
        unsafe {
            let base = self.base.as_ptr().add(layer * layer_bytes);
            LayerKv::from_raw(base, self.n_pages(), g.n_kv_heads, g.head_dim, g.dtype)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::KvType;

    const G: KvGeometry = KvGeometry { n_layers: 30, n_kv_heads: 3, head_dim: 64, dtype: KvType::BF16 };

    #[test]
    fn bytes_per_token_match_the_formula() {
        assert_eq!(G.bytes_per_token(), 30 * 768);
        let qwen3_8b = KvGeometry { n_layers: 36, n_kv_heads: 8, head_dim: 128, dtype: KvType::BF16 };
        assert_eq!(qwen3_8b.bytes_per_token(), 144 << 10);
        assert_eq!(PagePool::new(G, 7).unwrap().bytes(), 7 * 32 * 30 * 768);
    }

    #[test]
    fn pages_may_lie_in_memory_of_the_callers() {
        #[repr(align(64))]
        struct Memory(#[allow(dead_code)] [u8; 4096]);
        let g = KvGeometry { n_layers: 2, n_kv_heads: 1, head_dim: 16, dtype: KvType::BF16 };
        assert_eq!(g.bytes_per_page(), 4096);
        let pool_over = |skip: usize, n_pages: usize| {
            let mut memory = Box::new([Memory([0; 4096]), Memory([0; 4096])]);
            let base = NonNull::new(memory.as_mut_ptr().cast::<u8>()).unwrap();
            // SAFETY: the pool owns the box, which is not accessed again; the rest of it is as long as stated.
            unsafe { PagePool::over(g, n_pages, base.add(skip), 8192 - skip, memory) }
        };
        let mut pool = pool_over(0, 2).unwrap();
        let pages = [pool.alloc().unwrap(), pool.alloc().unwrap()];
        let (k, v) = ([1.5; 16], [-2.0; 16]);
        // SAFETY: one thread.
        unsafe { pool.layer(1).append(&pages, 63, &k, &v) };
        assert_eq!(
            (pool.layer(1).key(pages[1], 0, 31, 15), pool.layer(1).value(pages[1], 0, 31, 0)),
            (1.5, -2.0)
        );
        assert_eq!(pool.layer(0).key(pages[1], 0, 31, 15), 0.0);
        let e = pool_over(0, 3).err().expect("too small").to_string();
        assert!(e.contains("3 pages take 12288 bytes, the memory has 8192"), "{e}");
        let e = pool_over(32, 1).err().expect("misaligned").to_string();
        assert!(e.contains("not aligned to 64 bytes"), "{e}");
    }

    #[test]
    fn untouched_pages_are_not_resident() {
        // 64 GiB would not fit if reserving meant touching.
        let g = KvGeometry { n_layers: 8, n_kv_heads: 8, head_dim: 128, dtype: KvType::BF16 };
        let pool = PagePool::new(g, (64 << 30) / g.bytes_per_page()).unwrap();
        let kv = pool.layer(7);
        assert_eq!(kv.key(0, 0, 0, 0), 0.0);
    }

    #[test]
    fn refuses_head_dims_that_kernels_cannot_tile() {
        for head_dim in [0, 8, 40, 72] {
            let e = PagePool::new(KvGeometry { head_dim, ..G }, 1).err().expect("must be refused");
            assert!(matches!(e, Error::Unsupported(_)), "{e}");
        }
    }

    #[test]
    fn running_out_says_the_numbers() {
        let mut pool = PagePool::new(G, 2).unwrap();
        pool.alloc().unwrap();
        pool.alloc().unwrap();
        let e = pool.alloc().unwrap_err();
        assert!(matches!(e, Error::Capacity(_)) && e.to_string().contains("0 of 2 free"), "{e}");
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_double_free_is_caught() {
        let mut pool = PagePool::new(G, 2).unwrap();
        let p = pool.alloc().unwrap();
        pool.free(p);
        pool.free(p);
    }
}
