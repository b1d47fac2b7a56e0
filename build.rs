//! Prepares what Cargo alone cannot: kernels for GPUs, their parameter structs, their host emulation.
//!
//! 1. [`abi`]: the parameter structs of `cuda/include/abi.h`, by bindgen    -> cfg `tandem_kernels`
//! 2. [`ptx`]: every `cuda/*.cu` by nvcc for every target, lowered by [`isa`] to the language of older drivers, and by
//!    [`assemble`] the machine code of common GPUs, held against the files' [`promises`]; embedded -> cfg `tandem_ptx`
//! 3. [`emulation`]: the same files by the C++ compiler, linked, for tests  -> cfg `tandem_emulation`
//!
//! Each needs a tool that a machine may lack. Without it that part is left out, with one warning that says
//! how to get it, and the rest builds. A tool that is there and reports an error fails the build.
//!
//! `TANDEM_NO_CUDA=1` leaves out the second part, for short turn-around.

#[path = "build/abi.rs"]
mod abi;
#[path = "build/assemble.rs"]
mod assemble;
#[path = "build/cache.rs"]
mod cache;
#[path = "build/emulation.rs"]
mod emulation;
#[path = "build/info.rs"]
mod info;
#[path = "build/isa.rs"]
mod isa;
#[path = "build/jobs.rs"]
mod jobs;
#[path = "build/promises.rs"]
mod promises;
#[path = "build/ptx.rs"]
mod ptx;
#[path = "build/report.rs"]
mod report;
#[path = "build/tools.rs"]
mod tools;
#[path = "build/usage.rs"]
mod usage;

use std::process::ExitCode;

/// Why a part failed (fails the build).
type Result<T> = std::result::Result<T, String>;

/// A part that was made, or the reason why it could not be on this machine.
enum Part<T> {
    Made(T),
    Missing(String),
}

impl<T> Part<T> {
    /// Sets the cfg, or warns. Returns the reason of the absence.
    fn announce(&self, cfg: &str) -> Option<&str> {
        match self {
            Part::Made(_) => {
                println!("cargo::rustc-cfg={cfg}");
                None
            }
            Part::Missing(why) => Some(why),
        }
    }
}

fn build() -> Result<()> {
    for path in ["build.rs", "build", "cuda"] {
        println!("cargo::rerun-if-changed={path}");
    }
    // A path that does not exist would make every build run this again.
    for path in [".cuda", ".cuda/pyvenv.cfg"] {
        if std::path::Path::new(path).is_file() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    for name in tools::VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }

    let abi = abi::generate()?;
    let no_abi = abi.announce("tandem_kernels");
    if let Some(why) = no_abi {
        println!("cargo::warning=no kernels: {why}");
    }

    let ptx = ptx::compile()?;
    let no_ptx = ptx.announce("tandem_ptx");
    if let Some(why) = no_ptx {
        println!("cargo::warning=no GPU code: {why}");
    }

    let emulation = match no_abi {
        None => emulation::build()?,
        Some(why) => Part::Missing(why.to_owned()),
    };
    let no_emulation = emulation.announce("tandem_emulation");
    // One warning for one cause: without the structs there is no emulation either.
    if let (None, Some(why), true) = (no_abi, no_emulation, emulation::wanted()) {
        println!("cargo::warning=no host emulation of GPU kernels: {why}");
    }

    info::write(no_abi, &ptx, no_emulation)
}

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            // The message goes to stderr whole (Cargo shows it), its first line as the error.
            eprintln!("{message}");
            println!("cargo::error={}", message.lines().next().unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}
