//! A thread's working memory for products, on huge pages where the system gives them.
//!
//! Packed operands fill most of L2; on pages of 4 KiB they take hundreds of TLB entries (measured on a Sapphire Rapids:
//! 8 to 15% of a product's time). Like a thread's stack it is a mapping of its own, of 2 MiB, that stays until the thread ends,
//! and no part of a plan's activations.

use std::cell::RefCell;

const HUGE: usize = 2 << 20;

/// A private mapping of zeroes, and the part of it that begins on a 2 MiB boundary. Only grows.
struct Memory {
    map: *mut u8,
    map_bytes: usize,
    base: *mut u8,
    bytes: usize,
}

impl Memory {
    const NONE: Memory =
        Memory { map: std::ptr::null_mut(), map_bytes: 0, base: std::ptr::null_mut(), bytes: 0 };

    /// # Panics
    /// There is no address space left.
    fn new(bytes: usize) -> Memory {
        let bytes = bytes.next_multiple_of(HUGE);
        let map_bytes = bytes + HUGE;
        let (read_write, private) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: a fresh private anonymous mapping; no existing memory is affected.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), map_bytes, read_write, private, -1, 0) };
        assert_ne!(map, libc::MAP_FAILED, "no {map_bytes} bytes of address space for a thread's tiles");
        let map = map.cast::<u8>();
        let base = map.wrapping_add(map.align_offset(HUGE));
        // SAFETY: these bytes lie inside the mapping; advice changes speed, not meaning.
        unsafe { libc::madvise(base.cast(), bytes, libc::MADV_HUGEPAGE) };
        Memory { map, map_bytes, base, bytes }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.map_bytes > 0 {
            // SAFETY: exactly the mapping made in `new`; nobody keeps pointers beyond `with`.
            unsafe { libc::munmap(self.map.cast(), self.map_bytes) };
        }
    }
}

thread_local! {
    static MEMORY: RefCell<Memory> = const { RefCell::new(Memory::NONE) };
}

/// Calls `f` with at least `bytes` initialised bytes of this thread, on a 2 MiB boundary. Not reentrant.
pub(super) fn with<R>(bytes: usize, f: impl FnOnce(*mut u8) -> R) -> R {
    MEMORY.with_borrow_mut(|memory| {
        if memory.bytes < bytes {
            *memory = Memory::NONE;
            *memory = Memory::new(bytes);
        }
        f(memory.base)
    })
}
