//! GPUs: the driver, the devices that it reports, and the kernels in this program.

use std::collections::BTreeMap;

use serde::Serialize;
use tandem::device::built::{self, MODULES};
use tandem::device::cuda::{self, CudaOptions, ListedDevice, find_driver};
use tandem::device::{self, Emulation, Kind};

use crate::cli::progress::megabytes;

/// NVIDIA's driver, its devices, our kernels.
#[derive(Debug, Serialize)]
pub struct Cuda {
    pub driver: bool,
    /// The newest CUDA version that the driver knows: `12.4`.
    pub version: Option<String>,
    /// Why there is no driver, or why its devices cannot be listed.
    pub problem: Option<String>,
    pub devices: Vec<GpuFacts>,
    /// Whether Windows' driver is in charge (WSL).
    pub wsl: bool,
    pub kernels: KernelFacts,
    /// Whether this program has each `--device emulated...`.
    pub emulated: BTreeMap<String, bool>,
    /// Why kernels cannot run on the host in this program, if they cannot.
    pub no_emulation: Option<&'static str>,
}

/// A GPU.
#[derive(Debug, Serialize)]
pub struct GpuFacts {
    pub name: String,
    /// `8.6`.
    pub compute_capability: String,
    pub memory: u64,
    pub multiprocessors: u32,
    /// The part of a GPU that it is: `1g.10gb` (MIG).
    pub slice: Option<String>,
    /// Why the device cannot be used, if it cannot.
    pub problem: Option<String>,
}

/// The kernels in this program.
#[derive(Debug, Serialize)]
pub struct KernelFacts {
    /// The compiler that built the kernels.
    pub nvcc: Option<&'static str>,
    /// Why there are no kernels.
    pub problem: Option<&'static str>,
    /// By target: `80` runs on compute capability 8.0 and later, `90a` on 9.0 only.
    pub targets: BTreeMap<String, Target>,
    /// Kernels in machine code for each compute capability; other GPUs' drivers compile the PTX.
    pub machine_code: BTreeMap<String, usize>,
    /// The oldest driver that loads the machine code.
    pub machine_code_driver: Option<&'static str>,
}

/// The PTX of a target.
#[derive(Debug, Default, Serialize)]
pub struct Target {
    pub kernels: usize,
    /// The newest PTX version that one of its files needs: `7.8`.
    pub ptx: String,
    /// The oldest driver release that loads all of its files.
    pub driver: &'static str,
    #[serde(skip)]
    newest: (u32, u32),
}

/// Collects the report.
pub fn cuda() -> Cuda {
    let found = find_driver();
    let listed =
        found.as_ref().map_err(|e| e.to_string()).and_then(|d| d.devices().map_err(|e| e.to_string()));
    let mut targets: BTreeMap<String, Target> = BTreeMap::new();
    let mut machine_code = BTreeMap::new();
    for module in MODULES {
        let target = targets.entry(module.target()).or_default();
        target.kernels += module.kernels.len();
        target.newest = target.newest.max(module.version);
        for code in module.code {
            let name = format!("{}{}", code.sm, if module.exact { "a" } else { "" });
            *machine_code.entry(name).or_insert(0) += module.kernels.len();
        }
    }
    for target in targets.values_mut() {
        target.ptx = format!("{}.{}", target.newest.0, target.newest.1);
        target.driver = cuda::driver_release(cuda::least_cuda(target.newest));
    }
    // Machine code runs on every driver of its major release.
    let code_cuda = built::CODE_CUDA / 1000 * 1000;
    let machine_code_driver = (code_cuda > 0).then(|| cuda::driver_release(code_cuda));
    let (devices, problem) = match listed {
        Ok(devices) => (devices, None),
        Err(problem) => (Vec::new(), Some(problem)),
    };
    Cuda {
        driver: found.is_ok(),
        version: found.ok().map(|d| format!("{}.{}", d.version / 1000, d.version % 1000 / 10)),
        problem,
        // Known by the driver, too, which is loaded by now.
        wsl: cuda::on_wsl(),
        devices: devices.into_iter().zip(0..).map(|(listed, ordinal)| device(listed, ordinal)).collect(),
        kernels: KernelFacts {
            nvcc: built::NVCC.ok(),
            problem: built::NVCC.err(),
            targets,
            machine_code,
            machine_code_driver,
        },
        emulated: [Emulation::Functions, Emulation::Kernels]
            .map(Kind::Emulated)
            .map(|kind| (kind.to_string(), device::check(&kind).is_ok()))
            .into(),
        no_emulation: built::NO_EMULATION,
    }
}

/// Opens a device to check whether that works.
fn device(listed: ListedDevice, ordinal: u32) -> GpuFacts {
    let opened = cuda::open(&CudaOptions { ordinal, ..CudaOptions::default() });
    GpuFacts {
        slice: device::slice(&listed.name).map(str::to_owned),
        name: listed.name,
        compute_capability: format!("{}.{}", listed.sm / 10, listed.sm % 10),
        memory: listed.memory,
        multiprocessors: listed.multiprocessors,
        problem: opened.err().map(|e| e.to_string()),
    }
}

impl Cuda {
    /// Rows of the report: a mark, the subject, the finding.
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
            let slice = match &device.slice {
                Some(slice) => {
                    format!(
                        "; a slice of a GPU (MIG {slice}) with {} multiprocessors",
                        device.multiprocessors
                    )
                }
                None => String::new(),
            };
            let found =
                format!("{}, compute capability {}, {memory}{slice}", device.name, device.compute_capability);
            match &device.problem {
                None => row('+', &format!("cuda:{at}"), found),
                Some(problem) => row('!', &format!("cuda:{at}"), format!("{found}: {problem}")),
            }
        }
        if self.wsl && !self.devices.is_empty() {
            let found = "Windows' driver pages device memory out to the host where it should refuse it: a tenth of the device is left alone, \
                         and what is free is asked for before each allocation";
            row('!', "wsl", found.to_owned());
        }
        match (self.kernels.nvcc, self.kernels.problem) {
            (Some(nvcc), _) => {
                let targets = self.kernels.targets.iter();
                let each = targets.map(|(name, t)| {
                    format!("{} for {name} (PTX {}, driver {} or later)", t.kernels, t.ptx, t.driver)
                });
                let all = each.collect::<Vec<_>>().join(", ");
                row('+', "cuda kernels", format!("{all} (nvcc {nvcc})"));
                if let Some(driver) = self.kernels.machine_code_driver {
                    let all = self.kernels.machine_code.keys().cloned().collect::<Vec<_>>().join(", ");
                    row('+', "machine code", format!("for {all} (driver {driver} or later)"));
                }
            }
            (None, why) => {
                row('-', "cuda kernels", format!("none in this build: {}", why.unwrap_or("no reason")))
            }
        }
        let emulated = match self.no_emulation {
            None => "plain functions; emulated:kernels runs the GPU's kernels on the host; emulated:t4-xeon and the like keep \
                     that machine's time"
                .to_owned(),
            Some(why) => format!(
                "plain functions; emulated:t4-xeon and the like keep that machine's time; no emulated:kernels in this build: {why}; \
                 `cargo run --features host-emulation`"
            ),
        };
        row('+', "emulated", emulated);
        rows
    }
}
