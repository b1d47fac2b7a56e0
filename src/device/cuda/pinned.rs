//! Page-locked host memory, which the device can access.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::context::{Context, Relaxed};
use super::errors::{device, mib};
use super::release::{Dead, Release};
use crate::Result;
use crate::device::runtime::{DevPtr, Pinned};

/// How the host uses the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caching {
    /// Read and written.
    Cached,
    /// Written from the first byte to the last and never read, because reads would be very slow.
    WriteCombined,
}

/// A page-locked allocation.
pub(super) struct CudaPinned {
    release: Arc<Release>,
    host: *mut u8,
    device: DevPtr,
    len: usize,
}

// SAFETY: plain memory with a stable address; the contract of `Pinned` says who may touch which bytes when.
unsafe impl Send for CudaPinned {}
// SAFETY: as above; only raw pointers are handed out.
unsafe impl Sync for CudaPinned {}

impl CudaPinned {
    /// Allocates zeroed memory. With `mapped` the device can read and write it in place.
    pub fn new(
        context: &Context,
        release: &Arc<Release>,
        len: usize,
        caching: Caching,
        mapped: bool,
    ) -> Result<CudaPinned> {
        context.bind()?;
        release.reap(false);
        let _relaxed = Relaxed::enter();
        let mut flags = sys::CU_MEMHOSTALLOC_PORTABLE;
        if mapped {
            flags |= sys::CU_MEMHOSTALLOC_DEVICEMAP;
        }
        if caching == Caching::WriteCombined {
            flags |= sys::CU_MEMHOSTALLOC_WRITECOMBINED;
        }
        let mut host: *mut c_void = std::ptr::null_mut();
        // SAFETY: the context is current; the address outlives the call.
        let code = unsafe { sys::cuMemHostAlloc(&mut host, len.max(1), flags) };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            // Not a lack of capacity: less of the device's memory is no way out.
            return Err(device(
                &context.name,
                format!(
                    "the host has no {} to page-lock; raise the limit of locked memory (ulimit -l), or use `device` cpu",
                    mib(len as u64)
                ),
            ));
        }
        context.check("page-locked host memory", code)?;
        let mut this = CudaPinned { release: release.clone(), host: host.cast(), device: DevPtr::NULL, len };
        // SAFETY: `host` has at least `len` bytes, to which nobody else has a pointer yet.
        unsafe { std::ptr::write_bytes(this.host, 0, len) };
        if mapped {
            let mut device = 0;
            // SAFETY: `host` was allocated with DEVICEMAP; the address outlives the call.
            let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0) };
            context.check("page-locked host memory", code)?;
            this.device = DevPtr(device);
        }
        Ok(this)
    }
}

impl Pinned for CudaPinned {
    fn host(&self) -> *mut u8 {
        self.host
    }
    fn device(&self) -> DevPtr {
        self.device
    }
    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for CudaPinned {
    fn drop(&mut self) {
        // A copy in flight may still use it.
        self.release.bury(Dead::Host(self.host.cast()));
    }
}
