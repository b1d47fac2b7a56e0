//! From a name to an accelerator.

use std::str::FromStr;
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
    /// CPU threads in its role.
    Emulated(Emulation),
}

/// What an emulated accelerator runs. A name means the same in every build: a build that lacks something refuses its
/// name and takes nothing else in its place (docs/decisions/0015).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Emulation {
    /// `emulated`: plain functions on the host. In every build.
    Functions,
    /// `emulated:kernels`: the kernels of `cuda/` compiled for the host, a thousand times slower. Only in builds with
    /// the feature `host-emulation`.
    Kernels,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Cuda(i) => write!(f, "cuda:{i}"),
            Kind::Emulated(Emulation::Functions) => f.write_str("emulated"),
            Kind::Emulated(Emulation::Kernels) => f.write_str("emulated:kernels"),
        }
    }
}

impl Kind {
    /// What [`Kind::from_str`] reads.
    pub const NAMES: &str = "cuda, cuda:N, emulated, emulated:kernels";
}

impl FromStr for Kind {
    type Err = String;

    /// `cuda`, `cuda:N`, `emulated`, `emulated:kernels`. What stands behind the colon is each device's own to read.
    fn from_str(text: &str) -> std::result::Result<Kind, String> {
        let (device, which) = match text.split_once(':') {
            Some((device, which)) => (device, Some(which)),
            None => (text, None),
        };
        match (device, which) {
            ("cuda", None) => Some(Kind::Cuda(0)),
            ("cuda", Some(i)) => i.parse().ok().map(Kind::Cuda),
            ("emulated", None) => Some(Kind::Emulated(Emulation::Functions)),
            ("emulated", Some("kernels")) => Some(Kind::Emulated(Emulation::Kernels)),
            _ => None,
        }
        .ok_or_else(|| format!("choose one of {}", Kind::NAMES))
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
        Kind::Emulated(Emulation::Functions) => Ok(()),
        Kind::Emulated(Emulation::Kernels) => match super::built::NO_EMULATION {
            None => Ok(()),
            Some(why) => Err(crate::Error::Unsupported(format!(
                "--device {kind}: this program does not contain the kernels for the host ({why}); \
                 `cargo run --features host-emulation` builds one that does, --device emulated needs none"
            ))),
        },
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
        Kind::Emulated(what) => {
            check(kind)?;
            let memory = memory.unwrap_or(EMULATED_MEMORY);
            let options = EmulatedOptions { memory, checks: KernelChecks::FAST, ..Default::default() };
            let runtime = Arc::new(EmulatedRuntime::new(options)?);
            match what {
                Emulation::Functions => Ok(Arc::new(EmulatedAccelerator::new(runtime))),
                Emulation::Kernels => on_kernels(runtime),
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_reads_what_it_writes() {
        for kind in [
            Kind::Cuda(0),
            Kind::Cuda(3),
            Kind::Emulated(Emulation::Functions),
            Kind::Emulated(Emulation::Kernels),
        ] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert_eq!("cuda".parse(), Ok(Kind::Cuda(0)));
        for bad in
            ["", "gpu", "cuda:", "cuda:x", "emulated:", "emulated:kernel", "emulated:kernels:x", "emulatedx"]
        {
            let said = bad.parse::<Kind>().expect_err(bad);
            assert!(said.contains("choose one of") && said.contains("emulated:kernels"), "{bad}: {said}");
        }
    }

    /// What is not linked is refused in a sentence, not replaced.
    #[test]
    fn kernels_on_the_host_exist_only_where_they_are_linked() {
        let kind = Kind::Emulated(Emulation::Kernels);
        match super::super::built::NO_EMULATION {
            None => assert!(check(kind).is_ok() && open(kind, Some(1 << 20)).is_ok()),
            Some(why) => {
                let said = check(kind).expect_err("not linked").to_string();
                assert!(said.contains(why) && said.contains("cargo run --features host-emulation"), "{said}");
                assert_eq!(open(kind, Some(1 << 20)).err().expect("not linked").to_string(), said);
            }
        }
        assert!(check(Kind::Emulated(Emulation::Functions)).is_ok());
    }
}
