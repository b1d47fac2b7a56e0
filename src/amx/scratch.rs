//! A thread's working memory for products, on huge pages where the system gives them.
//!
//! Packed operands fill most of L2; on pages of 4 KiB they take hundreds of TLB entries (measured on a Sapphire Rapids:
//! 8 to 15% of a product's time).

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::RefCell;

const HUGE: usize = 2 << 20;

/// Zeroes, aligned to 2 MiB. Only grows.
struct Memory {
    base: *mut u8,
    bytes: usize,
}

thread_local! {
    static MEMORY: RefCell<Memory> = const { RefCell::new(Memory { base: std::ptr::null_mut(), bytes: 0 }) };
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, HUGE).expect("scratch fits the address space")
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated below with this layout.
            unsafe { dealloc(self.base, layout(self.bytes)) };
        }
    }
}

/// Calls `f` with at least `bytes` initialised bytes of this thread, on a 2 MiB boundary. Not reentrant.
pub(super) fn with<R>(bytes: usize, f: impl FnOnce(*mut u8) -> R) -> R {
    MEMORY.with_borrow_mut(|memory| {
        if memory.bytes < bytes {
            let bytes = bytes.next_multiple_of(HUGE);
            *memory = Memory { base: std::ptr::null_mut(), bytes: 0 };
            // SAFETY: a size that is not zero.
            let base = unsafe { alloc(layout(bytes)) };
            if base.is_null() {
                handle_alloc_error(layout(bytes));
            }
            // SAFETY: `bytes` from `base` on are ours; advice changes speed, not meaning.
            unsafe {
                libc::madvise(base.cast(), bytes, libc::MADV_HUGEPAGE);
                base.write_bytes(0, bytes);
            }
            *memory = Memory { base, bytes };
        }
        f(memory.base)
    })
}
