//! `tandem plan`: how a model would run on a machine, predicted: candidates, times, memory, and why the winner won.

pub(super) mod inputs;
mod map;
pub(super) mod plot;
pub(super) mod table;

use std::path::PathBuf;

use anyhow::Result;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Serialize;
use tandem::cache::KvType;
use tandem::host::NumaWish;
use tandem::plan::{Candidate, Costs, Hardware, Plan, PlanRequest, Roofline, Sizes, Strategy, plan_with};
use tandem::profile::Tables;
use tandem::{Error, atomic_file};

use super::args::{FixedArgs, kv_type, size};
use super::{figures, output, progress};

/// Predicts how a model would run on a machine: candidates, times, memory on each side, and why the winner won.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model's sizes: a name from specs/ (qwen3-8b, opt-30b...), or a config.json; weights count as bf16.
    #[arg(long, value_name = "NAME|FILE", required_unless_present = "model")]
    pub spec: Option<String>,
    /// The model, with the types of its weights: a .gguf file, a folder, or a name that `tandem pull` knows.
    #[arg(short, long, value_name = "MODEL", conflicts_with = "spec")]
    pub model: Option<String>,
    /// The machine: auto (measure this one), a name from hardware/ (rtx4060-laptop, a100-spr...), or a TOML file.
    #[arg(long, value_name = "auto|NAME|FILE", default_value = "auto")]
    pub hardware: String,
    /// Tokens of a prompt.
    #[arg(long, value_name = "S", default_value_t = 512, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    pub prompt_len: u32,
    /// Tokens of an answer: decode steps.
    #[arg(long, value_name = "T", default_value_t = 128, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    pub gen_len: u32,
    /// Sequences.
    #[arg(long, value_name = "B", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub batch: u32,
    /// Most memory to use on the GPU, like 6GiB [default: all but 0.5 GB].
    #[arg(long, value_parser = size, value_name = "SIZE", allow_hyphen_values = true)]
    pub gpu_memory: Option<u64>,
    /// Storage of keys and values: 16-bit floats, or q8: 8 bits, about half the memory.
    #[arg(long, alias = "kv", value_parser = kv_type(), default_value = KvType::BF16.name())]
    pub kv_type: KvType,
    /// Memory nodes for weights on the host, page by page over several: numbers of [[node]] in the machine's description, or
    /// interleave for all; 0 is the CPU's own memory [default: the CPU's own memory, where they fit, else the other nodes].
    #[arg(long, value_name = "NODES|interleave", allow_hyphen_values = true)]
    pub weights_node: Option<NumaWish>,
    /// Compare all, or predict one; what is fixed of a placement selects its strategy.
    #[arg(long, value_parser = Choice::parser(), default_value = "auto")]
    pub strategy: Choice,
    /// How often the routers of a mixture choose which expert: a copy that `tandem profile --router -o` made, also of other weight types
    /// of the model [default: what tandem profile has recorded of -m, else each expert as often as any other].
    #[arg(long, value_name = "FILE")]
    pub router_profile: Option<PathBuf>,
    /// What is fixed of the placement.
    #[command(flatten)]
    pub fixed: FixedArgs,
    /// Prompt tokens per prefill step [default: searched].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536), value_name = "N",
          allow_negative_numbers = true)]
    pub chunk: Option<u32>,
    /// Choose LIA's vectors for transfers under compute, not by the paper's serial costs.
    #[arg(long)]
    pub overlap: bool,
    /// Print LIA's best vectors over batches and prompt lengths, like B=1..2048,S=32..4096.
    #[arg(long, value_name = "RANGES", value_parser = map::ranges)]
    pub policy_map: Option<map::MapRanges>,
    /// Draw time against k, memory, and LIA's policy map.
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Show joules per generated token, and what a million of them cost, where the machine's description has watts and prices.
    #[arg(long)]
    pub energy: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What to predict: a strategy, or all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice(Option<Strategy>);

impl Choice {
    fn parser() -> impl TypedValueParser<Value = Choice> {
        let names = ["auto"].into_iter().chain(Strategy::ALL.map(Strategy::name));
        PossibleValuesParser::new(names).map(|name| Choice(Strategy::named(&name)))
    }

    fn name(self) -> &'static str {
        self.0.map_or("auto", Strategy::name)
    }
}

/// Everything that is printed and drawn.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    hardware: &'a Hardware,
    prompt_len: u64,
    gen_len: u64,
    batch: u64,
    /// How keys and values are stored.
    kv_type: &'a str,
    /// Source of the times: `tables` or `roofline`.
    times: &'a str,
    /// Source of how often each expert is chosen: `uniform`, or a file; null of a dense model.
    router: Option<&'a str>,
    candidates: &'a [Candidate],
    chosen: Option<Strategy>,
    why: &'a str,
}

/// Reads the inputs, plans and prints.
pub fn run(args: &Args) -> Result<()> {
    if args.gpu_memory == Some(0) {
        return Err(Error::usage("--gpu-memory: 0 bytes; leave the option out to use all").into());
    }
    if let Some(path) = &args.plot
        && path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("svg"))
    {
        return Err(
            Error::usage(format!("--plot {}: wanted the name of an .svg file", path.display())).into()
        );
    }
    let strategy = match args.strategy {
        Choice(None) => Choice(args.fixed.fixed().strategy()),
        strategy => strategy,
    };
    args.fixed.fixed().check_strategy(strategy.name())?;
    let subject =
        inputs::PlanSubject::of(args.spec.as_deref(), args.model.as_deref(), args.router_profile.as_deref())?;
    let subject = inputs::PlanSubject { sizes: subject.sizes.with_kv(args.kv_type), ..subject };
    let sizes = &subject.sizes;
    let (hardware, tables) =
        tandem::open::hardware(&args.hardware, subject.identity(), &progress::Stderr::default())?;
    figures::check_memory(&hardware, args.gpu_memory, None)?;
    figures::check_energy(args.energy, &hardware)?;
    if args.gpu_memory.is_some() && hardware.accelerator.is_none() {
        return Err(Error::usage(format!(
            "--gpu-memory: {} has no GPU; leave the option out",
            hardware.name
        ))
        .into());
    }
    let hardware = match &args.weights_node {
        Some(wish) => hardware.with_weights_on(&wish.numbers(&hardware.all_nodes()))?,
        None => hardware,
    };
    if let Some(ranges) = &args.policy_map
        && args.plot.is_none()
    {
        let map = map::compute(sizes, &hardware, ranges, args.overlap)?;
        return if args.json { output::json(&map) } else { output::print(&map.text()) };
    }
    let request = PlanRequest {
        prompt: args.prompt_len.into(),
        gen_len: args.gen_len.into(),
        batch: args.batch.into(),
        gpu_memory: args.gpu_memory,
        chunk: args.chunk.map(Into::into),
        overlap: args.overlap,
        fixed: args.fixed.fixed(),
    };
    if tables.is_some() {
        progress::note("times are from the tables that tandem profile has measured of this model");
    }
    if sizes.has_router() {
        progress::note("experts are read as their router's profile says");
    }
    let strategies = strategy.0.map_or(Strategy::ALL.to_vec(), |strategy| vec![strategy]);
    let planned = |on: &Hardware| planned(&subject, on, &request, &strategies, tables.as_ref());
    let mut found = planned(&hardware)?;
    let spare = hardware.spare_nodes();
    if args.weights_node.is_none() && !spare.is_empty() {
        found = found.or(planned(&hardware.with_weights_on(&spare)?)?);
    }
    // As the winner has it.
    let hardware = match found.chosen.and_then(|i| found.candidates[i].weights_nodes.as_ref()) {
        Some(nodes) => hardware.with_weights_on(nodes)?,
        None => hardware,
    };
    if let Some(path) = &args.plot {
        let ranges = match args.policy_map {
            Some(ranges) => ranges,
            None => map::MapRanges::usual(sizes.spec.max_context as u64),
        };
        let map = match hardware.accelerator {
            Some(_) => Some(map::compute(sizes, &hardware, &ranges, args.overlap)?),
            None => None,
        };
        let drawn = plot::svg(sizes, &hardware, &request, &found, map.as_ref())?;
        atomic_file::replace(path, |to| to.write_all(drawn.as_bytes()))?;
    }
    let Some(chosen) = found.chosen else { return Err(nowhere(sizes, &hardware, &found).into()) };
    if !args.json {
        return output::print(&table::text(sizes, &hardware, &request, &found, args.energy));
    }
    output::json(&Report {
        model: &sizes.spec.name,
        hardware: &hardware,
        prompt_len: request.prompt,
        gen_len: request.gen_len,
        batch: request.batch,
        kv_type: args.kv_type.name(),
        times: if tables.is_some() { "tables" } else { "roofline" },
        router: subject.router.as_deref(),
        candidates: &found.candidates,
        chosen: Some(found.candidates[chosen].strategy),
        why: &found.why,
    })
}

/// The plan for a machine, by the model's timings there, if there are any.
fn planned(
    subject: &inputs::PlanSubject,
    hardware: &Hardware,
    request: &PlanRequest,
    strategies: &[Strategy],
    tables: Option<&Tables>,
) -> tandem::Result<Plan> {
    let sizes = &subject.sizes;
    let roofline = Roofline::new(hardware, sizes);
    let timed = tables.map(|tables| tables.costs(hardware, sizes));
    let costs: &dyn Costs = match &timed {
        Some(timed) => timed,
        None => &roofline,
    };
    match &subject.model {
        Some((model, _)) => tandem::open::planned(model, sizes, hardware, request, strategies, costs),
        None => plan_with(sizes, hardware, request, strategies, costs),
    }
}

/// The error if no candidate fits: names the candidate that lacks least.
fn nowhere(sizes: &Sizes, hardware: &Hardware, plan: &Plan) -> Error {
    let lack = |c: &Candidate| {
        let (gpu, host) = (&c.memory.gpu, &c.memory.host);
        let nodes = c.memory.nodes.map_or(0, |n| n.weights.saturating_sub(n.available));
        gpu.total.saturating_sub(gpu.available) + host.total.saturating_sub(host.available) + nodes
    };
    // Without a GPU every strategy is that of the CPU alone.
    let usable = |c: &&Candidate| hardware.accelerator.is_some() || c.strategy == Strategy::CpuOnly;
    let least = plan.candidates.iter().filter(usable).min_by_key(|c| lack(c)).or(plan.candidates.first());
    let (who, why) = least.map_or(("", ""), |c| (c.strategy.name(), c.reason.as_str()));
    Error::Capacity(format!(
        "{} does not fit {}: {who} {why}; try a smaller batch or context, or a smaller model",
        sizes.spec.name, hardware.name
    ))
}
