//! A machine in numbers: what `hardware/*.toml` and `--hardware` say. All figures are SI units.
//!
//! ```text
//! [cpu]  cores  dram_bytes  read_bw  flops_bf16  llc_bytes      [gpu] mem_bytes  bw  flops_bf16
//! [link] h2d_bw  d2h_bw  latency_s  pageable_bw (optional)      [efficiency] (optional) cpu_compute cpu_memory
//!                                                               gpu_compute gpu_memory link cpu_issue_s gpu_issue_s
//! [[node]] (optional) node  bytes  read_bw                      gpu_launch_s hand_over_s cpu_attention cpu_beside_copies
//! [power] [price] (optional): see [`Power`] and [`Price`]
//! ```
//! `docs/plan.md` says what each field means. A description without `[gpu]` and `[link]` is a machine without a GPU.

mod nodes;
mod power;

use serde::Serialize;
use toml::{Table, Value};

pub use self::nodes::{Node, WeightsNodes};
pub use self::power::{Energy, Power, Price};
use crate::{Error, Result};

/// The CPU and its memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cpu {
    /// Cores that compute.
    pub cores: u32,
    /// Memory, in bytes.
    pub dram_bytes: f64,
    /// Rate at which all cores together read memory, bytes/s.
    pub read_bw: f64,
    /// Rate of a bf16 matrix product, FLOP/s.
    pub flops_bf16: f64,
    /// Last-level cache, in bytes.
    pub llc_bytes: f64,
}

/// The GPU and its memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gpu {
    /// Memory, in bytes, as it is sold: what the driver keeps is taken off by the planner.
    pub mem_bytes: f64,
    /// Memory bandwidth, bytes/s.
    pub bw: f64,
    /// Rate of a dense 16-bit matrix product, FLOP/s.
    pub flops_bf16: f64,
}

/// The link between them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// Host to device from pinned memory, bytes/s.
    pub h2d_bw: f64,
    /// Device to host, bytes/s.
    pub d2h_bw: f64,
    /// From the request to the first byte, s.
    pub latency_s: f64,
    /// Host to device from pageable memory, which the driver copies to pinned buffers first, bytes/s.
    pub pageable_bw: f64,
}

/// What pageable memory takes of a link's rate where a description does not say. NVIDIA's "How to Optimize Data Transfers in
/// CUDA C/C++" measures 2.3 against 5.8 GB/s; what HELM measures of Accelerate (1.21 s a token of Qwen3-8B on its laptop) implies about 8 of 16.
pub const PAGEABLE: f64 = 0.5;

/// Shares of the figures above that kernels reach, and what issuing work costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Efficiency {
    /// Share of [`Cpu::flops_bf16`] that is reached, in (0, 1].
    pub cpu_compute: f64,
    /// Share of [`Cpu::read_bw`].
    pub cpu_memory: f64,
    /// Share of [`Gpu::flops_bf16`].
    pub gpu_compute: f64,
    /// Share of [`Gpu::bw`].
    pub gpu_memory: f64,
    /// Share of [`Link::h2d_bw`] and [`Link::d2h_bw`].
    pub link: f64,
    /// Seconds to issue a unit (embedding, block, head) on the CPU.
    pub cpu_issue_s: f64,
    /// Seconds to issue a unit on the GPU.
    pub gpu_issue_s: f64,
    /// Seconds that each kernel of the GPU takes beside its work: from the end of the one before to its begin.
    pub gpu_launch_s: f64,
    /// Seconds that each operation of the CPU takes beside its work: from its posting to the workers to its end seen.
    pub hand_over_s: f64,
    /// Share of the CPU's rates above, efficiencies included, that its attention reaches, in (0, 1].
    pub cpu_attention: f64,
    /// Share of the CPU's attention rate that is left while copies over the link run.
    pub cpu_beside_copies: f64,
}

impl Default for Efficiency {
    fn default() -> Efficiency {
        Efficiency {
            cpu_compute: 1.0,
            cpu_memory: 1.0,
            gpu_compute: 1.0,
            gpu_memory: 1.0,
            link: 1.0,
            cpu_issue_s: 0.0,
            gpu_issue_s: 0.0,
            gpu_launch_s: 0.0,
            hand_over_s: 0.0,
            cpu_attention: 1.0,
            cpu_beside_copies: 1.0,
        }
    }
}

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Hardware {
    /// What it is called.
    pub name: String,
    /// The CPU.
    pub cpu: Cpu,
    /// The GPU and the link to it, if there is one.
    #[serde(flatten, serialize_with = "sections")]
    pub accelerator: Option<(Gpu, Link)>,
    /// What kernels reach.
    pub efficiency: Efficiency,
    /// Memory nodes for weights on the host.
    #[serde(rename = "node", skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<Node>,
    /// Where weights on the host lie; `None`: in the CPU's own memory. Not a part of descriptions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<WeightsNodes>,
    /// What it draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<Power>,
    /// What it costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
}

/// As in a description: `gpu` and `link`, or neither.
fn sections<S: serde::Serializer>(at: &Option<(Gpu, Link)>, serializer: S) -> Result<S::Ok, S::Error> {
    use serde::ser::SerializeMap;
    let mut map = serializer.serialize_map(None)?;
    if let Some((gpu, link)) = at {
        map.serialize_entry("gpu", gpu)?;
        map.serialize_entry("link", link)?;
    }
    map.end()
}

macro_rules! machines {
    ($($name:literal),* $(,)?) => {
        /// The descriptions in `hardware/`.
        const MACHINES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../hardware/", $name, ".toml")))),*];
    };
}
machines!(
    "rtx4060-laptop",
    "rtx3090-epyc",
    "l40s-epyc",
    "a100-spr",
    "a100-spr-cxl",
    "a100-spr-4tb",
    "h100-spr",
    "h100-gnr",
    "t4-xeon",
    "t4-g4dn",
    "a10-xeon",
    "a10g-g5",
    "h100-sxm",
    "h200-sxm",
    "rtx4090-desktop",
    "rtx2080-102gbs",
);

/// The names of the embedded descriptions.
pub fn names() -> impl Iterator<Item = &'static str> {
    MACHINES.iter().map(|(name, _)| *name)
}

/// The embedded description called `name`.
pub fn named(name: &str) -> Option<Hardware> {
    let (name, text) = MACHINES.iter().find(|(n, _)| *n == name)?;
    Some(parse(name, text).expect("embedded descriptions are checked by a test"))
}

const COUNT: (f64, f64, &str) = (1.0, 4096.0, "a whole number from 1 to 4096");
const BYTES: (f64, f64, &str) = (1e3, 1e16, "bytes, from 1e3 to 1e16");
const RATE: (f64, f64, &str) = (1e6, 1e16, "bytes/s, from 1e6 to 1e16");
const FLOPS: (f64, f64, &str) = (1e6, 1e19, "FLOP/s, from 1e6 to 1e19");
const SECONDS: (f64, f64, &str) = (0.0, 1.0, "seconds, from 0 to 1");
const SHARE: (f64, f64, &str) = (1e-3, 1.0, "a share, from 0.001 to 1");

/// A section that is being read; every key must be asked for.
struct Section<'a> {
    file: &'a str,
    name: &'static str,
    table: &'a Table,
}

impl<'a> Section<'a> {
    fn of(file: &'a str, root: &'a Table, name: &'static str, keys: &[&str]) -> Result<Option<Section<'a>>> {
        let table = match root.get(name) {
            None => return Ok(None),
            Some(Value::Table(table)) => table,
            Some(other) => {
                return Err(Error::format(
                    format!("{file}: {name}"),
                    format!("{}, wanted a section [{name}]", other.type_str()),
                ));
            }
        };
        Section::new(file, name, table, keys).map(Some)
    }

    fn new(file: &'a str, name: &'static str, table: &'a Table, keys: &[&str]) -> Result<Section<'a>> {
        if let Some(key) = table.keys().find(|k| !keys.contains(&k.as_str())) {
            return Err(Error::format(
                format!("{file}: {name}.{key}"),
                format!("no such field; [{name}] has {}", keys.join(", ")),
            ));
        }
        Ok(Section { file, name, table })
    }

    fn optional(&self, key: &str, (least, most, want): (f64, f64, &str)) -> Result<Option<f64>> {
        let wrong = |found: String| {
            Error::format(format!("{}: {}.{key}", self.file, self.name), format!("{found}, wanted {want}"))
        };
        let x = match self.table.get(key) {
            None => return Ok(None),
            Some(Value::Integer(n)) => *n as f64,
            Some(Value::Float(x)) => *x,
            Some(other) => return Err(wrong(format!("a {}", other.type_str()))),
        };
        // NaN is in no range.
        if (least..=most).contains(&x) { Ok(Some(x)) } else { Err(wrong(format!("{x}"))) }
    }

    fn number(&self, key: &str, range: (f64, f64, &str)) -> Result<f64> {
        self.optional(key, range)?.ok_or_else(|| {
            Error::format(
                format!("{}: {}.{key}", self.file, self.name),
                format!("missing, wanted {}", range.2),
            )
        })
    }
}

/// Reads a description; `file` is its name for messages.
///
/// # Errors
/// No TOML; a section, field or value that is missing, unknown or absurd: the message names it.
pub fn parse(file: &str, text: &str) -> Result<Hardware> {
    let root: Table = toml::from_str(text).map_err(|e| {
        let line = e.span().map_or(0, |s| text[..s.start].lines().count().max(1));
        let problem = e.message().lines().collect::<Vec<_>>().join(", ");
        Error::format(file, format!("line {line} is not TOML: {problem}"))
    })?;
    let sections = ["cpu", "gpu", "link", "efficiency", "node", "power", "price"];
    if let Some(key) = root.keys().find(|k| !sections.contains(&k.as_str())) {
        return Err(Error::format(
            format!("{file}: {key}"),
            format!("no such section; a hardware description has {}", sections.join(", ")),
        ));
    }
    let missing = |name: &str| Error::format(format!("{file}: [{name}]"), "this section is missing");

    let s = Section::of(file, &root, "cpu", &["cores", "dram_bytes", "read_bw", "flops_bf16", "llc_bytes"])?
        .ok_or_else(|| missing("cpu"))?;
    let cores = s.number("cores", COUNT)?;
    if cores.fract() != 0.0 {
        return Err(Error::format(format!("{file}: cpu.cores"), format!("{cores}, wanted {}", COUNT.2)));
    }
    let cpu = Cpu {
        cores: cores as u32,
        dram_bytes: s.number("dram_bytes", BYTES)?,
        read_bw: s.number("read_bw", RATE)?,
        flops_bf16: s.number("flops_bf16", FLOPS)?,
        llc_bytes: s.number("llc_bytes", BYTES)?,
    };

    let gpu = Section::of(file, &root, "gpu", &["mem_bytes", "bw", "flops_bf16"])?;
    let link = Section::of(file, &root, "link", &["h2d_bw", "d2h_bw", "latency_s", "pageable_bw"])?;
    let accelerator = match (gpu, link) {
        (None, None) => None,
        (None, _) => return Err(missing("gpu")),
        (_, None) => return Err(missing("link")),
        (Some(gpu), Some(link)) => Some((
            Gpu {
                mem_bytes: gpu.number("mem_bytes", BYTES)?,
                bw: gpu.number("bw", RATE)?,
                flops_bf16: gpu.number("flops_bf16", FLOPS)?,
            },
            Link {
                h2d_bw: link.number("h2d_bw", RATE)?,
                d2h_bw: link.number("d2h_bw", RATE)?,
                latency_s: link.number("latency_s", SECONDS)?,
                pageable_bw: match link.optional("pageable_bw", RATE)? {
                    Some(rate) => rate,
                    None => PAGEABLE * link.number("h2d_bw", RATE)?,
                },
            },
        )),
    };

    let mut efficiency = Efficiency::default();
    let keys = [
        "cpu_compute",
        "cpu_memory",
        "gpu_compute",
        "gpu_memory",
        "link",
        "cpu_issue_s",
        "gpu_issue_s",
        "gpu_launch_s",
        "hand_over_s",
        "cpu_attention",
        "cpu_beside_copies",
    ];
    if let Some(s) = Section::of(file, &root, "efficiency", &keys)? {
        let e = &mut efficiency;
        let fields = [
            (&mut e.cpu_compute, SHARE),
            (&mut e.cpu_memory, SHARE),
            (&mut e.gpu_compute, SHARE),
            (&mut e.gpu_memory, SHARE),
            (&mut e.link, SHARE),
            (&mut e.cpu_issue_s, SECONDS),
            (&mut e.gpu_issue_s, SECONDS),
            (&mut e.gpu_launch_s, SECONDS),
            (&mut e.hand_over_s, SECONDS),
            (&mut e.cpu_attention, SHARE),
            (&mut e.cpu_beside_copies, SHARE),
        ];
        for (key, (field, range)) in keys.into_iter().zip(fields) {
            if let Some(x) = s.optional(key, range)? {
                *field = x;
            }
        }
    }
    let name = file.trim_end_matches(".toml").rsplit('/').next().unwrap_or(file).to_owned();
    let nodes = nodes::parse(file, &root, &cpu)?;
    let (power, price) = power::parse(file, &root, accelerator.is_some())?;
    Ok(Hardware { name, cpu, accelerator, efficiency, nodes, weights: None, power, price })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "[cpu]\ncores = 8\ndram_bytes = 64e9\nread_bw = 45e9\nflops_bf16 = 1e12\nllc_bytes = 24e6\n\
                        [gpu]\nmem_bytes = 8_000_000_000\nbw = 218e9\nflops_bf16 = 29e12\n\
                        [link]\nh2d_bw = 16e9\nd2h_bw = 16e9\nlatency_s = 5e-6\n";

    #[test]
    fn every_embedded_description_is_whole() {
        for name in names() {
            let h = named(name).unwrap();
            assert_eq!(h.name, name);
            let (gpu, link) = h.accelerator.expect("all have a GPU");
            assert!(gpu.bw > link.h2d_bw, "{name}");
        }
        assert_eq!(named("nosuch"), None);
    }

    #[test]
    fn whole_numbers_and_floats_are_read() {
        let h = parse("box.toml", GOOD).unwrap();
        assert_eq!((h.name.as_str(), h.cpu.cores, h.accelerator.unwrap().0.mem_bytes), ("box", 8, 8e9));
        assert_eq!(h.efficiency, Efficiency::default());
        let tuned = parse("box.toml", &format!("{GOOD}[efficiency]\ncpu_memory = 0.9\ngpu_issue_s = 1e-4\n"))
            .unwrap();
        assert_eq!((tuned.efficiency.cpu_memory, tuned.efficiency.gpu_issue_s), (0.9, 1e-4));
        assert_eq!(tuned.efficiency.cpu_beside_copies, 1.0);
        let slowed = parse("box.toml", &format!("{GOOD}[efficiency]\ncpu_beside_copies = 0.7\n")).unwrap();
        assert_eq!(slowed.efficiency.cpu_beside_copies, 0.7);
    }

    #[test]
    fn a_machine_may_have_no_gpu() {
        let cpu = &GOOD[..GOOD.find("[gpu]").unwrap()];
        assert_eq!(parse("box.toml", cpu).unwrap().accelerator, None);
    }

    #[test]
    fn every_field_is_needed_and_named() {
        for line in GOOD.lines().filter(|l| l.contains('=')) {
            let key = line.split(' ').next().unwrap();
            let error = parse("box.toml", &GOOD.replacen(&format!("{line}\n"), "", 1)).unwrap_err();
            assert!(error.to_string().contains(&format!(".{key}: missing")), "{key}: {error}");
            for bad in ["-1", "1e30", "nan", "inf", "-inf", "\"many\"", "true", "[1]"] {
                let text = GOOD.replacen(line, &format!("{key} = {bad}"), 1);
                let error = parse("box.toml", &text).unwrap_err().to_string();
                assert!(error.contains(&format!(".{key}: ")) && error.contains("wanted"), "{bad}: {error}");
            }
            if key != "latency_s" {
                let error = parse("box.toml", &GOOD.replacen(line, &format!("{key} = 0"), 1)).unwrap_err();
                assert!(error.to_string().contains(&format!(".{key}: 0, wanted")), "{error}");
            }
        }
    }

    #[test]
    fn what_is_unknown_or_no_toml_is_told() {
        for (text, want) in [
            (format!("{GOOD}lanes = 16\n"), "box.toml: link.lanes: no such field; [link] has h2d_bw"),
            (format!("{GOOD}[npu]\nx = 1\n"), "box.toml: npu: no such section"),
            (format!("x = 1\n{GOOD}"), "box.toml: x: no such section"),
            (GOOD.replacen("[gpu]", "[gpus]", 1), "gpus: no such section"),
            ("gpu = 1".into(), "box.toml: [cpu]: this section is missing"),
            (String::new(), "box.toml: [cpu]: this section is missing"),
            (GOOD.replacen("cores = 8", "cores = 8.5", 1), "cpu.cores: 8.5, wanted a whole number"),
            ("[cpu\n".into(), "line 1 is not TOML"),
            (format!("{GOOD}[efficiency]\nlink = 1.5\n"), "efficiency.link: 1.5, wanted a share"),
        ] {
            let error = parse("box.toml", &text).unwrap_err();
            assert!(error.to_string().contains(want), "{want}: {error}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
        let half = &GOOD[..GOOD.find("[link]").unwrap()];
        assert!(parse("b", half).unwrap_err().to_string().contains("[link]: this section is missing"));
    }
}
