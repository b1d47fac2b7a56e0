//! This machine in a fraction of a second, for runs on machines without a profile: memory and arithmetic are probed
//! briefly, a GPU's figures are those of its kind.
//!
//! An emulated device plays the part of a small GPU: unless it names the hardware that it emulates, its figures are those of
//! [`EMULATED`].

use crate::device::DeviceInfo;
use crate::host::{Pool, memory_available};
use crate::plan::Hardware;
use crate::plan::hardware::{self, Cpu, Efficiency};

use super::limits::last_level_cache;
use super::{THIS_MACHINE, peaks, read_bandwidth};

/// The description whose GPU and link an emulated device has.
pub const EMULATED: &str = "rtx4060-laptop";

/// Most memory that is read: as much as a few caches, or a little less on machines with very large ones, where the figure
/// comes out somewhat too high. A planner's choices hardly depend on that.
const MOST_READ: u64 = 256 << 20;

/// Names of GPUs, as drivers give them in part, and the description with their figures.
const GPUS: &[(&str, &str)] = &[
    ("H200", "h200-sxm"),
    ("H100 PCIe", "h100-spr"),
    ("H100", "h100-sxm"),
    ("A100", "a100-spr"),
    ("L40S", "l40s-epyc"),
    ("A10G", "a10g-g5"),
    ("A10", "a10-xeon"),
    ("T4", "t4-xeon"),
    ("RTX 4090", "rtx4090-desktop"),
    ("RTX 4060", "rtx4060-laptop"),
    ("RTX 3090", "rtx3090-epyc"),
];

/// The description with the figures of a device; none if nothing is known of its kind. Devices without a driver are emulated.
pub fn similar_device(device: &DeviceInfo) -> Option<&'static str> {
    if device.driver == 0 {
        return Some(EMULATED);
    }
    GPUS.iter().find(|(part, _)| device.name.contains(part)).map(|(_, name)| *name)
}

/// This machine with `device`, probed with `threads` threads (all cores, if not given): `None` where the system does not say how much
/// memory there is, the CPU has no instruction that the probes measure, or nothing is known of the device.
pub fn estimate(device: &DeviceInfo, threads: Option<usize>) -> Option<Hardware> {
    let accelerator = hardware::named(similar_device(device)?)?.accelerator;
    Some(Hardware { accelerator, ..estimate_cpu(threads)? })
}

/// The CPU of this machine alone, as [`estimate`] probes it.
pub fn estimate_cpu(threads: Option<usize>) -> Option<Hardware> {
    let available = memory_available()?;
    let pool = Pool::pinned(threads);
    let llc = last_level_cache();
    let bytes = (4 * llc).min(MOST_READ).min(available / 8) as usize;
    let read_bw = read_bandwidth(&pool, bytes, 2);
    // Products run on bf16 units where there are, otherwise on f32.
    let flops = peaks(&pool).iter().filter(|p| p.name != "int8 dot").map(|p| p.ops).fold(0.0, f64::max);
    (flops > 0.0 && read_bw > 0.0).then(|| Hardware {
        name: THIS_MACHINE.into(),
        cpu: Cpu {
            cores: pool.threads() as u32,
            dram_bytes: available as f64,
            read_bw,
            flops_bf16: flops,
            llc_bytes: llc as f64,
        },
        accelerator: None,
        efficiency: Efficiency::default(),
        nodes: Vec::new(),
        weights: None,
        power: None,
        price: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, driver: u32) -> DeviceInfo {
        DeviceInfo {
            name: name.into(),
            sm: 80,
            multiprocessors: 100,
            memory_total: 1 << 30,
            shared_per_block: 48 << 10,
            l2_bytes: 0,
            driver,
        }
    }

    #[test]
    fn gpus_are_known_by_a_part_of_their_name() {
        for (name, want) in [
            ("NVIDIA H100 PCIe", Some("h100-spr")),
            ("NVIDIA H100 80GB HBM3", Some("h100-sxm")),
            ("NVIDIA A10G", Some("a10g-g5")),
            ("NVIDIA GeForce RTX 4060 Laptop GPU", Some("rtx4060-laptop")),
            ("NVIDIA Unheard Of", None),
        ] {
            assert_eq!(similar_device(&device(name, 13000)), want, "{name}");
        }
        assert_eq!(similar_device(&device("emulated", 0)), Some(EMULATED));
        for (_, name) in GPUS {
            assert!(hardware::named(name).is_some_and(|h| h.accelerator.is_some()), "{name}");
        }
    }

    #[test]
    fn an_estimate_is_whole_or_none() {
        assert_eq!(estimate(&device("NVIDIA Unheard Of", 13000), None), None);
        let Some(h) = estimate(&device("emulated", 0), Some(2)) else {
            println!("skipped: this CPU has no instructions that the probes measure");
            return;
        };
        assert!(h.cpu.read_bw > 1e8 && h.cpu.flops_bf16 > 1e8 && h.cpu.dram_bytes > 0.0, "{h:?}");
        assert_eq!(h.accelerator, hardware::named(EMULATED).unwrap().accelerator);
    }
}
