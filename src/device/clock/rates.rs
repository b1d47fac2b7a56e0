//! How long work takes on a machine: the larger of arithmetic and memory time, and bytes over the link.

use crate::hardware::Hardware;
use crate::{Error, Result};

/// The amount of work of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Multiplications and additions.
    pub flops: u64,
    /// Bytes read from and written to memory.
    pub bytes: u64,
}

/// The speed of a compute unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnitSpeed {
    /// FLOP/s.
    pub flops: f64,
    /// Bytes/s of its memory.
    pub bytes: f64,
    /// Seconds to issue an operation to it: it takes at least that.
    pub issue: f64,
    /// Seconds that come to the work: of each kernel of the device, from the end of the one before to its begin; of each operation of
    /// the host, from its posting to its end seen.
    pub launch: f64,
}

impl UnitSpeed {
    /// Seconds that `work` takes.
    pub fn seconds(&self, work: Work) -> f64 {
        (work.flops as f64 / self.flops).max(work.bytes as f64 / self.bytes)
    }
}

/// The speed of a machine, as far as its kernels reach it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// The CPU.
    pub host: UnitSpeed,
    /// The accelerator.
    pub device: UnitSpeed,
    /// Bytes/s over the link, to the device.
    pub to_device: f64,
    /// Bytes/s over the link, to the host.
    pub to_host: f64,
    /// Seconds from the request of a transfer to its first byte.
    pub latency: f64,
    /// Bytes/s at which the CPU reads weights, and the link takes them at most, where they lie in memory of their own.
    pub weights: Option<f64>,
    /// Share of the CPU's rates that its attention reaches.
    pub attention: f64,
    /// Share of that which is left while copies over the link run.
    pub beside_copies: f64,
}

/// Number of operations issued per block: a machine description states the cost of issuing a whole block.
const OPERATIONS_OF_A_BLOCK: f64 = 6.0;

impl Rates {
    /// The rates of a described machine.
    ///
    /// # Errors
    /// [`Error::Usage`] if it has no GPU.
    pub fn of(hardware: &Hardware) -> Result<Rates> {
        let Some((gpu, link)) = &hardware.accelerator else {
            return Err(Error::usage(format!(
                "`device` emulated:{}: this machine has no [gpu], so that there is nothing to emulate; use `device` cpu",
                hardware.name
            )));
        };
        let (cpu, e) = (&hardware.cpu, &hardware.efficiency);
        Ok(Rates {
            host: UnitSpeed {
                flops: cpu.flops_bf16 * e.cpu_compute,
                bytes: cpu.read_bw * e.cpu_memory,
                issue: e.cpu_issue_s / OPERATIONS_OF_A_BLOCK,
                launch: e.hand_over_s,
            },
            device: UnitSpeed {
                flops: gpu.flops_bf16 * e.gpu_compute,
                bytes: gpu.bw * e.gpu_memory,
                issue: e.gpu_issue_s / OPERATIONS_OF_A_BLOCK,
                launch: e.gpu_launch_s,
            },
            to_device: link.h2d_bw * e.link,
            to_host: link.d2h_bw * e.link,
            latency: link.latency_s,
            weights: hardware.weights.as_ref().map(|on| on.read_bw * e.cpu_memory),
            attention: e.cpu_attention,
            beside_copies: e.cpu_beside_copies,
        })
    }

    /// Seconds of an operation of the host with so much work.
    pub fn host_operation(&self, work: Work, attends: bool) -> f64 {
        let share = if attends { self.attention } else { 1.0 };
        (self.host.seconds(work) / share).max(self.host.issue) + self.host.launch
    }

    /// Seconds of an operation of the device with so much work, in so many kernels.
    pub fn device_operation(&self, work: Work, kernels: u32) -> f64 {
        self.device.seconds(work) + f64::from(kernels) * self.device.launch
    }

    /// Seconds of a transfer to the device.
    pub fn upload(&self, bytes: usize) -> f64 {
        self.transfer(bytes, self.to_device)
    }

    /// Seconds of a transfer to the host.
    pub fn download(&self, bytes: usize) -> f64 {
        self.transfer(bytes, self.to_host)
    }

    /// Bytes of the host's own memory that are read in the time of one byte of weights.
    pub fn weights_bytes(&self) -> f64 {
        self.weights.map_or(1.0, |rate| self.host.bytes / rate)
    }

    /// How much longer `bytes` of weights take to the device than other bytes.
    pub fn late_weights(&self, bytes: usize) -> f64 {
        let late = |rate| bytes as f64 / rate - bytes as f64 / self.to_device;
        self.weights.map_or(0.0, |rate| late(rate).max(0.0))
    }

    fn transfer(&self, bytes: usize, rate: f64) -> f64 {
        if bytes == 0 { 0.0 } else { self.latency + bytes as f64 / rate }
    }
}
