//! The real kernels of `cuda/`, when this program has them: built for the host by a C++ compiler.
//!
//! Without them (`cfg(tandem_emulation)` is not set) the accelerator has no kernels, only the operations
//! that run on the host.

use super::options::KernelChecks;
use crate::device::runtime::DevPtr;
use crate::{Error, Result};

/// One launch, owned.
#[derive(Debug, Clone)]
pub(super) struct OwnedLaunch {
    pub kernel: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub params: Vec<u8>,
}

/// What the checker of kernels knows of memory: `initialised` says whether it may be read.
pub(super) fn register(_ptr: DevPtr, _len: usize, _initialised: bool) {}

/// Forgets memory.
pub(super) fn unregister(_ptr: DevPtr) {}

/// A copy or fill has written it.
pub(super) fn mark_initialised(_ptr: DevPtr, _len: usize) {}

/// Whether there is a kernel of that name for `sm`.
pub(super) fn has_kernel(_kernel: &str, _sm: u32) -> bool {
    false
}

/// Runs a kernel to its end.
pub(super) fn launch(launch: &OwnedLaunch, _sm: u32, _checks: &KernelChecks) -> Result<()> {
    Err(Error::Device {
        what: format!("kernel {}", launch.kernel),
        problem: "the kernels of cuda/ were not built into this program for host emulation".into(),
    })
}

/// See [`Runtime::tensor_map_2d`](crate::device::runtime::Runtime::tensor_map_2d).
pub(super) fn tensor_map_2d(
    _base: DevPtr,
    _rows: u64,
    _cols: u64,
    _stride: u64,
    _box_rows: u32,
    _box_cols: u32,
) -> Result<[u8; 128]> {
    Err(Error::Unsupported("emulated accelerator: kernels of cuda/ are not in this program".into()))
}
