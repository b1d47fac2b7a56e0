//! Limits of the machine: what no kernel exceeds, measured.
//!
//! | a file | what |
//! |---|---|
//! | `host` | read bandwidth by threads, arithmetic and matrix rates by tier, cache, memory |
//! | `device` | copy bandwidth in the device's memory, matrix rate, launches and hand-overs |
//! | `nodes` | read bandwidth of each memory node, if there are several |
//! | `link` | bandwidth and latency each way: pinned, pageable, and while the CPU reads memory |
//! | `attention` | attention on the host, alone and while copies run |
//! | `hand_over` | from a job's posting to its end: the pool's, and of threads that sleep |

mod attention;
mod device;
mod device_time;
mod hand_over;
mod host;
mod link;
mod nodes;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::attention::{CopyLoad, HostAttention};
pub use self::device::DeviceLimits;
pub(super) use self::device_time::device_time;
pub use self::hand_over::{HandOver, LaneLimits};
pub use self::host::{Bandwidth, CpuLimits, Rate, last_level_cache};
pub use self::link::LinkLimits;
pub use self::nodes::NodeLimits;
use super::sample::Effort;
use crate::device::Accelerator;
use crate::host::Pool;
use crate::plan::Hardware;
use crate::plan::hardware::{Cpu, Efficiency, Gpu, Link, Node};
use crate::{Error, Result};

/// See the [module](self). All figures are SI units.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// The CPU and its memory.
    pub cpu: CpuLimits,
    /// Attention on the CPU, and what copies cost it.
    pub host_attention: HostAttention,
    /// What giving work to the CPU's threads takes.
    pub hand_over: HandOver,
    /// A device and the link to it.
    pub device: Option<DeviceLimits>,
}

/// Steps of [`Limits::measure`], for a progress bar.
pub const LIMITS_STEPS: u64 = 6;

impl Limits {
    /// Measures the CPU with all threads of `pool`, and `accelerator`, if there is one. `progress` is called after each
    /// of [`LIMITS_STEPS`] steps.
    ///
    /// # Errors
    /// The system does not say how much memory there is; a device that failed.
    pub fn measure(
        pool: &Pool,
        accelerator: Option<&Arc<dyn Accelerator>>,
        effort: Effort,
        progress: &dyn Fn(),
    ) -> Result<Limits> {
        let cpu = CpuLimits::measure(pool, effort, progress)?;
        let device = accelerator.map(|a| DeviceLimits::measure(a, pool, effort, progress)).transpose()?;
        let runtime = accelerator.map(|a| a.runtime());
        let host_attention = HostAttention::measure(pool, runtime, effort)?;
        let hand_over = HandOver::measure(pool, runtime, effort)?;
        progress();
        Ok(Limits { cpu, host_attention, hand_over, device })
    }

    /// As planners read them, under this name. The rates are those that kernels reach, so all efficiencies are 1.
    pub fn hardware(&self, name: &str) -> Hardware {
        let cpu = Cpu {
            cores: self.cpu.threads,
            dram_bytes: self.cpu.memory_bytes as f64,
            read_bw: self.cpu.read_bw(),
            flops_bf16: self.cpu.matrix_flops(),
            llc_bytes: self.cpu.llc_bytes as f64,
        };
        let accelerator = self.device.as_ref().map(|d| {
            let gpu = Gpu { mem_bytes: d.memory_bytes as f64, bw: d.copy_bw, flops_bf16: d.matrix_flops };
            let link = Link {
                h2d_bw: d.to_device.pinned_bw,
                d2h_bw: d.to_host.pinned_bw,
                latency_s: d.to_device.latency_s.max(d.to_host.latency_s),
                pageable_bw: d.to_device.pageable_bw,
            };
            (gpu, link)
        });
        // From one operation of a lane to the next, or as fast as the host enqueues them.
        let gpu_launch_s = self.device.as_ref().map_or(0.0, |d| d.step_s.max(d.launch_s));
        // Inside a step nobody sleeps.
        let h = &self.hand_over;
        let lane = h.lane.as_ref().map_or(0.0, |lane| lane.in_step_s.unwrap_or(lane.spinning_s));
        let hand_over_s = h.in_step_s.unwrap_or(h.spinning_s) + lane;
        let cpu_beside_copies = self.host_attention.share();
        let efficiency = Efficiency { gpu_launch_s, hand_over_s, cpu_beside_copies, ..Efficiency::default() };
        // A node cannot be faster than all memory together: a difference is noise.
        let node = |n: &NodeLimits| {
            let node = n.hardware();
            Node { read_bw: node.read_bw.min(cpu.read_bw), ..node }
        };
        let nodes = self.cpu.nodes.iter().map(node).collect();
        let name = name.to_owned();
        let mut hardware =
            Hardware { name, cpu, accelerator, efficiency, nodes, weights: None, power: None, price: None };
        hardware.share_memory(cpu.dram_bytes);
        hardware
    }

    /// Refuses figures that no machine has.
    ///
    /// # Errors
    /// [`Error::Format`] with the field of `file`.
    pub(super) fn check(&self, file: &str) -> Result<()> {
        let mut figures = vec![
            ("cpu.threads", f64::from(self.cpu.threads), 4096.0),
            ("cpu.memory_bytes", self.cpu.memory_bytes as f64, 1e16),
            ("cpu.llc_bytes", self.cpu.llc_bytes as f64, 1e16),
            ("cpu.read_bw", self.cpu.read_bw(), 1e16),
            ("cpu.matrix", self.cpu.matrix_flops(), 1e19),
            ("host_attention.alone_bw", self.host_attention.alone_bw, 1e16),
            ("host_attention.beside_copies_bw", self.host_attention.beside_copies_bw, 1e16),
            ("hand_over.spinning_s", self.hand_over.spinning_s, 10.0),
            ("hand_over.parked_s", self.hand_over.parked_s, 10.0),
        ];
        if let Some(d) = &self.device {
            figures.extend([
                ("device.memory_bytes", d.memory_bytes as f64, 1e16),
                ("device.copy_bw", d.copy_bw, 1e16),
                ("device.matrix_flops", d.matrix_flops, 1e19),
                ("device.launch_s", d.launch_s, 10.0),
                ("device.round_trip_s", d.round_trip_s, 10.0),
                ("device.to_device.pinned_bw", d.to_device.pinned_bw, 1e16),
                ("device.to_device.latency_s", d.to_device.latency_s, 10.0),
                ("device.to_host.pinned_bw", d.to_host.pinned_bw, 1e16),
                ("device.to_host.latency_s", d.to_host.latency_s, 10.0),
            ]);
        }
        for node in &self.cpu.nodes {
            figures.extend([
                ("cpu.nodes.memory_bytes", node.memory_bytes as f64, 1e16),
                ("cpu.nodes.bytes_s", node.bytes_s, 1e16),
            ]);
        }
        if let Some(lane) = &self.hand_over.lane {
            figures.extend([
                ("hand_over.lane.spinning_s", lane.spinning_s, 10.0),
                ("hand_over.lane.asleep_s", lane.asleep_s, 10.0),
            ]);
        }
        // NaN is in no range.
        match figures.into_iter().find(|&(_, x, most)| !(x > 0.0 && x <= most)) {
            None => Ok(()),
            Some((field, x, most)) => Err(Error::format(
                format!("{file}: limits.{field}"),
                format!("{x}, wanted more than 0 and at most {most:e}"),
            )),
        }
    }
}
