//! This machine in a fraction of a second, for runs on machines without a profile: memory and arithmetic are probed
//! briefly, a GPU's figures are those of its kind.
//!
//! An emulated device plays the part of a small GPU: unless it names the hardware that it emulates, its figures are those of
//! [`EMULATED`].

use crate::device::DeviceInfo;
use crate::host::{Pool, memory_available};
use crate::plan::Hardware;
use crate::plan::hardware::{self, Cpu, Efficiency, Gpu, Link, PAGEABLE};

use super::limits::last_level_cache;
use super::{THIS_MACHINE, peaks, read_bandwidth};

/// The description whose GPU and link an emulated device has.
pub const EMULATED: &str = "rtx4060-laptop";

/// Most memory that is read: as much as a few caches, or a little less on machines with very large ones, where the figure
/// comes out somewhat too high. A planner's choices hardly depend on that.
const MOST_READ: u64 = 256 << 20;

/// Names of GPUs, as drivers give them in part, and the description with their figures; of GPUs that can be divided (MIG), the
/// multiprocessors of a whole one.
const GPUS: &[(&str, &str, Option<u32>)] = &[
    ("H200", "h200-sxm", Some(132)),
    ("H100 PCIe", "h100-spr", Some(114)),
    ("H100", "h100-sxm", Some(132)),
    ("A100", "a100-spr", Some(108)),
    ("L40S", "l40s-epyc", None),
    ("A10G", "a10g-g5", None),
    ("A10", "a10-xeon", None),
    ("T4", "t4-xeon", None),
    ("RTX 4090", "rtx4090-desktop", None),
    ("RTX 4060", "rtx4060-laptop", None),
    ("RTX 3090", "rtx3090-epyc", None),
];

/// The description with the figures of a device; none if its kind is not among them. Devices without a driver are emulated. A slice
/// of a GPU has its share of the figures ([`estimate`]).
pub fn similar_device(device: &DeviceInfo) -> Option<&'static str> {
    if device.driver == 0 {
        return Some(EMULATED);
    }
    known(device).map(|(_, name, _)| *name)
}

fn known(device: &DeviceInfo) -> Option<&'static (&'static str, &'static str, Option<u32>)> {
    GPUS.iter().find(|(part, ..)| device.name.contains(part))
}

/// What a slice of a GPU (MIG) has of the whole one's figures: memory and its rate by bytes, arithmetic by multiprocessors. The link is
/// there for all slices, and one may have all of it.
fn share_of(whole: Gpu, device: &DeviceInfo) -> Gpu {
    if device.slice().is_none() {
        return whole;
    }
    let bytes = device.memory_total as f64;
    let memory = (bytes / whole_memory(&device.name).unwrap_or(whole.mem_bytes)).min(1.0);
    // By the memory where nobody knows how many a whole one has.
    let units = known(device).and_then(|(.., units)| *units);
    let units = units.map_or(memory, |all| (f64::from(device.multiprocessors) / f64::from(all)).min(1.0));
    Gpu { mem_bytes: bytes, bw: memory * whole.bw, flops_bf16: units * whole.flops_bf16 }
}

/// Bytes of the GPU that a name has in gigabytes before the slice's: `NVIDIA A100-SXM4-80GB MIG 1g.10gb`. (The same GPU is sold with
/// 40 and 80 GB.)
fn whole_memory(name: &str) -> Option<f64> {
    let (whole, _) = name.split_once(" MIG ")?;
    let words = whole.split([' ', '-']);
    words.filter_map(|word| word.strip_suffix("GB")?.parse::<f64>().ok()).map(|gb| gb * 1e9).next()
}

/// The figures of a device of which nothing is known but what its driver says: its clocks and units, at what others of its
/// generation make of theirs, behind a slow link (8 lanes of PCIe 4.0).
fn of_driver(device: &DeviceInfo) -> (Gpu, Link) {
    // What a T4 has for each of its multiprocessors, where the driver does not say.
    let bw = match device.memory_bw {
        0 => 8e9 * f64::from(device.multiprocessors),
        // What others reach of it.
        peak => 0.92 * peak as f64,
    };
    let clock = if device.clock_khz == 0 { 1.5e9 } else { 1e3 * f64::from(device.clock_khz) };
    // Dense 16-bit products with sums in f32, per multiprocessor and cycle.
    let per_cycle = match device.sm {
        ..=79 => 1024.0,
        80 => 2048.0,
        81..=89 => 512.0,
        90..=99 => 4096.0,
        100..=119 => 8192.0,
        _ => 512.0,
    };
    let gpu = Gpu {
        mem_bytes: device.memory_total as f64,
        bw,
        // What products reach of it.
        flops_bf16: 0.7 * per_cycle * clock * f64::from(device.multiprocessors),
    };
    (gpu, Link { h2d_bw: 12e9, d2h_bw: 12e9, latency_s: 10e-6, pageable_bw: PAGEABLE * 12e9 })
}

/// This machine with `device`, probed with `threads` threads (all cores, if not given): `None` where the system does not say how much
/// memory there is, or the CPU has no instruction that the probes measure.
pub fn estimate(device: &DeviceInfo, threads: Option<usize>) -> Option<Hardware> {
    let accelerator = match similar_device(device) {
        Some(name) => hardware::named(name)?.accelerator.map(|(gpu, link)| (share_of(gpu, device), link)),
        None => Some(of_driver(device)),
    };
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
            memory_bw: 0,
            clock_khz: 0,
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
        for (_, name, _) in GPUS {
            assert!(hardware::named(name).is_some_and(|h| h.accelerator.is_some()), "{name}");
        }
    }

    /// A seventh of a GPU is not predicted to be the whole one.
    #[test]
    fn a_slice_has_its_share_of_the_figures() {
        let of = |name: &str, gb: u64, multiprocessors: u32| {
            let info = DeviceInfo { memory_total: gb << 30, multiprocessors, ..device(name, 13000) };
            let whole = hardware::named(similar_device(&info).unwrap()).unwrap().accelerator.unwrap().0;
            let part = share_of(whole, &info);
            (
                info.slice().map(str::to_owned),
                part.mem_bytes / 1e9,
                part.bw / whole.bw,
                part.flops_bf16 / whole.flops_bf16,
            )
        };
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 0.12;
        for (name, gb, multiprocessors, memory, arithmetic) in [
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, 16, 1.0 / 8.0, 16.0 / 132.0),
            ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40, 60, 0.5, 60.0 / 132.0),
            ("NVIDIA H200 MIG 1g.18gb", 17, 16, 1.0 / 8.0, 16.0 / 132.0),
            // As its description, and with twice its memory.
            ("NVIDIA A100-SXM4-40GB MIG 2g.10gb", 10, 28, 0.25, 28.0 / 108.0),
            ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10, 14, 1.0 / 8.0, 14.0 / 108.0),
            ("NVIDIA A100 80GB PCIe MIG 7g.80gb", 80, 98, 1.0, 98.0 / 108.0),
        ] {
            let (slice, bytes, bw, flops) = of(name, gb, multiprocessors);
            assert!(slice.is_some_and(|s| name.ends_with(&s)), "{name}");
            assert_eq!(bytes, (gb << 30) as f64 / 1e9, "{name}");
            assert!(near(bw, memory) && near(flops, arithmetic), "{name}: {bw} {flops}");
        }
        // A whole one has all of it, whatever is free and however many units the vendor left on it.
        assert_eq!(of("NVIDIA H100 80GB HBM3", 79, 132), (None, 80.0, 1.0, 1.0));
    }

    #[test]
    fn an_estimate_is_whole_or_none() {
        let Some(h) = estimate(&device("emulated", 0), Some(2)) else {
            println!("skipped: this CPU has no instructions that the probes measure");
            return;
        };
        assert!(h.cpu.read_bw > 1e8 && h.cpu.flops_bf16 > 1e8 && h.cpu.dram_bytes > 0.0, "{h:?}");
        assert_eq!(h.accelerator, hardware::named(EMULATED).unwrap().accelerator);
    }

    /// By what their drivers say of them, GPUs come out near their descriptions.
    #[test]
    fn figures_of_a_driver_are_those_of_its_kind() {
        for (name, sm, multiprocessors, clock_khz, memory_bw) in [
            ("t4-xeon", 75, 40, 1_590_000, 320_064_000_000),
            ("a100-spr", 80, 108, 1_410_000, 1_555_200_000_000),
            ("rtx4090-desktop", 89, 128, 2_520_000, 1_008_096_000_000),
            ("h100-sxm", 90, 132, 1_830_000, 3_352_320_000_000u64),
        ] {
            let info = DeviceInfo {
                sm,
                multiprocessors,
                clock_khz,
                memory_bw,
                ..device("NVIDIA Unheard Of", 13000)
            };
            let (known, (gpu, _)) = (hardware::named(name).unwrap().accelerator.unwrap().0, of_driver(&info));
            let off = |a: f64, b: f64| (a / b).max(b / a);
            assert!(off(gpu.bw, known.bw) < 1.35, "{name}: {gpu:?} {known:?}");
            assert!(off(gpu.flops_bf16, known.flops_bf16) < 1.6, "{name}: {gpu:?} {known:?}");
        }
        let silent = of_driver(&device("NVIDIA Unheard Of", 13000)).0;
        assert!(silent.bw > 1e11 && silent.flops_bf16 > 1e13, "{silent:?}");
    }
}
