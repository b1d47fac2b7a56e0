//! NVIDIA GPUs, through the driver's own interface (libcuda), which is loaded when it is first needed.
//!
//! * [`driver`] finds the driver and its devices; `errors` turns its codes into sentences.
//! * `context` is a device in use: its lanes (streams), what was enqueued last, whether it is lost.
//! * `memory`, `staging`, `landing`, `pinned`, `slab` are its memory and the ways there and back.
//! * `modules` loads the kernels of this build, a file when its first kernel is launched or ahead; `image` chooses
//!   between machine code and PTX; `usage` is what became of a kernel.
//! * `capture` records work once, to be replayed as one; `events` are points in lanes.
//! * `release` gives things back behind the work in flight; `gate` keeps that apart from recordings.
//! * `runtime` is the contract over them. Nothing above this folder names CUDA.

mod capture;
mod context;
pub mod driver;
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

use std::sync::Arc;

pub use errors::{driver_release, least_cuda};
pub use runtime::CudaRuntime;
pub use usage::KernelUsage;

use crate::Result;

/// How a GPU is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CudaOptions {
    /// Which of the driver's devices, from 0.
    pub ordinal: u32,
    /// Use at most this many bytes of its memory.
    pub memory: Option<u64>,
    /// Run the kernels of an older GPU: `75` takes the path of a T4 on whatever is there. For tests.
    pub pretend_sm: Option<u32>,
}

/// Opens a GPU.
///
/// # Errors
/// No driver, no such device, a driver too old for this build's kernels, a build without kernels: each with
/// what to do about it.
pub fn open(options: &CudaOptions) -> Result<Arc<CudaRuntime>> {
    CudaRuntime::open(options).map(Arc::new)
}

/// Whether there is a driver and such a device, without opening it.
///
/// # Errors
/// As [`open`], as far as that can be told.
pub fn check(ordinal: u32) -> Result<()> {
    driver::find()?.device(ordinal).map(|_| ())
}
