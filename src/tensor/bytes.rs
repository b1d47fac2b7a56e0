//! A shared, immutable run of bytes: a slice of a memory map or of an owned buffer.

use std::sync::Arc;

/// Cheap to clone; keeps its owner (map or allocation) alive.
#[derive(Clone)]
pub struct Bytes {
    ptr: *const u8,
    len: usize,
    owner: Owner,
}

#[derive(Clone)]
#[allow(dead_code)]
enum Owner {
    Map(Arc<memmap2::Mmap>),
    Anonymous(Arc<memmap2::Mmap>),
    Heap(Arc<[u64]>),
}

// SAFETY: the bytes are immutable for as long as `owner` lives, whoever reads them.
unsafe impl Send for Bytes {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for Bytes {}

impl Bytes {
    /// The whole of a memory map.
    pub fn from_map(map: Arc<memmap2::Mmap>) -> Self {
        Bytes { ptr: map.as_ptr(), len: map.len(), owner: Owner::Map(map) }
    }

    /// The whole of an anonymous (fileless) map: owned memory, page aligned. Unlike a file's pages, these
    /// cannot be dropped and read again, so [`Bytes::release_pages`] leaves them alone.
    pub fn from_anonymous(map: memmap2::Mmap) -> Self {
        Bytes { ptr: map.as_ptr(), len: map.len(), owner: Owner::Anonymous(Arc::new(map)) }
    }

    /// Owned bytes, 8-byte aligned: `words` holds at least `len` bytes.
    pub fn from_words(words: Vec<u64>, len: usize) -> Self {
        assert!(len <= words.len() * 8, "{len} bytes out of {} words", words.len());
        let words: Arc<[u64]> = words.into();
        Bytes { ptr: words.as_ptr().cast(), len, owner: Owner::Heap(words) }
    }

    /// A copy of `bytes` (8-byte aligned).
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        // SAFETY: `words` is at least `bytes.len()` bytes long and distinct from `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), words.as_mut_ptr().cast(), bytes.len()) };
        Bytes::from_words(words, bytes.len())
    }

    /// Bytes `offset..offset + len`; `None` if out of range.
    pub fn slice(&self, offset: usize, len: usize) -> Option<Bytes> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        // SAFETY: offset <= self.len, so the pointer stays within (or one past) the allocation.
        let ptr = unsafe { self.ptr.add(offset) };
        Some(Bytes { ptr, len, owner: self.owner.clone() })
    }

    /// Whether these bytes lie in a file mapping (and so can be dropped from memory and read again).
    pub fn is_mapped(&self) -> bool {
        matches!(self.owner, Owner::Map(_))
    }

    /// Whether the system should map the whole file behind these bytes in large pages where it can: for bytes that are
    /// read again and again (fewer faults, fewer misses of the TLB). Not for bytes that are read once and
    /// released: one touch would map 2 MiB again. Only advice, and no effect on owned bytes.
    pub fn advise_large_pages(&self, large: bool) {
        #[cfg(target_os = "linux")]
        if let Owner::Map(map) = &self.owner {
            let _ = map.advise(if large { memmap2::Advice::HugePage } else { memmap2::Advice::NoHugePage });
        }
    }

    /// Tells the system that the whole pages inside this range will not be needed soon: they leave
    /// the resident set and come back from the file when touched. No effect on owned bytes.
    pub fn release_pages(&self) {
        if !self.is_mapped() || self.len == 0 {
            return;
        }
        let page = 4096usize;
        let start = (self.ptr as usize).next_multiple_of(page);
        let end = (self.ptr as usize + self.len) / page * page;
        if start < end {
            // SAFETY: the range lies inside a live read-only file mapping; MADV_DONTNEED on such a
            // mapping only drops clean pages, which are read from the file again on the next touch.
            unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTNEED) };
        }
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr..ptr+len` lies inside `owner`, which is alive and immutable.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({} B{})", self.len, if self.is_mapped() { ", mapped" } else { "" })
    }
}
