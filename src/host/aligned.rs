//! Buffers of numbers that begin on a cache line.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::memory::ask_for_huge_pages;

/// Alignment of an [`AlignedBuffer`]: a cache line, and a row of an AMX tile.
const LINE: usize = 64;

/// Numbers of which any bytes are one.
pub trait Plain: Copy + Send + Sync + private::Sealed {}

mod private {
    pub trait Sealed {}
}

macro_rules! plain {
    ($($T:ty)*) => { $(impl private::Sealed for $T {} impl Plain for $T {})* };
}
plain!(i8 u16 i32 f32);

/// A slice of numbers that begins on a cache line, on huge pages if it is large and the system provides them; it only grows.
///
/// Where a row of a tile lies in two lines, each load of it takes two accesses: allocators align to 16 bytes, and products of 64 rows
/// on AMX tiles took 1.1 to 1.5 times as long when they read rows from such memory (docs/performance.md).
#[derive(Debug)]
pub struct AlignedBuffer<T: Plain> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: the buffer owns its memory, as a Vec<T> does; T is Send.
unsafe impl<T: Plain> Send for AlignedBuffer<T> {}
// SAFETY: as above; T is Sync, and shared references only read.
unsafe impl<T: Plain> Sync for AlignedBuffer<T> {}

impl<T: Plain> Default for AlignedBuffer<T> {
    fn default() -> Self {
        AlignedBuffer { start: NonNull::dangling(), len: 0 }
    }
}

impl<T: Plain> AlignedBuffer<T> {
    /// Makes room for exactly `len` numbers, zeros, if there are fewer. What was there goes first: beside the new memory it would take
    /// more than that.
    pub fn renew(&mut self, len: usize) {
        if self.len < len {
            *self = AlignedBuffer::default();
            *self = AlignedBuffer::zeros(len);
        }
    }

    /// Makes room for exactly `len` numbers if there are fewer; those that were there stay, zeros follow.
    pub fn extend(&mut self, len: usize) {
        if self.len < len {
            let mut new = AlignedBuffer::zeros(len);
            new[..self.len].copy_from_slice(self);
            *self = new;
        }
    }

    /// `len` zeros.
    pub fn zeros(len: usize) -> AlignedBuffer<T> {
        let layout = layout::<T>(len);
        if layout.size() == 0 {
            return AlignedBuffer::default();
        }
        // SAFETY: the layout has a size.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
        ask_for_huge_pages(start.as_ptr(), layout.size());
        // SAFETY: freshly allocated bytes, as many as `len` numbers take.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
        AlignedBuffer { start: start.cast(), len }
    }
}

/// # Panics
/// If there is no address space for that many.
fn layout<T>(len: usize) -> Layout {
    let layout = Layout::array::<T>(len).and_then(|l| l.align_to(LINE));
    layout.unwrap_or_else(|_| panic!("a buffer of {len} numbers"))
}

impl<T: Plain> Drop for AlignedBuffer<T> {
    fn drop(&mut self) {
        let layout = layout::<T>(self.len);
        if layout.size() > 0 {
            // SAFETY: allocated in `zeros` with this layout, and not freed since.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) };
        }
    }
}

impl<T: Plain> Deref for AlignedBuffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised numbers that this owns, or none at a dangling, aligned pointer.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for AlignedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::AlignedBuffer;

    #[test]
    fn buffers_begin_on_a_line_and_keep_what_they_had_where_asked() {
        let mut b = AlignedBuffer::<u16>::default();
        assert!(b.is_empty());
        for len in [1, 3, 1000, 3_000_000] {
            b.extend(len);
            assert_eq!((b.len(), b.as_ptr().addr() % 64), (len, 0));
            assert!(b[len / 2..].iter().all(|&x| x == 0) || len == 1);
            b[0] = 7;
            b[len - 1] = 9;
            b.extend(len - 1);
            assert_eq!((b.len(), b[len - 1]), (len, 9));
        }
        assert_eq!((b[0], b[2], b[999]), (7, 9, 9));
        b.renew(10);
        assert_eq!((b.len(), b[0]), (3_000_000, 7), "buffers only grow");
        b.renew(4_000_000);
        assert_eq!((b.len(), b.as_ptr().addr() % 64), (4_000_000, 0));
        assert!(b.iter().all(|&x| x == 0));
        b[3_999_999] = 1;
    }
}
