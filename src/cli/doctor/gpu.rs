//! GPUs: the driver, what it sees, and which kernels this program brings for it.

use std::collections::BTreeMap;

use serde::Serialize;
use tandem::device::built::{self, MODULES};
use tandem::device::cuda::{self, CudaOptions, driver};
use tandem::device::open::{self, Emulation, Kind};

use crate::cli::progress::megabytes;

/// NVIDIA's driver, its devices, our kernels.
#[derive(Debug, Serialize)]
pub struct Cuda {
    pub driver: bool,
    /// The newest CUDA version that the driver knows: `12.4`.
    pub version: Option<String>,
    /// Why there is no driver, or why its devices cannot be listed.
    pub problem: Option<String>,
    pub devices: Vec<Device>,
    pub kernels: Kernels,
    /// Whether this program has each `--device emulated...`.
    pub emulated: BTreeMap<String, bool>,
    /// Why kernels cannot run on the host in this program, if they cannot.
    pub no_emulation: Option<&'static str>,
}

/// A GPU.
#[derive(Debug, Serialize)]
pub struct Device {
    pub name: String,
    /// `8.6`.
    pub compute_capability: String,
    pub memory: u64,
    /// Why it cannot be used, if it cannot.
    pub problem: Option<String>,
}

/// The PTX in this program.
#[derive(Debug, Serialize)]
pub struct Kernels {
    /// The compiler that made it.
    pub nvcc: Option<&'static str>,
    /// Why there is none.
    pub problem: Option<&'static str>,
    /// Kernels of each target: `80` runs on compute capability 8.0 and later, `90a` on 9.0 only.
    pub targets: BTreeMap<String, usize>,
}

/// Looks for all of it.
pub fn cuda() -> Cuda {
    let found = driver::find();
    let listed =
        found.as_ref().map_err(|e| e.to_string()).and_then(|d| d.devices().map_err(|e| e.to_string()));
    let mut targets = BTreeMap::new();
    for module in MODULES {
        *targets.entry(module.target()).or_insert(0) += module.kernels.len();
    }
    let (devices, problem) = match listed {
        Ok(devices) => (devices, None),
        Err(problem) => (Vec::new(), Some(problem)),
    };
    Cuda {
        driver: found.is_ok(),
        version: found.ok().map(|d| format!("{}.{}", d.version / 1000, d.version % 1000 / 10)),
        problem,
        devices: devices.into_iter().zip(0..).map(|(listed, ordinal)| device(listed, ordinal)).collect(),
        kernels: Kernels { nvcc: built::NVCC.ok(), problem: built::NVCC.err(), targets },
        emulated: [Emulation::Functions, Emulation::Kernels]
            .map(Kind::Emulated)
            .map(|kind| (kind.to_string(), open::check(kind).is_ok()))
            .into(),
        no_emulation: built::NO_EMULATION,
    }
}

/// Opens it, to see whether that works.
fn device(listed: driver::Listed, ordinal: u32) -> Device {
    let opened = cuda::open(&CudaOptions { ordinal, ..CudaOptions::default() });
    Device {
        name: listed.name,
        compute_capability: format!("{}.{}", listed.sm / 10, listed.sm % 10),
        memory: listed.memory,
        problem: opened.err().map(|e| e.to_string()),
    }
}

impl Cuda {
    /// Rows of the report: a mark, what it is, what was found.
    pub fn describe(&self) -> Vec<(char, String, String)> {
        let mut rows = Vec::new();
        let mut row = |mark, what: &str, found: String| rows.push((mark, what.to_owned(), found));
        match (&self.version, &self.problem) {
            (Some(version), None) => row('+', "cuda driver", format!("found, up to CUDA {version}")),
            (Some(version), Some(problem)) => {
                row('!', "cuda driver", format!("up to CUDA {version}: {problem}"))
            }
            (None, problem) => {
                let problem = problem.as_deref().unwrap_or_default();
                row('-', "cuda driver", problem.trim_start_matches("--device cuda: ").to_owned())
            }
        }
        for (at, device) in self.devices.iter().enumerate() {
            let memory = megabytes(device.memory);
            let found =
                format!("{}, compute capability {}, {memory}", device.name, device.compute_capability);
            match &device.problem {
                None => row('+', &format!("cuda:{at}"), found),
                Some(problem) => row('!', &format!("cuda:{at}"), format!("{found}: {problem}")),
            }
        }
        match (self.kernels.nvcc, self.kernels.problem) {
            (Some(nvcc), _) => {
                let each = self.kernels.targets.iter().map(|(target, n)| format!("{n} for {target}"));
                let all = each.collect::<Vec<_>>().join(", ");
                row('+', "cuda kernels", format!("{all} (nvcc {nvcc})"));
            }
            (None, why) => {
                row('-', "cuda kernels", format!("none in this build: {}", why.unwrap_or("no reason")))
            }
        }
        let emulated = match self.no_emulation {
            None => "plain functions; emulated:kernels runs the GPU's kernels on the host".to_owned(),
            Some(why) => format!(
                "plain functions; no emulated:kernels in this build: {why}; `cargo run --features host-emulation`"
            ),
        };
        row('+', "emulated", emulated);
        rows
    }
}
