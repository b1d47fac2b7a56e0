//! How a model is to run: what the user has decided, and what is left to the engine.

use std::str::FromStr;
use std::sync::Arc;

use crate::Result;
use crate::cache::KvType;
use crate::device::Kind;
use crate::hardware::Hardware;
use crate::host::{NumaBinding, NumaWish, numa_nodes};
use crate::model::ModelSpec;
use crate::plan::{Fixed, Strategy as System};
use crate::program::Far;

/// How a model is to run. By default everything is left to the engine: the best device, the fastest placement that fits.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Where to run.
    pub device: Device,
    /// How CPU and GPU share the work. More than one: schedulers to compare, for requests that share an engine.
    pub strategies: Vec<Strategy>,
    /// What is fixed of the placement of HELM and LIA.
    pub fixed: Fixed,
    /// The machine that times are predicted for: `auto` (this one), one of Tandem's own descriptions, or a file.
    pub hardware: String,
    /// Pages of keys and values on the device, in each block that keeps them there; `None`: all, or as many as fit.
    pub kv_pages: Option<usize>,
    /// How pages that left the device are attended; `None`: in each step in the faster way.
    pub far: Option<Far>,
    /// Cohorts of the host's requests under way at a time, if requests share the engine.
    pub cohorts: Option<usize>,
    /// Whether schedulers expect answers to be as long as those that have ended, or else as long as allowed; `None`: yes.
    pub learns_lengths: Option<bool>,
    /// Most bytes to use on the device; `None`: all that is free.
    pub gpu_memory: Option<u64>,
    /// Threads, the calling one included; `None`: one for each core that this process may use.
    pub threads: Option<usize>,
    /// Memory nodes for weights on the host; `None`: where the system puts them.
    pub weights_node: Option<NumaWish>,
    /// Whether results may not depend on batch composition and chunking.
    pub deterministic: bool,
    /// Type of keys and values; `None`: bf16, or f16 on a device without it.
    pub kv_type: Option<KvType>,
    /// Whether experts of divided blocks stay on the side where they are at first, whatever the routers choose.
    pub fixed_experts: bool,
    /// Rows of a prompt computed together; `None`: the engine's default.
    pub chunk: Option<usize>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            device: Device::Auto,
            strategies: vec![Strategy::Auto],
            fixed: Fixed::default(),
            hardware: "auto".into(),
            kv_pages: None,
            far: None,
            cohorts: None,
            learns_lengths: None,
            gpu_memory: None,
            threads: None,
            weights_node: None,
            deterministic: false,
            kv_type: None,
            fixed_experts: false,
            chunk: None,
        }
    }
}

/// Where to run.
#[derive(Debug, Clone, PartialEq)]
pub enum Device {
    /// The best device available.
    Auto,
    /// The CPU.
    Cpu,
    /// A given accelerator.
    Accelerator(Kind),
}

impl FromStr for Device {
    type Err = String;
    fn from_str(text: &str) -> Result<Device, String> {
        match text {
            "auto" => Ok(Device::Auto),
            "cpu" => Ok(Device::Cpu),
            _ => {
                let kind = text.parse().map(Device::Accelerator);
                // `Kind` knows the names of machines, so its message is used.
                let device = |said: String| match text.starts_with("emulated:") {
                    true => said,
                    false => format!("choose one of auto, cpu, {}", Kind::NAMES),
                };
                kind.map_err(device)
            }
        }
    }
}

/// How CPU and GPU share the work: a placement of the model, or a scheduler of requests that share an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// The fastest, as predicted.
    Auto,
    /// All on the CPU.
    CpuOnly,
    /// All on the device.
    GpuOnly,
    /// The device filled, the rest computed on the CPU.
    Greedy,
    /// HELM's boundary.
    Helm,
    /// LIA's vectors.
    Lia,
    /// Scheduler: attention of all requests on the host (FastDecode).
    Fastdecode,
    /// Scheduler: NEO's two sub-batches.
    Neo,
    /// Scheduler: APEX's asynchronous overlap.
    Apex,
    /// Every block streamed.
    Stream,
    /// Of a mixture of experts: the experts on the CPU, all else on the device.
    CpuMoe,
    /// Of a mixture of experts: those of the first blocks on the CPU, as few as fit.
    Ncmoe,
    /// Of a mixture of experts: those of the first blocks on the CPU, and where all else is, by predicted time.
    Experts,
}

impl Strategy {
    /// All, in the order of the documentation.
    pub const ALL: [Strategy; 13] = [
        Strategy::Auto,
        Strategy::CpuOnly,
        Strategy::GpuOnly,
        Strategy::Greedy,
        Strategy::Helm,
        Strategy::Lia,
        Strategy::Fastdecode,
        Strategy::Neo,
        Strategy::Apex,
        Strategy::Stream,
        Strategy::CpuMoe,
        Strategy::Ncmoe,
        Strategy::Experts,
    ];

    /// Its name, like `gpu-only`.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Auto => "auto",
            Strategy::CpuOnly => "cpu-only",
            Strategy::GpuOnly => "gpu-only",
            Strategy::Greedy => "greedy",
            Strategy::Helm => "helm",
            Strategy::Lia => "lia",
            Strategy::Fastdecode => "fastdecode",
            Strategy::Neo => "neo",
            Strategy::Apex => "apex",
            Strategy::Stream => "stream",
            Strategy::CpuMoe => "cpu-moe",
            Strategy::Ncmoe => "ncmoe",
            Strategy::Experts => "experts",
        }
    }

    /// Whether there is a scheduler of this name for requests that share an engine.
    pub fn schedules(self) -> bool {
        use Strategy::{Apex, Auto, Fastdecode, GpuOnly, Neo};
        matches!(self, Auto | GpuOnly | Fastdecode | Neo | Apex)
    }

    /// Whether it exists only as a scheduler.
    pub(super) fn only_schedules(self) -> bool {
        matches!(self, Strategy::Fastdecode | Strategy::Neo | Strategy::Apex)
    }
}

impl Settings {
    /// The strategy. A setting that only one strategy has selects it.
    pub fn strategy(&self) -> Strategy {
        match self.strategies[0] {
            Strategy::Auto => match self.fixed.strategy() {
                Some(of) => {
                    Strategy::ALL.into_iter().find(|s| s.name() == of.name()).expect("one of its names")
                }
                None if self.kv_pages.is_some() && self.device != Device::Cpu => Strategy::Helm,
                None => Strategy::Auto,
            },
            strategy => strategy,
        }
    }

    /// Whether requests that share the engine may have a scheduler that uses both sides.
    pub fn schedules(&self) -> bool {
        !self.fixed.is_some() && self.strategies.iter().all(|s| s.schedules())
    }

    /// Choices that make up for the exchange of an expert of a divided block, if experts follow the routers; what is predicted of the machine
    /// comes later ([`plan::exchange_pays`](crate::plan::exchange_pays)).
    pub(super) fn follows(&self, spec: &ModelSpec) -> Option<f64> {
        const UNTIL_PREDICTED: f64 = 4.0;
        (!self.fixed_experts && spec.experts.is_some()).then_some(UNTIL_PREDICTED)
    }

    /// The strategies whose placements are compared; `None` if one side has all of the model.
    pub fn placements(&self) -> Option<&'static [System]> {
        match self.strategy() {
            Strategy::Auto => Some(&[
                System::CpuOnly,
                System::GpuOnly,
                System::Greedy,
                System::Stream,
                System::Helm,
                System::Lia,
                System::CpuMoe,
                System::Experts,
            ]),
            Strategy::Helm => Some(&[System::Helm]),
            Strategy::Lia => Some(&[System::Lia]),
            Strategy::Stream => Some(&[System::Stream]),
            Strategy::Greedy => Some(&[System::Greedy]),
            Strategy::CpuMoe => Some(&[System::CpuMoe]),
            Strategy::Ncmoe => Some(&[System::Ncmoe]),
            Strategy::Experts => Some(&[System::Experts]),
            _ => None,
        }
    }

    /// The accelerator to try; `None` is the CPU.
    pub fn kind(&self) -> Option<Kind> {
        match (&self.device, self.strategy()) {
            (Device::Cpu, _) | (_, Strategy::CpuOnly) => None,
            // Only the CPU promises deterministic results: see `check`.
            (Device::Auto, Strategy::Auto) if self.deterministic => None,
            (Device::Auto, _) => Some(Kind::Cuda(0)),
            (Device::Accelerator(Kind::Timed(what, _)), _) => {
                self.timed_machine().map(|machine| Kind::Timed(*what, machine))
            }
            (Device::Accelerator(kind), _) => Some(kind.clone()),
        }
    }

    /// Whether to fall back to the CPU if there is no accelerator.
    pub fn falls_back(&self) -> bool {
        self.device == Device::Auto && self.strategy() == Strategy::Auto && self.gpu_memory.is_none()
    }

    /// The machine whose time is emulated, if any, with weights on the memory nodes of
    /// [`weights_node`](Settings::weights_node).
    pub fn timed_machine(&self) -> Option<Arc<Hardware>> {
        let Device::Accelerator(Kind::Timed(_, machine)) = &self.device else { return None };
        // `check` has refused nodes that the machine does not have.
        Some(self.with_weights(machine).map_or_else(|_| machine.clone(), Arc::new))
    }

    /// A machine with weights on the wanted memory nodes.
    ///
    /// # Errors
    /// If the machine has no such node.
    pub fn with_weights(&self, machine: &Hardware) -> Result<Hardware> {
        match &self.weights_node {
            None => Ok(machine.clone()),
            Some(wish) => machine.with_weights_on(&wish.numbers(&machine.all_nodes())),
        }
    }

    /// The memory nodes of this machine for weights on the host; none where another machine's time is emulated, whose nodes
    /// are not here.
    ///
    /// # Errors
    /// If the node does not exist.
    pub fn weights_binding(&self) -> Result<Option<NumaBinding>> {
        match (&self.device, &self.weights_node) {
            (Device::Accelerator(Kind::Timed(..)), _) | (_, None) => Ok(None),
            (_, Some(wish)) => wish.among(&numa_nodes()).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices() {
        assert_eq!("cuda:1".parse(), Ok(Device::Accelerator(Kind::Cuda(1))));
        assert_eq!("cpu".parse(), Ok(Device::Cpu));
        assert!("cuda:x".parse::<Device>().is_err());
        assert!("gpu".parse::<Device>().is_err());
    }

    #[test]
    fn what_only_one_strategy_has_selects_it() {
        let with = |fixed: Fixed| Settings { fixed, ..Settings::default() }.strategy();
        assert_eq!(with(Fixed::default()), Strategy::Auto);
        assert_eq!(with(Fixed { boundary: Some(3), ..Fixed::default() }), Strategy::Helm);
        assert_eq!(with(Fixed { pinned: Some(3), ..Fixed::default() }), Strategy::Lia);
    }
}
