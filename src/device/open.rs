//! Opens an accelerator by name.

use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use super::accelerator::Accelerator;
use super::clock::{Clock, Rates};
use super::cuda::CudaOptions;
use super::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, KernelChecks};
use super::machine;
use super::runtime::Runtime;
use super::self_test::{SelfTest, all_of, vetted};
use super::timed::Timed;
use crate::Result;
use crate::hardware::Hardware;

/// The kind of an accelerator.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// An NVIDIA GPU, by number.
    Cuda(u32),
    /// An accelerator emulated by CPU threads.
    Emulated(Emulation),
    /// An emulated accelerator in emulated time, with the speed of this described machine: `emulated:t4-xeon`.
    Timed(Emulation, Arc<Hardware>),
}

/// What an emulated accelerator runs. A name means the same in every build: a build without the requested kind returns
/// an error and substitutes nothing (docs/decisions/0015).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Emulation {
    /// `emulated`: plain functions on the host; available in every build.
    Functions,
    /// `emulated:kernels`: the kernels of `cuda/` compiled for the host, a thousand times slower; only in builds with
    /// the feature `host-emulation`.
    Kernels,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Cuda(i) => write!(f, "cuda:{i}"),
            Kind::Emulated(Emulation::Functions) => f.write_str("emulated"),
            Kind::Emulated(Emulation::Kernels) => f.write_str("emulated:kernels"),
            Kind::Timed(Emulation::Functions, machine) => write!(f, "emulated:{}", machine.name),
            Kind::Timed(Emulation::Kernels, machine) => write!(f, "emulated:{},kernels", machine.name),
        }
    }
}

impl Kind {
    /// The names that [`Kind::from_str`] accepts, for messages.
    pub const NAMES: &str =
        "cuda, cuda:N, emulated, emulated:kernels, emulated:HARDWARE, emulated:HARDWARE,kernels";

    /// What it runs, if it is emulated.
    pub fn emulation(&self) -> Option<Emulation> {
        match self {
            Kind::Cuda(_) => None,
            Kind::Emulated(what) | Kind::Timed(what, _) => Some(*what),
        }
    }
}

impl FromStr for Kind {
    type Err = String;

    /// `cuda`, `cuda:N`, `emulated`, `emulated:kernels`, `emulated:HARDWARE[,kernels]`. Each device interprets the text
    /// after the colon; HARDWARE is the name of a description in `hardware/`, or a file.
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
            ("emulated", Some(which)) => return timed(which),
            _ => None,
        }
        .ok_or_else(|| format!("choose one of {}", Kind::NAMES))
    }
}

/// `HARDWARE[,kernels]`.
fn timed(text: &str) -> std::result::Result<Kind, String> {
    let (name, what) = match text.strip_suffix(",kernels") {
        Some(name) => (name, Emulation::Kernels),
        None => (text, Emulation::Functions),
    };
    match machine::find_machine(name) {
        Ok(Some(found)) => Ok(Kind::Timed(what, Arc::new(found))),
        Ok(None) => Err(format!(
            "`{name}` is no machine and no file; choose one of {}, with HARDWARE the path of a TOML file or one of {}",
            Kind::NAMES,
            machine::machine_names()
        )),
        Err(e) => Err(e.to_string()),
    }
}

/// Default memory of the emulated accelerator in bytes.
const EMULATED_MEMORY: u64 = 8 << 30;

/// Checks cheaply whether [`open`] can succeed, so that an error can be reported before a model is fetched or read.
///
/// # Errors
/// If there is no driver, no such device, or this program contains no kernels for it.
pub fn check(kind: &Kind) -> Result<()> {
    match kind {
        Kind::Cuda(ordinal) => super::cuda::check(*ordinal),
        Kind::Timed(what, machine) => {
            Rates::of(machine)?;
            check(&Kind::Emulated(*what))
        }
        Kind::Emulated(Emulation::Functions) => Ok(()),
        Kind::Emulated(Emulation::Kernels) => match super::built::NO_EMULATION {
            None => Ok(()),
            Some(why) => Err(crate::Error::Unsupported(format!(
                "`device` {kind}: this program does not contain the kernels for the host ({why}); \
                 `cargo run --features host-emulation` builds one that does, `device` emulated needs none"
            ))),
        },
    }
}

/// Opens an accelerator that may use `memory` bytes of its memory. `None` allows all of it; in emulated time, that is
/// the memory in the machine's description.
///
/// # Errors
/// [`crate::Error::Device`] if there is no such accelerator, its driver cannot run this program's kernels, or it fails the
/// self-test that [`self_test_opened_gpus`](super::self_test_opened_gpus) asked for;
/// [`crate::Error::Unsupported`] if this program has no kernels for it. Both suggest a remedy.
pub fn open(kind: &Kind, memory: Option<u64>) -> Result<Arc<dyn Accelerator>> {
    match kind {
        Kind::Cuda(ordinal) => {
            let open = |memory| {
                let options = CudaOptions { ordinal: *ordinal, memory, ..Default::default() };
                super::cuda::open(&options).map(|rt| rt as Arc<dyn Runtime>)
            };
            on_kernels(vetted(open(memory)?, &|| open(None))?)
        }
        Kind::Emulated(what) => {
            check(kind)?;
            emulated(*what, Arc::new(EmulatedRuntime::new(options(memory.unwrap_or(EMULATED_MEMORY)))?))
        }
        Kind::Timed(what, machine) => {
            check(kind)?;
            let clock = Arc::new(Clock::new(Rates::of(machine)?));
            let all = machine.accelerator.map_or(EMULATED_MEMORY, |(gpu, _)| gpu.mem_bytes as u64);
            let runtime = EmulatedRuntime::timed(options(memory.unwrap_or(all)), clock.clone())?;
            let runtime = Arc::new(runtime);
            Ok(Arc::new(Timed::new(emulated(*what, runtime.clone())?, runtime, clock)))
        }
    }
}

/// Runs all of the self-test on a device. With `keep`, a folder, its verdict is kept there: with the folder of
/// [`self_test_opened_gpus`](super::self_test_opened_gpus), in the place of the quick one.
///
/// # Errors
/// As [`open`]; [`crate::Error::Usage`] for a device that runs no kernels; [`crate::Error::Io`] if the verdict cannot be kept.
pub fn self_test(kind: &Kind, keep: Option<&Path>) -> Result<SelfTest> {
    check(kind)?;
    let runtime: Arc<dyn Runtime> = match kind {
        Kind::Cuda(ordinal) => super::cuda::open(&CudaOptions { ordinal: *ordinal, ..Default::default() })?,
        Kind::Emulated(Emulation::Kernels) => Arc::new(EmulatedRuntime::new(options(EMULATED_MEMORY))?),
        _ => {
            let why = "it runs plain functions, no kernels; choose cuda, cuda:N or emulated:kernels";
            return Err(crate::Error::usage(format!("self-test of {kind}: {why}")));
        }
    };
    all_of(&runtime, keep)
}

fn options(memory: u64) -> EmulatedOptions {
    EmulatedOptions { memory, checks: KernelChecks::FAST, ..Default::default() }
}

fn emulated(what: Emulation, runtime: Arc<EmulatedRuntime>) -> Result<Arc<dyn Accelerator>> {
    match what {
        Emulation::Functions => Ok(Arc::new(EmulatedAccelerator::new(runtime))),
        Emulation::Kernels => on_kernels(runtime),
    }
}

/// The accelerator contract, implemented with the kernels of `cuda/`.
///
/// # Errors
/// [`crate::Error::Unsupported`] if this program contains none.
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
        let t4 = Arc::new(crate::hardware::named("t4-xeon").unwrap());
        for kind in [
            Kind::Cuda(0),
            Kind::Cuda(3),
            Kind::Emulated(Emulation::Functions),
            Kind::Emulated(Emulation::Kernels),
            Kind::Timed(Emulation::Functions, t4.clone()),
            Kind::Timed(Emulation::Kernels, t4),
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
        for bad in ["emulated:t4", "emulated:t4-xeon,fast", "emulated:,kernels"] {
            let said = bad.parse::<Kind>().expect_err(bad);
            assert!(said.contains("is no machine") && said.contains("rtx4060-laptop, "), "{bad}: {said}");
        }
    }

    /// An accelerator in emulated time has the described machine's memory, and its clock starts at 0.
    #[test]
    fn an_accelerator_in_emulated_time_is_as_large_as_its_machine() {
        let kind: Kind = "emulated:t4-xeon".parse().unwrap();
        let memory = |kind: &Kind, cap| open(kind, cap).unwrap().runtime().memory_free().unwrap();
        assert_eq!((memory(&kind, None), memory(&kind, Some(1 << 20))), (16_000_000_000, 1 << 20));
        let accel = open(&kind, Some(1 << 20)).unwrap();
        assert_eq!(accel.runtime().clock().expect("it keeps time").now(), 0.0);
        let plain = open(&Kind::Emulated(Emulation::Functions), Some(1 << 20)).unwrap();
        assert!(plain.runtime().clock().is_none());
    }

    /// A kind that is not linked is refused with a message, not replaced.
    #[test]
    fn kernels_on_the_host_exist_only_where_they_are_linked() {
        let kind = Kind::Emulated(Emulation::Kernels);
        match super::super::built::NO_EMULATION {
            None => assert!(check(&kind).is_ok() && open(&kind, Some(1 << 20)).is_ok()),
            Some(why) => {
                let said = check(&kind).expect_err("not linked").to_string();
                assert!(said.contains(why) && said.contains("cargo run --features host-emulation"), "{said}");
                assert_eq!(open(&kind, Some(1 << 20)).err().expect("not linked").to_string(), said);
            }
        }
        assert!(check(&Kind::Emulated(Emulation::Functions)).is_ok());
    }
}
