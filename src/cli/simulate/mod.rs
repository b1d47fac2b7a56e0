//! `tandem simulate`: many requests by several strategies on a machine that need not be there.

pub(super) mod plot;
pub(super) mod table;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use serde::Serialize;
use tandem::cache::KvType;
use tandem::open;
use tandem::plan::{self, CostSource, ExpertCounts, Hardware, Predictor, Sizes, Uncached};
use tandem::profile::{Tables, Timings};
use tandem::program::Placement;
use tandem::sched::{self, Targets};
use tandem::sim::{self, PageCapacity, Report, Room};
use tandem::timeline::{StepWindow, Timeline};
use tandem::workload::{Arrival, Shape, Source, Workload};
use tandem::{Error, atomic_file};

use super::args::{COHORTS, LengthsChoice, kv_type, size};
use super::figures;
use super::plan::inputs;
use super::targets::{self, Nearest, TargetArgs};
use super::{output, progress, records, timeline};

/// Runs a trace of requests by several strategies on a machine that need not be there, and compares them.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model's sizes: a name from specs/ (llama-2-7b, qwen3-8b...), or a config.json; weights count as 16-bit floats.
    #[arg(long, value_name = "NAME|FILE", required_unless_present = "model")]
    pub spec: Option<String>,
    /// The model, with the types of its weights: a .gguf file, a folder, or a name that `tandem pull` knows.
    #[arg(short, long, value_name = "MODEL", conflicts_with = "spec")]
    pub model: Option<String>,
    /// The machine: auto (measure this one), a name from hardware/ (t4-xeon, a10g-g5...), or a TOML file.
    #[arg(long, value_name = "auto|NAME|FILE", default_value = "auto")]
    pub hardware: String,
    /// This machine as `tandem profile -o FILE` has measured it.
    #[arg(long, value_name = "FILE", conflicts_with = "hardware")]
    pub profile: Option<PathBuf>,
    /// The requests: a CSV file with columns of prompt and answer lengths, and of times if it has them; or
    /// synthetic:IN,OUT,N,RATE, where IN and OUT are tokens or a range of them (100..200), and RATE 0 is offline.
    #[arg(long, value_name = "FILE.csv|synthetic:...")]
    pub trace: Source,
    /// The strategies: gpu-only, fastdecode, neo, apex, auto; and vllm, the GPU alone as the papers have it.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = strategy,
          default_values_t = sched::NAMES.map(str::to_owned))]
    pub strategy: Vec<String>,
    /// Most memory to use on the GPU, like 15GiB [default: all but 0.5 GB].
    #[arg(long, value_parser = size, value_name = "SIZE", allow_hyphen_values = true)]
    pub gpu_memory: Option<u64>,
    /// Most memory to use on the host [default: all but 5%].
    #[arg(long, value_parser = size, value_name = "SIZE", allow_hyphen_values = true)]
    pub host_memory: Option<u64>,
    /// Units (embedding, blocks, head) on the CPU's side, the others on the GPU [default: 0, or the fewest with which the model and a few
    /// requests fit the GPU].
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub boundary: Option<u32>,
    /// Of a mixture of experts, blocks whose experts are on the CPU's side: the first ones, or spread evenly where it is faster to copy them to
    /// the GPU for prompts [default: 0, or the fewest with which the model and a few requests fit the GPU].
    #[arg(long, value_name = "N", allow_negative_numbers = true, conflicts_with = "boundary")]
    pub n_cpu_moe: Option<u32>,
    /// Most pages of keys and values (32 tokens each) on the GPU [default: as many as fit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub kv_pages: Option<u32>,
    /// How keys and values are stored: 16-bit floats, or codes of 8 bits with a scale for each token and head.
    #[arg(long, alias = "kv", value_parser = kv_type(), default_value = KvType::BF16.name())]
    pub kv_type: KvType,
    /// Requests per second: stretches a trace with times, draws Poisson arrivals for others; 0 is offline
    /// [default: as the trace says, offline if it says nothing].
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub rate: Option<f64>,
    /// Only the first requests of the trace.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub limit: Option<u32>,
    /// The same seed draws the same arrivals and lengths.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Most rows of a sub-batch: prompts longer than that are computed in chunks.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536), value_name = "N", default_value_t = 2048,
          allow_negative_numbers = true)]
    pub chunk: u32,
    /// Most requests that run at a time.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536), value_name = "N", default_value_t = 512,
          allow_negative_numbers = true)]
    pub sequences: u32,
    /// Most tokens of each answer. Strategies know them and not that an answer ends where the trace says [default: where the trace says].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 24), value_name = "N", allow_negative_numbers = true)]
    pub max_answer: Option<u32>,
    /// What strategies then expect of answers' lengths: those of answers that have ended, or all that they may have.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = LengthsChoice::Learned, requires = "max_answer")]
    pub lengths: LengthsChoice,
    /// Cohorts of the host's requests that asynchronous overlap has under way at a time.
    #[arg(long, value_parser = clap::value_parser!(u32).range(COHORTS), value_name = "N", default_value_t = 1,
          allow_negative_numbers = true)]
    pub cohorts: u32,
    /// Draw throughput, and latency against load (of offline synthetic requests, gain against the length of answers).
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// What is asked of latency.
    #[command(flatten)]
    pub targets: TargetArgs,
    /// Write a line for each request of each strategy.
    #[arg(long, value_name = "FILE.csv")]
    pub records: Option<PathBuf>,
    /// Steps, drawn.
    #[command(flatten)]
    pub timeline: timeline::TimelineArgs,
    /// Show joules per generated token, and what a million of them cost, where the machine's description has watts and prices.
    #[arg(long)]
    pub energy: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

fn strategy(name: &str) -> Result<String, String> {
    match sched::by_name(name) {
        Some(_) => Ok(name.to_owned()),
        None => Err(format!("choose some of {}, vllm", sched::NAMES.join(", "))),
    }
}

/// The model and machine that all reports share.
pub struct ReportHead<'a> {
    /// The model's name.
    pub model: &'a str,
    /// The machine's name.
    pub hardware: &'a str,
    /// Tokens whose keys and values fit on the GPU, and on the host.
    pub tokens: (usize, usize),
    /// How they are stored.
    pub kv_type: &'a str,
    /// Units on the host, of a layer split.
    pub boundary: Option<usize>,
    /// Of a mixture of experts, those on each side.
    pub experts: Option<ExpertCounts>,
}

/// Everything that is printed.
#[derive(Serialize)]
struct Printed<'a> {
    strategies: &'a [Report],
    model: &'a str,
    hardware: &'a str,
    workload: Requests<'a>,
    kv_tokens: KvTokens,
    kv_type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    boundary: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertCounts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    targets: Option<Asked>,
}

/// What was asked of latency.
#[derive(Serialize)]
struct Asked {
    #[serde(flatten)]
    targets: Targets,
    /// If no strategy keeps them.
    nearest: Option<Nearest>,
}

/// The request of the user.
#[derive(Serialize)]
struct Requests<'a> {
    name: &'a str,
    requests: usize,
    input_tokens: u64,
    output_tokens: u64,
    rate: Option<f64>,
    bad_rows: usize,
    cut: usize,
}

/// Keys and values that fit on each side.
#[derive(Serialize)]
struct KvTokens {
    gpu: usize,
    host: usize,
}

/// A machine with a model on it.
pub struct Setup {
    hardware: Hardware,
    sizes: Sizes,
    tables: Option<Tables>,
    options: sim::Options,
    /// Units on the host.
    boundary: usize,
    /// Where weights are.
    placement: Placement,
}

/// Simulates a run, reporting the number of finished requests.
type One<'a, T> = &'a (dyn Fn(&Predictor, &Run<'_>, &mut dyn FnMut(u64)) -> tandem::Result<T> + Sync);

/// One simulation to run.
pub struct Run<'a> {
    strategy: &'a str,
    requests: &'a [Arrival],
}

impl Setup {
    fn about(&self) -> ReportHead<'_> {
        let tokens = self.options.capacity.tokens();
        let boundary = (self.boundary > 0).then_some(self.boundary);
        let experts = ExpertCounts::of(&self.sizes.spec, &self.placement);
        ReportHead {
            model: &self.sizes.spec.name,
            hardware: &self.hardware.name,
            tokens,
            kv_type: self.sizes.kv().name(),
            boundary,
            experts,
        }
    }

    /// Simulates all runs; results are in the same order.
    fn run(&self, runs: &[Run<'_>], what: &str) -> Result<Vec<Report>> {
        self.each(runs, what, &|predictor, run, seen| {
            let mut strategy = sched::by_name(run.strategy).expect("the parser knows its names");
            sim::simulate(run.requests, &mut *strategy, predictor, &self.options, seen)
        })
    }

    /// The timeline of each run within the window.
    fn look(&self, runs: &[Run<'_>], window: StepWindow) -> Result<Vec<Timeline>> {
        self.each(runs, "simulating for the timeline", &|predictor, run, seen| {
            let mut strategy = sched::by_name(run.strategy).expect("the parser knows its names");
            sim::timeline(run.requests, &mut *strategy, predictor, &self.options, window, seen)
        })
    }

    /// Simulates all runs on all cores; results are in the same order.
    fn each<T: Send>(&self, runs: &[Run<'_>], what: &str, one: One<'_, T>) -> Result<Vec<T>> {
        let total: usize = runs.iter().map(|r| r.requests.len()).sum();
        let bar = progress::count_bar(total as u64, what);
        let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
        let results: Vec<Mutex<Option<tandem::Result<T>>>> = runs.iter().map(|_| Mutex::new(None)).collect();
        let work = || {
            while let Some((i, run)) = {
                let i = next.fetch_add(1, Ordering::Relaxed);
                runs.get(i).map(|r| (i, r))
            } {
                let mut before = 0;
                let result = one(&self.predictor(), run, &mut |over| {
                    bar.set(done.fetch_add(over - before, Ordering::Relaxed) + over - before);
                    before = over;
                });
                *results[i].lock().expect("nobody panics with it") = Some(result);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(runs.len());
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        bar.finish();
        let of = |r: Mutex<Option<_>>| r.into_inner().expect("nobody panicked").expect("every run was made");
        results.into_iter().map(|r| Ok(of(r)?)).collect()
    }

    /// A new predictor: each run has its own, with its own memory.
    fn predictor(&self) -> Predictor {
        let PageCapacity { device_pages, host_pages } = self.options.capacity;
        let placement = Placement { device_pages, host_pages, ..self.placement.clone() };
        let source = costs(&self.hardware, self.tables.as_ref());
        Predictor::of(source, self.sizes.clone(), placement)
    }
}

/// The costs of a machine, by its timings if there are any.
fn costs(hardware: &Hardware, tables: Option<&Tables>) -> Arc<dyn CostSource> {
    match tables {
        Some(tables) => Arc::new(Timings::new(hardware.clone(), tables.clone())),
        None => Arc::new(Uncached(hardware.clone())),
    }
}

/// Where the model is, and what it leaves room for.
struct Split {
    /// Units on the host.
    boundary: usize,
    placement: Placement,
    capacity: PageCapacity,
    /// Requests that are too long for the GPU.
    longer: usize,
}

/// As asked; or all on the GPU, and if that does not fit the fewest units on the host with which a few requests do, or of a mixture the
/// experts of the fewest blocks.
fn split(
    args: &Args,
    source: &dyn CostSource,
    hardware: &Hardware,
    sizes: &Sizes,
    room: &Room,
    (requests, lengths): (&[Arrival], &[u32]),
) -> Result<Split> {
    let of = |boundary: usize, placement: Placement| {
        let (capacity, longer) =
            PageCapacity::serving(hardware, sizes, room, &placement, lengths.iter().copied())?;
        Ok::<_, Error>(Split { boundary, placement, capacity, longer })
    };
    let layers = sizes.layers();
    let at = |k: usize| of(k, Placement::boundary(k, layers, 0, 0));
    let mean = |of: fn(&Arrival) -> u32| {
        requests.iter().map(|r| u64::from(of(r))).sum::<u64>() / requests.len().max(1) as u64
    };
    let work = plan::Workload {
        prompt: mean(|r| r.input).max(1),
        gen_len: mean(|r| r.output),
        batch: plan::FEW_REQUESTS as u64,
        chunk: room.rows.into(),
    };
    let sum: u64 = lengths.iter().map(|&n| u64::from(n)).sum();
    let few = plan::FEW_REQUESTS as u64 * sum / lengths.len().max(1) as u64;
    let enough = |found: &Split| found.capacity.tokens().0 as u64 >= few;
    let is_mixture = sizes.spec.experts.is_some();
    if let Some(n) = args.n_cpu_moe {
        let n = n as usize;
        if !is_mixture || n > layers {
            let what = if is_mixture { format!("has {layers} blocks") } else { "has no experts".into() };
            return Err(Error::usage(format!("--n-cpu-moe {n}: {} {what}", sizes.spec.name)).into());
        }
        // As where N was found, if there is as much room.
        let at_n = |wanted: &dyn Fn(&Split) -> bool| {
            let fits = |placement: Placement| of(0, placement).ok().filter(wanted);
            plan::experts_for_requests(source, sizes, &work, n..=n, fits)
        };
        return match at_n(&enough).or_else(|| at_n(&|_| true)) {
            Some((_, split)) => Ok(split),
            // For the numbers.
            None => Ok(of(0, plan::experts_on_host(sizes, n))?),
        };
    }
    let whole = match args.boundary {
        Some(k) => return Ok(at(k as usize)?),
        None => at(0),
    };
    let Err(error @ Error::Capacity(_)) = whole else { return Ok(whole?) };
    if is_mixture {
        let fits = |placement: Placement| of(0, placement).ok().filter(enough);
        let Some((n, found)) = plan::experts_for_requests(source, sizes, &work, 1..=layers, fits) else {
            return Err(of(0, plan::experts_on_host(sizes, layers)).err().unwrap_or(error).into());
        };
        progress::note(&format!(
            "{} does not fit {}: the experts of {n} of {layers} blocks stay on the host{} (--n-cpu-moe {n})",
            sizes.spec.name,
            hardware.name,
            match found.placement.stream_rows {
                0 => String::new(),
                rows => format!(", and are copied to the GPU for {rows} rows of prompts or more"),
            }
        ));
        return Ok(found);
    }
    let Some(found) = (2..=layers).filter_map(|k| at(k).ok()).find(enough) else { return Err(error.into()) };
    progress::note(&format!(
        "{} does not fit {}: {} of {layers} blocks stay on the host (--boundary {})",
        sizes.spec.name,
        hardware.name,
        found.boundary - 1,
        found.boundary
    ));
    Ok(found)
}

/// Reads the inputs, simulates and prints.
pub fn run(args: &Args) -> Result<()> {
    for (flag, bytes) in [("--gpu-memory", args.gpu_memory), ("--host-memory", args.host_memory)] {
        if bytes == Some(0) {
            return Err(Error::usage(format!("{flag}: 0 bytes; leave the option out to use all")).into());
        }
    }
    if let Some(path) = &args.plot
        && path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("svg"))
    {
        return Err(
            Error::usage(format!("--plot {}: wanted the name of an .svg file", path.display())).into()
        );
    }
    // Checked before the work, not after it.
    args.plot.as_deref().map_or(Ok(()), atomic_file::check)?;
    args.records.as_deref().map_or(Ok(()), atomic_file::check)?;
    let asked = args.targets.targets()?;
    let window = args.timeline.window()?;
    let subject = inputs::PlanSubject::of(args.spec.as_deref(), args.model.as_deref(), None)?;
    let (model, sizes) = (subject.identity().cloned(), subject.sizes.with_kv(args.kv_type));
    let (hardware, tables) = match &args.profile {
        Some(file) => open::profiled(file, model.as_ref())?,
        None => open::hardware(&args.hardware, model.as_ref(), &progress::Stderr::default())?,
    };
    figures::check_memory(&hardware, args.gpu_memory, args.host_memory)?;
    figures::check_energy(args.energy, &hardware)?;
    let shape = Shape {
        rate: args.rate,
        limit: args.limit.map(|n| n as usize),
        seed: args.seed,
        context: Some((sizes.spec.max_context as u64).clamp(2, 1 << 25) as u32),
    };
    let work = load(&args.trace, &shape)?;
    let room = Room {
        rows: args.chunk,
        sequences: args.sequences,
        context: 2,
        gpu_memory: args.gpu_memory,
        host_memory: args.host_memory,
    };
    let answer = |output: u32| output.max(args.max_answer.unwrap_or(0));
    let lengths: Vec<u32> = work.requests.iter().map(|r| r.input.saturating_add(answer(r.output))).collect();
    let source = costs(&hardware, tables.as_ref());
    let Split { boundary, placement, mut capacity, longer } =
        split(args, &*source, &hardware, &sizes, &room, (&work.requests, &lengths))?;
    if longer > 0 {
        progress::note(&format!(
            "{longer} of {} requests are longer than the GPU can hold beside the weights: they do not size its workspace",
            work.requests.len()
        ));
    }
    if let Some(pages) = args.kv_pages {
        if pages as usize > capacity.device_pages {
            return Err(Error::usage(format!(
                "--kv-pages {pages}: {} has room for {} pages beside {}; set at most that, or leave the option out",
                hardware.name, capacity.device_pages, sizes.spec.name
            ))
            .into());
        }
        capacity.device_pages = pages as usize;
    }
    let options = sim::Options {
        rows: args.chunk,
        sub_batches: 1 + args.cohorts,
        sequences: args.sequences,
        capacity,
        targets: asked,
        most_answer: args.max_answer,
        learns_lengths: args.lengths == LengthsChoice::Learned,
    };
    let setup = Setup { hardware, sizes, tables, options, boundary, placement };
    if asked.is_some() {
        let said = targets::impossible(&asked, &work.requests, args.chunk, &setup.predictor());
        said.iter().for_each(|sentence| progress::note(sentence));
    }
    let mut names: Vec<&str> = Vec::new();
    args.strategy.iter().for_each(|n| {
        if !names.contains(&n.as_str()) {
            names.push(n)
        }
    });
    let runs: Vec<Run<'_>> =
        names.iter().map(|strategy| Run { strategy, requests: &work.requests }).collect();
    let mut reports = setup.run(&runs, "simulating")?;
    count_bad_rows(&work, &mut reports);
    reports.iter_mut().for_each(|report| report.spend(&setup.hardware));
    if let Some(path) = &args.records {
        records::write(path, &reports, &asked)?;
    }
    if let Some(window) = window {
        let timelines = setup.look(&runs, window)?;
        let title = format!("{} on {}: {}", setup.sizes.spec.name, setup.hardware.name, work.name);
        args.timeline.write(&title, &names, &timelines)?;
    }
    if let Some(path) = &args.plot {
        let curve = plot::sweep(&setup, args, &work, &names, &reports)?;
        let drawn = plot::svg(&setup.about(), &work, &reports, &curve)?;
        atomic_file::replace(path, |to| to.write_all(drawn.as_bytes()))?;
    }
    if !args.json {
        return output::print(&table::text(&setup.about(), &work, &reports, &asked, args.energy));
    }
    output::json(&json(&setup.about(), &work, &reports, &asked)?)
}

/// Rows of a trace that are no requests count as failed for every strategy.
pub fn count_bad_rows(work: &Workload, reports: &mut [Report]) {
    if work.bad_rows > 0 {
        let first = work.bad.first().map(ToString::to_string).unwrap_or_default();
        for report in reports {
            report.failed += work.bad_rows;
            report.requests.failed += work.bad_rows;
            report.requests.reasons.push((format!("no request: {first}"), work.bad_rows));
        }
    }
}

/// The reports as JSON.
pub fn json(
    about: &ReportHead<'_>,
    work: &Workload,
    reports: &[Report],
    asked: &Targets,
) -> Result<serde_json::Value> {
    let ((gpu, host), (input_tokens, output_tokens)) = (about.tokens, work.tokens());
    Ok(serde_json::to_value(Printed {
        strategies: reports,
        model: about.model,
        hardware: about.hardware,
        workload: Requests {
            name: &work.name,
            requests: work.requests.len(),
            input_tokens,
            output_tokens,
            rate: work.rate(),
            bad_rows: work.bad_rows,
            cut: work.cut,
        },
        kv_tokens: KvTokens { gpu, host },
        kv_type: about.kv_type,
        boundary: about.boundary,
        experts: about.experts,
        targets: asked
            .is_some()
            .then(|| Asked { targets: *asked, nearest: targets::nearest(reports, asked) }),
    })?)
}

/// Loads the requests and prints notes about them.
pub fn load(source: &Source, shape: &Shape) -> Result<Workload> {
    let bar = match source {
        Source::Trace(path) => {
            let bytes = std::fs::metadata(path).ok().map(|m| m.len());
            Some(progress::bytes_bar(bytes, &format!("reading {}", path.display())))
        }
        Source::Synthetic(_) => None,
    };
    let work = Workload::load(source, shape, |bytes| {
        if let Some(bar) = &bar {
            bar.set(bytes)
        }
    })?;
    if let Some(bar) = bar {
        bar.finish();
    }
    for bad in work.bad.iter().take(3) {
        progress::note(&format!("{}: {bad}", work.name));
    }
    if work.bad_rows > 3 {
        progress::note(&format!("{}: {} rows are no requests and count as failed", work.name, work.bad_rows));
    }
    if work.cut > 0 {
        progress::note(&format!(
            "{} of {} requests were cut to the context of {} tokens",
            work.cut,
            work.requests.len(),
            shape.context.unwrap_or_default()
        ));
    }
    Ok(work)
}
