//! Zeroed anonymous memory that costs nothing until it is touched.

use crate::{Error, Result};

const HUGE: usize = 2 << 20;

/// A private anonymous mapping, aligned to 2 MiB; zero pages appear on first touch.
pub(super) struct Anon {
    map: *mut libc::c_void,
    map_len: usize,
    base: *mut u8,
}

// SAFETY: plain memory owned by this value; who may touch which bytes is the business of its users.
unsafe impl Send for Anon {}
// SAFETY: as above; `Anon` itself only hands out the base pointer.
unsafe impl Sync for Anon {}

impl Anon {
    /// `bytes` of zeroes. With `huge`, asks for huge pages (fewer TLB misses on long contexts, but
    /// the first touch of each zeroes 2 MiB).
    pub(super) fn new(bytes: usize, huge: bool, what: &str) -> Result<Anon> {
        let no_room = || Error::Capacity(format!("{what}: {bytes} bytes of address space are not available"));
        let map_len = bytes.max(1).checked_add(HUGE).ok_or_else(no_room)?;
        // SAFETY: a fresh private anonymous mapping; no existing memory is affected.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(no_room());
        }
        let base = map.cast::<u8>().wrapping_add(map.align_offset(HUGE));
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: base..base+bytes lies inside the mapping (it is 2 MiB longer than `bytes`), and base
        // is page-aligned. Advice only: a refusal changes speed, not meaning.
        unsafe { libc::madvise(base.cast(), bytes, advice) };
        Ok(Anon { map, map_len, base })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Anon {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; views of it borrow the pool that owns this value.
        unsafe { libc::munmap(self.map, self.map_len) };
    }
}
