//! NVIDIA GPUs, through the driver's own interface (libcuda), which is loaded when it is first needed.
//!
//! * `driver` finds the driver and its devices ([`find_driver`], [`Driver`], [`ListedDevice`]); `errors` turns its codes into sentences.
//! * `context` is a device in use: its lanes (streams), the last work enqueued, whether it is lost.
//! * `memory`, `staging`, `landing`, `pinned`, `slab` are its memory and the transfers to and from it.
//! * `modules` loads the kernels of this build, each file ahead of time or when its first kernel is launched; `image`
//!   chooses between machine code and PTX; `usage` reports the resources of a loaded kernel.
//! * `capture` records work so that it can be replayed with one launch; `events` are points in lanes.
//! * `wsl` tells whether Windows' driver is below, which never refuses memory ([`on_wsl`]).
//! * `release` frees resources after the work in flight; `gate` keeps that apart from recordings.
//! * `runtime` implements the runtime contract with them. Nothing above this folder names CUDA.

mod capture;
mod context;
mod driver;
mod errors;
mod events;
mod gate;
mod image;
mod landing;
mod memory;
mod modules;
mod pinned;
mod release;
mod ring;
mod runtime;
mod slab;
mod staging;
mod tensor_map;
mod usage;
mod wsl;

use std::sync::Arc;

pub use driver::{Driver, ListedDevice, find_driver};
pub use errors::{driver_release, least_cuda};
pub use runtime::CudaRuntime;
pub use usage::KernelUsage;
pub use wsl::on_wsl;

use crate::Result;

/// How a GPU is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CudaOptions {
    /// Which of the driver's devices, from 0.
    pub ordinal: u32,
    /// Use at most this many bytes of its memory.
    pub memory: Option<u64>,
    /// Run the kernels of an older GPU: `75` takes the path of a T4 on any device. For tests.
    pub pretend_sm: Option<u32>,
}

/// Opens a GPU.
///
/// # Errors
/// If there is no driver or no such device, the driver is too old for this build's kernels, or the build has no
/// kernels; each error says what to do about it.
pub fn open(options: &CudaOptions) -> Result<Arc<CudaRuntime>> {
    CudaRuntime::open(options).map(Arc::new)
}

/// Checks that there is a driver and such a device, without opening it.
///
/// # Errors
/// As [`open`], as far as that can be told.
pub fn check(ordinal: u32) -> Result<()> {
    driver::find_driver()?.device(ordinal).map(|_| ())
}
