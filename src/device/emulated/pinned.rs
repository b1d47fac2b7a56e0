//! Host memory that the device reads and writes in place.

use super::program;
use crate::device::runtime::{DevPtr, Pinned};
use crate::{Error, Result};

/// Zeroed, page-aligned. Host and device see it at the same address; the device does not see it if it is pageable.
pub(super) struct HostMemory {
    base: *mut u8,
    len: usize,
    map_len: usize,
    mapped: bool,
}

// SAFETY: plain memory owned by this value; `Pinned`'s users agree on who touches it when.
unsafe impl Send for HostMemory {}
// SAFETY: as above; only a raw pointer is handed out.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub fn new(len: usize) -> Result<HostMemory> {
        let mut memory = HostMemory::pageable(len)?;
        memory.mapped = true;
        program::register(memory.device(), len, true);
        Ok(memory)
    }

    /// The address by which copies know it.
    pub fn start(&self) -> DevPtr {
        DevPtr(self.base as u64)
    }

    /// Memory that copies use, but the device does not see.
    pub fn pageable(len: usize) -> Result<HostMemory> {
        let no_room = || Error::Capacity(format!("{len} bytes of pinned host memory are not available"));
        // A page more, never used: what follows the allocation is not somebody else's.
        let map_len = len.max(1).checked_add(4096).ok_or_else(no_room)?;
        // SAFETY: a fresh private anonymous mapping; no existing memory is affected.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(no_room());
        }
        Ok(HostMemory { base: base.cast(), len, map_len, mapped: false })
    }
}

impl Pinned for HostMemory {
    fn host(&self) -> *mut u8 {
        self.base
    }
    fn device(&self) -> DevPtr {
        if self.mapped { self.start() } else { DevPtr::NULL }
    }
    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.mapped {
            program::unregister(self.device());
        }
        // SAFETY: exactly the mapping made in `new`; work in flight holds the `Arc` it lives in.
        unsafe { libc::munmap(self.base.cast(), self.map_len) };
    }
}
