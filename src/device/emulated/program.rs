//! The real kernels of `cuda/`, if this program contains them, built for the host by a C++ compiler.
//!
//! Without them (`cfg(tandem_emulation)` is not set) the accelerator has no kernels, only the operations
//! that run on the host.

use super::options::KernelChecks;
use crate::device::runtime::DevPtr;
use crate::{Error, Result};

/// A launch that owns its data.
#[derive(Debug, Clone)]
pub(super) struct OwnedLaunch {
    pub kernel: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub params: Vec<u8>,
}

#[cfg(tandem_emulation)]
pub(super) use built_in::{has_kernel, launch, mark_initialised, register, tensor_map_2d, unregister};
#[cfg(not(tandem_emulation))]
pub(super) use missing::{has_kernel, launch, mark_initialised, register, tensor_map_2d, unregister};

#[cfg(tandem_emulation)]
mod built_in {
    use super::*;
    use crate::device::emulated::ffi::{self, Config, Copies, Failure, Threads};
    use crate::device::emulated::options::{CopyTiming, Schedule};
    use crate::device::runtime::Launch;

    pub use ffi::{mark_initialised, unregister};

    /// The compute capability that the host build of the kernels stands for.
    const EMULATED_SM: u32 = 90;

    /// Registers memory with the kernels' checker; `initialised` says whether it may be read.
    pub fn register(ptr: DevPtr, len: usize, initialised: bool) {
        // SAFETY: the arena and pinned memory register what they have just mapped or given out, and
        // unregister it before they unmap or reuse it. References to it exist only while a host operation or a copy
        // runs, which the user orders against kernels by lanes and events.
        unsafe { ffi::register(ptr, len, initialised) }
    }

    /// Whether there is a kernel of that name that `sm` can run. A kernel's name ends in its requirements beyond those
    /// of its file.
    pub fn has_kernel(kernel: &str, sm: u32) -> bool {
        (sm >= EMULATED_SM || !needs_more(kernel, sm)) && ffi::has_kernel(kernel)
    }

    /// Whether the kernel needs another device: bf16 kernels need 80 or later, those of `*_sm90a.cu` need exactly 90.
    fn needs_more(kernel: &str, sm: u32) -> bool {
        kernel.contains("sm90a") || kernel.contains("wgmma") || sm < 80 && kernel.contains("bf16")
    }

    /// Runs a kernel to its end.
    pub fn launch(launch: &OwnedLaunch, checks: &KernelChecks) -> Result<()> {
        ffi::configure(&Config {
            threads: match checks.schedule {
                Schedule::Ascending => Threads::Ascending,
                Schedule::Descending => Threads::Descending,
                Schedule::Random => Threads::Random,
                Schedule::Preempted => Threads::Preempted,
            },
            copies: match checks.copies {
                CopyTiming::AtOnce => Copies::AtOnce,
                CopyTiming::AtWait => Copies::AtWait,
                CopyTiming::Random => Copies::Random,
            },
            races: checks.races,
            global_races: checks.global_races,
            uninitialised: checks.races,
            seed: checks.seed,
        });
        let outcome = ffi::launch(&Launch {
            kernel: &launch.kernel,
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            params: &launch.params,
        });
        outcome.map_err(|failure| Error::Device {
            what: format!("kernel {}", launch.kernel),
            problem: match failure {
                Failure::UnknownKernel => "there is none of that name".into(),
                Failure::BadLaunch(why) | Failure::Fault(why) => why,
            },
        })
    }

    /// See [`Runtime::tensor_map_2d`](crate::device::runtime::Runtime::tensor_map_2d).
    pub fn tensor_map_2d(
        base: DevPtr,
        rows: u64,
        cols: u64,
        stride: u64,
        box_rows: u32,
        box_cols: u32,
    ) -> Result<[u8; 128]> {
        ffi::tensor_map_2d(base, rows, cols, stride, box_rows, box_cols).ok_or_else(|| Error::Device {
            what: "emulated accelerator".into(),
            problem: format!(
                "no tensor map of a matrix of {rows} x {cols}, rows {stride} apart, at {:#x}, in boxes of \
                 {box_rows} x {box_cols}",
                base.0
            ),
        })
    }
}

#[cfg(not(tandem_emulation))]
mod missing {
    use super::*;

    pub fn register(_ptr: DevPtr, _len: usize, _initialised: bool) {}

    pub fn unregister(_ptr: DevPtr) {}

    pub fn mark_initialised(_ptr: DevPtr, _len: usize) {}

    pub fn has_kernel(_kernel: &str, _sm: u32) -> bool {
        false
    }

    fn absent(what: String) -> Error {
        Error::Device { what, problem: "this program has no kernels of cuda/ built for the host".into() }
    }

    pub fn launch(launch: &OwnedLaunch, _checks: &KernelChecks) -> Result<()> {
        let OwnedLaunch { kernel, grid, block, shared, params } = launch;
        let size = params.len();
        Err(absent(format!("kernel {kernel} ({grid:?} x {block:?}, {shared} B shared, {size} B params)")))
    }

    pub fn tensor_map_2d(
        _base: DevPtr,
        rows: u64,
        cols: u64,
        _stride: u64,
        _box_rows: u32,
        _box_cols: u32,
    ) -> Result<[u8; 128]> {
        Err(absent(format!("tensor map of {rows} x {cols}")))
    }
}
