//! What is planned for: the model's sizes and the machine's figures.

use std::path::Path;

use anyhow::Result;
use tandem::Error;
use tandem::device::open::{self as devices, Kind};
use tandem::host::{Pool, cgroup};
use tandem::model::synth;
use tandem::plan::hardware::{self, Cpu, Efficiency};
use tandem::plan::{Hardware, Sizes};
use tandem::profile::{peaks, read_bandwidth};
use tandem::simd::Isa;

use crate::cli::{open, progress};

/// Most bytes of a hardware description.
const MAX_TOML: u64 = 1 << 20;

/// Sizes of `--spec`, or of the tensors of `-m`.
pub fn sizes(spec: Option<&str>, model: Option<&str>) -> Result<Sizes> {
    if let Some(spec) = spec {
        return Ok(Sizes::of_spec(&synth::spec(spec)?));
    }
    let model = open::outline(model.expect("the parser wants one of them"))?;
    let mut spec = model.spec;
    if spec.name.is_empty() {
        spec.name = model.source;
    }
    Ok(Sizes::of_weights(&spec, &model.weights, Isa::selected()?))
}

/// The machine that `--hardware` names.
pub fn hardware(name: &str) -> Result<Hardware> {
    if name == "auto" {
        return this_machine();
    }
    if let Some(found) = hardware::named(name) {
        return Ok(found);
    }
    let path = Path::new(name);
    if !path.is_file() {
        let known: Vec<_> = hardware::names().collect();
        return Err(Error::usage(format!(
            "--hardware {name}: no such machine or file; give auto, the path of a TOML file or one of {}",
            known.join(", ")
        ))
        .into());
    }
    let length = std::fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    if length > MAX_TOML {
        return Err(
            Error::format(name, format!("{length} bytes, too many for a hardware description")).into()
        );
    }
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
    let text = String::from_utf8(bytes).map_err(|_| Error::format(name, "not text"))?;
    Ok(hardware::parse(name, &text)?)
}

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

/// Measures the CPU; takes the GPU's figures, if there is one, from the description of its kind.
fn this_machine() -> Result<Hardware> {
    progress::detail("measuring memory bandwidth and arithmetic");
    let pool = Pool::pinned(None);
    let available = cgroup::memory_available().ok_or_else(|| {
        Error::Run("--hardware auto: the system does not say how much memory there is".into())
    })?;
    let llc = last_level_cache().unwrap_or(32 << 20);
    let bytes = (4 * llc).max(512 << 20).min(available / 4) as usize;
    let read_bw = read_bandwidth(&pool, bytes, 5);
    // Products run on bf16 units where there are, otherwise on f32.
    let flops = peaks(&pool).iter().filter(|p| p.name != "int8 dot").map(|p| p.ops).fold(0.0, f64::max);
    if flops <= 0.0 {
        return Err(Error::Unsupported(
            "--hardware auto: this CPU has no instructions that the probes measure; describe it in a file"
                .into(),
        )
        .into());
    }
    let cpu = Cpu {
        cores: pool.threads() as u32,
        dram_bytes: available as f64,
        read_bw,
        flops_bf16: flops,
        llc_bytes: llc as f64,
    };
    let accelerator = match devices::check(Kind::Cuda(0)) {
        Err(_) => None,
        Ok(()) => {
            let device = devices::open(Kind::Cuda(0), None)?;
            let name = device.runtime().info().name.clone();
            let like = GPUS.iter().find(|(part, _)| name.contains(part)).ok_or_else(|| {
                Error::Unsupported(format!(
                    "--hardware auto: no figures of a {name}; describe the machine in a file"
                ))
            })?;
            progress::note(&format!("figures of {name} are those of --hardware {}, not measured", like.1));
            hardware::named(like.1).and_then(|h| h.accelerator)
        }
    };
    Ok(Hardware { name: "this machine".into(), cpu, accelerator, efficiency: Efficiency::default() })
}

/// As Linux tells it for the first processor.
fn last_level_cache() -> Option<u64> {
    let text = (0..5).rev().find_map(|i| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size")).ok()
    })?;
    let kib: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
    Some(kib << 10)
}
