//! From a name to an accelerator.

use std::sync::Arc;

use super::accelerator::Accelerator;
use super::cuda::CudaOptions;
use super::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, KernelChecks};
use super::runtime::Runtime;
use crate::Result;

/// Which accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An NVIDIA GPU, by number.
    Cuda(u32),
    /// CPU threads in its role, that run the real kernels where this program has them for the host, and plain
    /// functions otherwise.
    Emulated,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Cuda(i) => write!(f, "cuda:{i}"),
            Kind::Emulated => f.write_str("emulated"),
        }
    }
}

/// Memory of the emulated accelerator, unless told otherwise.
const EMULATED_MEMORY: u64 = 8 << 30;

/// Whether [`open`] has a chance, at no cost: for saying so before a model is fetched or read.
///
/// # Errors
/// No driver, no such device; no kernels in this program.
pub fn check(kind: Kind) -> Result<()> {
    match kind {
        Kind::Cuda(ordinal) => super::cuda::check(ordinal),
        Kind::Emulated => Ok(()),
    }
}

/// Opens an accelerator that may use `memory` bytes of its memory (all of it if `None`).
///
/// # Errors
/// [`crate::Error::Device`]: there is none, or its driver cannot run this program's kernels; [`crate::Error::Unsupported`]: this
/// program has no kernels for it. Both say what would help.
pub fn open(kind: Kind, memory: Option<u64>) -> Result<Arc<dyn Accelerator>> {
    match kind {
        Kind::Cuda(ordinal) => {
            on_kernels(super::cuda::open(&CudaOptions { ordinal, memory, ..Default::default() })?)
        }
        Kind::Emulated => {
            let memory = memory.unwrap_or(EMULATED_MEMORY);
            let options = EmulatedOptions { memory, checks: KernelChecks::FAST, ..Default::default() };
            let runtime = Arc::new(EmulatedRuntime::new(options)?);
            let on_host = || Arc::new(EmulatedAccelerator::new(runtime.clone()));
            Ok(on_kernels(runtime.clone()).unwrap_or_else(|_| on_host()))
        }
    }
}

/// The contract by the kernels of `cuda/`.
///
/// # Errors
/// [`crate::Error::Unsupported`]: this program has none.
pub fn on_kernels(runtime: Arc<dyn Runtime>) -> Result<Arc<dyn Accelerator>> {
    #[cfg(tandem_kernels)]
    return Ok(Arc::new(super::kernels::accelerator::KernelAccelerator::new(runtime)?));
    #[cfg(not(tandem_kernels))]
    Err(crate::Error::Unsupported(format!(
        "{}: this program was built without its kernels' parameter structs; run scripts/get-nvcc and build again",
        runtime.info().name
    )))
}
