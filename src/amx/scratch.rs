//! A thread's working memory for products, on huge pages if the system provides them.
//!
//! Packed operands fill most of L2; on pages of 4 KiB they take hundreds of TLB entries (measured on a Sapphire Rapids:
//! 8 to 15% of a product's time). Like a thread's stack it is a separate mapping, of 2 MiB, that stays until the thread
//! ends; it does not count as part of a plan's activations.

use std::cell::RefCell;

use crate::host::{HUGE_PAGE, Mapping};

/// A mapping, and its bytes. Only grows.
type Memory = Option<(Mapping, usize)>;

thread_local! {
    static MEMORY: RefCell<Memory> = const { RefCell::new(None) };
}

/// Calls `f` with at least `bytes` initialised bytes of this thread, on a 2 MiB boundary. Not reentrant.
///
/// # Panics
/// If there is no address space left.
pub(crate) fn with<R>(bytes: usize, f: impl FnOnce(*mut u8) -> R) -> R {
    MEMORY.with_borrow_mut(|memory| {
        if memory.as_ref().is_none_or(|(_, has)| *has < bytes) {
            *memory = None;
            let bytes = bytes.next_multiple_of(HUGE_PAGE);
            let map = Mapping::new(bytes, true, "a thread's tiles").unwrap_or_else(|e| panic!("{e}"));
            *memory = Some((map, bytes));
        }
        f(memory.as_ref().map_or(std::ptr::null_mut(), |(map, _)| map.base()))
    })
}
