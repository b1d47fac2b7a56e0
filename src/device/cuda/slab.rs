//! Host memory of exact size, mapped by us and page-locked in one registration.
//!
//! Unlike memory that the driver allocates (`super::pinned`), we map its pages ourselves: any size works without
//! rounding, and if the system refuses to lock that much, the same memory is used unlocked.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::context::{Context, Relaxed};
use super::errors::{describe, is_fatal, mib};
use super::release::{Dead, Release};
use crate::device::runtime::{DevPtr, Pinned};
use crate::{Error, Result};

/// Pages of this size are locked faster than small ones.
const HUGE_PAGE: usize = 2 << 20;

pub(super) struct CudaSlab {
    release: Arc<Release>,
    base: *mut c_void,
    len: usize,
    registered: bool,
    device: DevPtr,
}

// SAFETY: plain memory with a stable address; the contract of `Pinned` says who may touch which bytes when.
unsafe impl Send for CudaSlab {}
// SAFETY: as above; only raw pointers are handed out.
unsafe impl Sync for CudaSlab {}

impl CudaSlab {
    /// Allocates zeroed memory; also returns the reason if it is not page-locked.
    pub fn new(
        context: &Context,
        release: &Arc<Release>,
        bytes: usize,
        mapped: bool,
    ) -> Result<(CudaSlab, Option<String>)> {
        let name = &context.name;
        context.bind()?;
        release.reap(false);
        let len = bytes.max(1);
        // SAFETY: a fresh private anonymous mapping; no existing memory is affected.
        let base = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(Error::Capacity(format!(
                "{name}: the host has no {} of address space",
                mib(len as u64)
            )));
        }
        if len >= HUGE_PAGE {
            // SAFETY: the mapping made above. This is advice: a refusal changes only speed.
            unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        }
        let mut slab =
            CudaSlab { release: release.clone(), base, len: bytes, registered: false, device: DevPtr::NULL };
        let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        if mapped {
            flags |= sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        }
        let _relaxed = Relaxed::enter();
        // SAFETY: the context is current; the range was mapped above and stays so until it is unregistered.
        let code = unsafe { sys::cuMemHostRegister_v2(base, len, flags) };
        if is_fatal(code) {
            context.check("page-locking host memory", code)?;
        }
        if code != CUresult::CUDA_SUCCESS {
            let why = format!(
                "{name}: {} of host memory stay pageable, copies from and to them are slower: {}; raise the limit of \
                 locked memory (ulimit -l), or use less",
                mib(len as u64),
                describe(code)
            );
            return Ok((slab, Some(why)));
        }
        slab.registered = true;
        if mapped {
            let mut device = 0;
            // SAFETY: registered with DEVICEMAP; the address outlives the call.
            let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, base, 0) };
            context.check("page-locked host memory", code)?;
            slab.device = DevPtr(device);
        }
        Ok((slab, None))
    }
}

impl Pinned for CudaSlab {
    fn host(&self) -> *mut u8 {
        self.base.cast()
    }
    fn device(&self) -> DevPtr {
        self.device
    }
    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for CudaSlab {
    fn drop(&mut self) {
        // A copy in flight may still use it.
        let (base, len, registered) = (self.base, self.len.max(1), self.registered);
        self.release.bury(Dead::Slab { base, len, registered });
    }
}
