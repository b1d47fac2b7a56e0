//! A shared, immutable run of bytes: a slice of a memory map or of an owned buffer.

use std::fs::File;
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
    Map(Arc<(memmap2::Mmap, File)>),
    Anonymous(Arc<memmap2::Mmap>),
    Heap(Arc<[u64]>),
    /// The lender promised that they outlive this.
    Borrowed,
}

// SAFETY: the bytes are immutable for as long as `owner` lives, whoever reads them.
unsafe impl Send for Bytes {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for Bytes {}

impl Bytes {
    /// The whole of a file: `map` is a mapping of `file` from its first byte on.
    pub fn from_map(map: memmap2::Mmap, file: File) -> Self {
        Bytes { ptr: map.as_ptr(), len: map.len(), owner: Owner::Map(Arc::new((map, file))) }
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

    /// Bytes that somebody else keeps.
    ///
    /// # Safety
    /// They stay where they are, and are not written, as long as this value and its clones live.
    pub(crate) unsafe fn borrowed(bytes: &[u8]) -> Self {
        Bytes { ptr: bytes.as_ptr(), len: bytes.len(), owner: Owner::Borrowed }
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

    /// Copies bytes `offset..offset + out.len()` to `out`, those of a file by reading it rather than through its mapping:
    /// for a few bytes here and there of much that is otherwise not needed, since a touch of the mapping brings 64 KiB
    /// or, where the system caches the file in large folios, 2 MiB into the resident set.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) {
        let bytes = &self[offset..offset + out.len()];
        #[cfg(unix)]
        if let Owner::Map(owner) = &self.owner {
            use std::os::unix::fs::FileExt;
            let at = bytes.as_ptr() as usize - owner.0.as_ptr() as usize;
            if owner.1.read_exact_at(out, at as u64).is_ok() {
                return;
            }
        }
        out.copy_from_slice(bytes);
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
        if let Owner::Map(owner) = &self.owner {
            let _ =
                owner.0.advise(if large { memmap2::Advice::HugePage } else { memmap2::Advice::NoHugePage });
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_part_of_a_file_reads_as_it_is_mapped() {
        let mut file = tempfile::tempfile().unwrap();
        let data: Vec<u8> = (0..=255u8).cycle().take(10_000).collect();
        file.write_all(&data).unwrap();
        // SAFETY: nobody else has the file.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        let part = Bytes::from_map(map, file).slice(1000, 5000).unwrap();
        for bytes in [part.clone(), Bytes::copy_of(&part)] {
            let mut out = [0; 777];
            bytes.read_at(123, &mut out);
            assert_eq!(out, data[1123..1900]);
            bytes.read_at(5000 - 777, &mut out);
            assert_eq!(out, part[5000 - 777..]);
        }
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn reading_past_the_end_panics() {
        Bytes::copy_of(&[1, 2, 3]).read_at(2, &mut [0; 2]);
    }
}
