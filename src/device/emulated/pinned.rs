//! Host memory that the device reads and writes in place.

use super::program;
use crate::device::runtime::{DevPtr, Pinned};
use crate::{Error, Result};

/// Zeroed, page-aligned host memory. Host and device access it at the same address; pageable memory is not accessible
/// to the device.
pub(super) struct HostBytes {
    base: *mut u8,
    len: usize,
    map_len: usize,
    mapped: bool,
}

// SAFETY: plain memory owned by this value; users of `Pinned` agree on who touches it when.
unsafe impl Send for HostBytes {}
// SAFETY: as above; only a raw pointer is handed out.
unsafe impl Sync for HostBytes {}

impl HostBytes {
    pub fn new(len: usize) -> Result<HostBytes> {
        let mut memory = HostBytes::pageable(len)?;
        memory.mapped = true;
        program::register(memory.device(), len, true);
        Ok(memory)
    }

    /// The address that copies use.
    pub fn start(&self) -> DevPtr {
        DevPtr(self.base as u64)
    }

    /// Memory that copies use but that the device cannot access.
    pub fn pageable(len: usize) -> Result<HostBytes> {
        let no_room = || Error::Capacity(format!("{len} bytes of pinned host memory are not available"));
        // One more page, never used, so that no other allocation follows directly.
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
        Ok(HostBytes { base: base.cast(), len, map_len, mapped: false })
    }
}

impl Pinned for HostBytes {
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

impl Drop for HostBytes {
    fn drop(&mut self) {
        if self.mapped {
            program::unregister(self.device());
        }
        // SAFETY: exactly the mapping made in `new`; work in flight holds the `Arc` it lives in.
        unsafe { libc::munmap(self.base.cast(), self.map_len) };
    }
}
