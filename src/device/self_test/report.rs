//! What a self-test found.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::device::built::MODULES;
use crate::device::runtime::DeviceInfo;
use crate::small_file;

/// How much is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Depth {
    /// The kernels that most models run: about a second.
    Quick,
    /// Every kernel.
    Full,
}

/// What a verdict is of: it holds for nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct About {
    /// Tandem's version.
    pub version: String,
    /// Which kernels this program contains: a hash of all of them.
    pub build: String,
    /// The driver's name of the device.
    pub device: String,
    /// Its compute capability: 90 for 9.0.
    pub sm: u32,
    /// The newest CUDA version that the driver knows: 13000 for 13.0.
    pub driver: u32,
    /// The driver's own line about its release, where the system has one.
    pub driver_release: Option<String>,
}

/// Where Linux says which release of NVIDIA's driver is loaded.
const RELEASE: &str = "/proc/driver/nvidia/version";

impl About {
    /// This program on a device.
    pub fn of(info: &DeviceInfo) -> About {
        let mut kernels = DefaultHasher::new();
        for module in MODULES {
            (module.name, module.target(), module.bytes()).hash(&mut kernels);
            for code in module.code {
                (code.sm, code.bytes()).hash(&mut kernels);
            }
        }
        let release = small_file::read_text(RELEASE.as_ref(), 4096).ok().flatten();
        About {
            version: env!("CARGO_PKG_VERSION").into(),
            build: format!("{:016x}", kernels.finish()),
            device: info.name.clone(),
            sm: info.sm,
            driver: info.driver,
            driver_release: release.and_then(|text| Some(text.lines().next()?.trim().to_owned())),
        }
    }

    /// The driver in a few words: its release, or the CUDA version that it knows.
    pub fn driver(&self) -> String {
        let cuda = format!("CUDA {}.{}", self.driver / 1000, self.driver % 1000 / 10);
        match &self.driver_release {
            Some(release) => format!("{cuda}, {}", release.trim_start_matches("NVRM version: ")),
            None => cuda,
        }
    }
}

/// What became of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every element was right.
    Passed,
    /// A kernel computed a wrong element, or failed.
    Failed,
    /// The device lacks what the group needs.
    Skipped,
    /// There was no memory for it, or a group before it took the device away.
    NotRun,
}

/// The verdict on a group of kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupReport {
    /// `products, dense`
    pub name: String,
    /// What became of it.
    pub outcome: Verdict,
    /// Kernels that no group before it had launched.
    pub kernels: usize,
    /// Problems that were computed and compared.
    pub checks: usize,
    /// The largest error of a check that passed, as a share of what is allowed.
    pub worst: f64,
    /// Kernels that failed, and how.
    pub failed: BTreeMap<String, String>,
    /// Why it was skipped or not run.
    pub why: Option<String>,
    /// How long it took.
    pub seconds: f64,
}

/// What a self-test found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelfTest {
    /// What was tested.
    pub about: About,
    /// How much of it.
    pub depth: Depth,
    /// In the order in which they ran.
    pub groups: Vec<GroupReport>,
    /// Kernels of the device that no check launched.
    pub untested: Vec<String>,
    /// How long it took.
    pub seconds: f64,
}

impl SelfTest {
    /// Whether no kernel failed.
    pub fn passed(&self) -> bool {
        self.groups.iter().all(|g| g.outcome != Verdict::Failed && g.outcome != Verdict::NotRun)
    }

    /// Whether every group was run, or never can be on this device.
    pub fn is_complete(&self) -> bool {
        self.groups.iter().all(|g| g.outcome != Verdict::NotRun)
    }

    /// Every kernel that failed, and how.
    pub fn failed(&self) -> BTreeMap<String, String> {
        self.groups.iter().flat_map(|g| g.failed.clone()).collect()
    }
}
