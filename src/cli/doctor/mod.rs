//! `tandem doctor`: what this machine can do, what it cannot, and why.

mod gpu;
mod limits;
mod machine;
mod self_test;
mod tuning;

use std::fmt::Write;

use anyhow::{Result, bail};
use serde::Serialize;
use tandem::device::{self, Kind, SelfTest};
use tandem::host::{NumaNode, numa_nodes};
use tandem::hub::Hub;
use tandem::simd::{Caps, Isa};

use super::progress::megabytes;
use super::pull::InCache;
use super::{output, progress, pull};

pub use self_test::verdicts;

/// Says what this machine can do, what it cannot, and why.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Skip the measurement of memory bandwidth and arithmetic (it takes a second).
    #[arg(long)]
    pub no_probe: bool,
    /// Run every kernel of this build on the GPU and compare it with the host's arithmetic (some ten seconds); a failure is
    /// an error. DEVICE is cuda, cuda:N or emulated:kernels [default: cuda].
    #[arg(long, value_name = "DEVICE", num_args = 0..=1, require_equals = true, default_missing_value = "cuda")]
    pub gpu: Option<Kind>,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    cpu: machine::CpuFacts,
    isa: IsaReport,
    memory: machine::Memory,
    tuning: tuning::Table,
    limits: Option<limits::Limits>,
    /// Least number of threads that read memory as fast as all of them, if `tandem profile` has measured it.
    attention_threads: Option<usize>,
    numa: Vec<NumaNode>,
    huge_pages: machine::HugePages,
    cuda: gpu::Cuda,
    /// Of `--gpu`.
    self_test: Option<SelfTest>,
    cache: CacheReport,
}

#[derive(Serialize)]
struct IsaReport {
    /// The tier that runs; `None` if none does (a bad `TANDEM_ISA`).
    selected: Option<&'static str>,
    problem: Option<String>,
    /// The value of `TANDEM_ISA`, if it is set.
    forced: Option<String>,
    tiers: Vec<Tier>,
    features: Features,
}

#[derive(Serialize)]
struct Tier {
    name: &'static str,
    available: bool,
    why_not: Option<&'static str>,
}

#[derive(Serialize)]
struct Features {
    avx2: bool,
    avx_vnni: bool,
    avx512: bool,
    avx512_vnni: bool,
    avx512_bf16: bool,
    avx512_vbmi: bool,
    amx: bool,
}

#[derive(Serialize)]
struct CacheReport {
    home: String,
    free_bytes: Option<u64>,
    models: Vec<InCache>,
}

/// Collects, measures and prints the report.
pub fn run(args: &Args) -> Result<()> {
    let hub = Hub::from_env()?;
    // Before anything is printed: without a device there is nothing to say.
    let self_test =
        args.gpu.as_ref().map(|kind| device::self_test(kind, verdicts().as_deref())).transpose()?;
    let cpu = machine::cpu();
    let memory = machine::memory();
    let limits = (!args.no_probe).then(|| {
        progress::detail("measuring memory bandwidth and arithmetic");
        limits::measure(cpu.threads, memory.usable())
    });
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        isa: isa(),
        tuning: tuning::table(),
        limits,
        attention_threads: tandem::profile::measured_readers(None),
        numa: numa_nodes(),
        huge_pages: machine::huge_pages(),
        cuda: gpu::cuda(),
        self_test,
        cache: CacheReport {
            home: hub.cache().home().display().to_string(),
            free_bytes: hub.cache().free_bytes(),
            models: pull::cached(&hub),
        },
        cpu,
        memory,
    };
    if args.json {
        output::json(&report)?
    } else {
        output::print(&text(&report))?
    }
    match &report.self_test {
        Some(found) if !found.passed() => bail!("{}", self_test::sentence(found)),
        _ => Ok(()),
    }
}

fn isa() -> IsaReport {
    let caps = Caps::get();
    let selected = Isa::selected();
    let tier =
        |isa: &Isa| Tier { name: isa.name(), available: isa.missing().is_none(), why_not: isa.missing() };
    IsaReport {
        problem: selected.as_ref().err().map(|e| e.to_string()),
        selected: selected.ok().map(Isa::name),
        forced: std::env::var("TANDEM_ISA").ok().filter(|v| !v.is_empty()),
        tiers: Isa::ALL.iter().map(tier).collect(),
        features: Features {
            avx2: caps.avx2,
            avx_vnni: caps.avx_vnni,
            avx512: caps.avx512,
            avx512_vnni: caps.avx512_vnni,
            avx512_bf16: caps.avx512_bf16,
            avx512_vbmi: caps.avx512_vbmi,
            amx: caps.amx.is_ok(),
        },
    }
}

/// The report as text: `+` works, `-` does not, `!` deserves attention.
fn text(report: &Report) -> String {
    let mut out = String::new();
    let mut row = |mark: char, what: &str, found: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{mark} {what:<12} {found}");
    };
    row('+', "tandem", report.version.to_owned());
    let cpu = &report.cpu;
    row('+', "cpu", cpu.model.clone());
    row('+', "threads", cpu.describe());
    if let Some(threads) = report.attention_threads {
        row(
            '+',
            "attention",
            format!("{threads} threads for single rows: more read memory no faster (tandem profile)"),
        );
    }

    for tier in &report.isa.tiers {
        let runs = report.isa.selected == Some(tier.name);
        let mark = if tier.available { '+' } else { '-' };
        let forced =
            report.isa.forced.as_deref().filter(|f| *f == tier.name).map_or("", |_| ", forced by TANDEM_ISA");
        let found = match tier.why_not {
            Some(why) => format!("no: {why}"),
            None if runs => format!("yes, in use{forced}"),
            None => "yes".to_owned(),
        };
        row(mark, &format!("isa {}", tier.name), found);
    }
    if let Some(problem) = &report.isa.problem {
        row('!', "isa", problem.clone());
    }
    let f = &report.isa.features;
    let flags = [
        ("avx2+fma+f16c", f.avx2),
        ("avx-vnni", f.avx_vnni),
        ("avx512", f.avx512),
        ("vnni", f.avx512_vnni),
        ("bf16", f.avx512_bf16),
        ("vbmi", f.avx512_vbmi),
        ("amx", f.amx),
    ];
    let have: Vec<_> = flags.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
    row('+', "features", if have.is_empty() { "none of those used".into() } else { have.join(" ") });

    for (what, found) in report.tuning.describe() {
        row('+', what, found);
    }
    row('+', "memory", report.memory.describe());
    match &report.limits {
        Some(limits) => {
            row('+', "bandwidth", limits.bandwidth());
            row('+', "arithmetic", limits.arithmetic());
            let (mark, found) = limits.cores();
            row(mark, "cores", found);
        }
        None => row('-', "limits", "not measured (--no-probe)".into()),
    }
    match &report.numa[..] {
        [] => row('-', "numa", "this system does not tell".into()),
        nodes => {
            for node in nodes {
                row('+', &format!("numa {}", node.node), node.describe());
            }
        }
    }
    let (mark, found) = report.huge_pages.describe();
    row(mark, "huge pages", found);
    for (mark, what, found) in report.cuda.describe() {
        row(mark, &what, found);
    }
    for (mark, what, found) in report.self_test.iter().flat_map(self_test::describe) {
        row(mark, &what, found);
    }
    let free = report.cache.free_bytes.map_or(String::new(), |b| format!(" ({} free)", megabytes(b)));
    row('+', "cache", format!("{}{free}", report.cache.home));
    if report.cache.models.is_empty() {
        row('-', "models", "none yet; tandem pull --list".into());
    }
    for model in &report.cache.models {
        row('+', "model", model.describe());
    }
    out
}
