//! Host memory of exact size, mapped by us and page-locked in one registration.
//!
//! Unlike memory that the driver allocates (`super::pinned`, small pages on one memory node), we map its pages ourselves: huge ones,
//! touched first by the threads that will read them; any size works without rounding, and if the system refuses to lock that much,
//! the same memory is used unlocked.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::context::{Context, Relaxed};
use super::errors::{describe, is_fatal, mib};
use super::release::{Dead, Release};
use crate::Result;
use crate::device::runtime::{DevPtr, Pinned};
use crate::host::{HUGE_PAGE, Mapping};

pub(super) struct CudaSlab {
    release: Arc<Release>,
    /// Given to `release` in the end.
    map: Option<Mapping>,
    len: usize,
    registered: bool,
    device: DevPtr,
}

impl CudaSlab {
    /// Allocates zeroed memory, which `touch` is given before it is locked; also returns the reason if it is not page-locked.
    pub fn new(
        context: &Context,
        release: &Arc<Release>,
        bytes: usize,
        mapped: bool,
        touch: &dyn Fn(*mut u8),
    ) -> Result<(CudaSlab, Option<String>)> {
        let name = &context.name;
        context.bind()?;
        release.reap(false);
        let len = bytes.max(1);
        let map = Mapping::new(len, len >= HUGE_PAGE, &format!("{name}: page-locked memory"))?;
        touch(map.base());
        let base = map.base().cast::<c_void>();
        let map = Some(map);
        let mut slab =
            CudaSlab { release: release.clone(), map, len: bytes, registered: false, device: DevPtr::NULL };
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
        self.map.as_ref().expect("it is taken when this is dropped").base()
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
        if let Some(map) = self.map.take() {
            self.release.bury(Dead::Slab { map, registered: self.registered });
        }
    }
}
