//! Memory on huge pages, if the system provides them.
//!
//! A TLB entry of a 4 KiB page covers little: on a Sapphire Rapids, operands and outputs of matrix products on huge pages save 8 to
//! 15% of a product's time. Requests for them are only advice: without transparent huge pages only speed changes.

use crate::{Error, Result};

/// The size of a huge page.
pub const HUGE_PAGE: usize = 2 << 20;

/// A private anonymous mapping, aligned to [`HUGE_PAGE`]; zero pages appear on first touch.
#[derive(Debug)]
pub struct Mapping {
    map: *mut libc::c_void,
    map_len: usize,
    base: *mut u8,
}

// SAFETY: plain memory owned by this value; its users decide who may touch which bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself only hands out the base pointer.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` of zeros. With `huge`, asks for huge pages (fewer TLB misses, but the first touch of each zeroes 2
    /// MiB); otherwise for small ones.
    ///
    /// # Errors
    /// If there is no address space left; `what` names the purpose in the message.
    pub fn new(bytes: usize, huge: bool, what: &str) -> Result<Mapping> {
        let no_room = || Error::Capacity(format!("{what}: {bytes} bytes of address space are not available"));
        let map_len = bytes.max(1).checked_add(HUGE_PAGE).ok_or_else(no_room)?;
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
        let base = map.cast::<u8>().wrapping_add(map.align_offset(HUGE_PAGE));
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: base..base+bytes lies inside the mapping (it is 2 MiB longer than `bytes`), and base
        // is page-aligned. Advice only: a refusal changes speed, not meaning.
        unsafe { libc::madvise(base.cast(), bytes, advice) };
        Ok(Mapping { map, map_len, base })
    }

    /// The first byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; owners of pointers into it keep this value alive.
        unsafe { libc::munmap(self.map, self.map_len) };
    }
}

/// Asks for huge pages for these bytes, as far as whole ones lie inside, best before they are first written. What they contain, and the
/// memory taken once written, do not change.
pub(super) fn ask_for_huge_pages(start: *mut u8, bytes: usize) {
    let (from, to) =
        (start.addr().next_multiple_of(HUGE_PAGE), (start.addr() + bytes) / HUGE_PAGE * HUGE_PAGE);
    if from < to {
        // SAFETY: whole pages inside the caller's memory. Advice changes no byte; if the allocator reuses the range later, that data
        // lies on huge pages, too.
        unsafe { libc::madvise(start.with_addr(from).cast(), to - from, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_aligned_zeroed_and_writable_to_the_end() {
        for bytes in [0, 1, HUGE_PAGE, HUGE_PAGE + 1] {
            for huge in [false, true] {
                let map = Mapping::new(bytes, huge, "test").unwrap();
                assert!(map.base().addr().is_multiple_of(HUGE_PAGE));
                // SAFETY: these bytes lie inside the mapping, to which nothing else has a pointer.
                let all = unsafe { std::slice::from_raw_parts_mut(map.base(), bytes) };
                assert!(all.iter().all(|&b| b == 0));
                all.fill(7);
            }
        }
        let error = Mapping::new(usize::MAX / 2, true, "a test's memory").unwrap_err().to_string();
        assert!(error.contains("a test's memory"), "{error}");
    }

    #[test]
    fn advice_changes_no_byte_of_a_buffer() {
        for len in [0usize, 1, HUGE_PAGE / 4, 3 * HUGE_PAGE / 4 + 5] {
            let mut v: Vec<u32> = (0..len as u32).collect();
            ask_for_huge_pages(v.as_mut_ptr().cast(), len * size_of::<u32>());
            assert!(v.iter().enumerate().all(|(i, &x)| x == i as u32));
        }
    }
}
