//! `tandem bench`: prefill and decode speed of a model, or how it serves a trace of requests.
//!
//! Prefill is timed by requests for no token, decode by a batch of greedy requests after all their prompts: the loop is the one that
//! serves requests, so its own time counts.

mod replay;
mod trace;

use std::path::PathBuf;
use std::sync::mpsc::Receiver;

use tandem::Error;
use tandem::cache::KvType;
use tandem::engine::{Batcher, Engine, Event, Finish, Request};
use tandem::model::ModelSpec;
use tandem::open::{Demand, RunWork};
use tandem::program::Phase;
use tandem::sched::{Continuous, Decision, Limits, Predict, Queues, Strategy, Untimed};
use tandem::workload::Source;

use super::args::EngineArgs;
use super::stopwatch::{Stopwatch, time_of};
use super::targets::TargetArgs;
use super::{open, output, timeline};

/// Measures prefill and decode speed, or how requests of a trace are served.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a .gguf file, a folder, a name that `tandem pull` knows, or synth:NAME
    /// [default: smollm2-135m, fetched on first use].
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Prompt lengths to measure prefill with (0 skips it).
    #[arg(
        long,
        default_value = "512",
        value_delimiter = ',',
        value_name = "N,...",
        allow_negative_numbers = true
    )]
    pub prompt: Vec<u32>,
    /// Tokens to decode per measurement (0 skips it).
    #[arg(long, default_value_t = 128, value_name = "N", allow_negative_numbers = true)]
    pub r#gen: u32,
    /// Sequences decoded together.
    #[arg(long, default_value = "1", value_delimiter = ',', value_name = "B,...", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch: Vec<u32>,
    /// Tokens already in the context when decoding starts; at least 1 is there.
    #[arg(
        long,
        default_value = "0",
        value_delimiter = ',',
        value_name = "D,...",
        allow_negative_numbers = true
    )]
    pub depth: Vec<u32>,
    /// Measurements of each kind; the median and the extremes are reported.
    #[arg(long, default_value_t = 5, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Serve many requests instead: a CSV file with columns of prompt and answer lengths, and of times if it has them; or
    /// synthetic:IN,OUT,N,RATE, where IN and OUT are tokens or a range of them (100..200), and RATE 0 is offline
    /// (docs/requests.md).
    #[arg(long, value_name = "FILE.csv|synthetic:...", conflicts_with_all = ["prompt", "gen", "batch", "depth", "repeat"])]
    pub trace: Option<Source>,
    /// With --trace: requests per second: stretches a trace with times, draws Poisson arrivals for others; 0 is offline
    /// [default: as the trace says, offline if it says nothing].
    #[arg(long, value_name = "R", allow_negative_numbers = true, requires = "trace")]
    pub rate: Option<f64>,
    /// With --trace: only its first requests.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true, requires = "trace")]
    pub limit: Option<u32>,
    /// With --trace: the same seed draws the same arrivals and lengths.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// With --trace: sequences at a time [default: as many as memory has room for, at most 256].
    #[arg(long, value_name = "N", allow_negative_numbers = true, requires = "trace",
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub parallel: Option<u32>,
    /// With --trace: draw throughput, and latency against load, which takes a run for each of seven loads.
    #[arg(long, value_name = "FILE.svg", requires = "trace")]
    pub plot: Option<PathBuf>,
    /// With --trace: what is asked of latency.
    #[command(flatten)]
    pub targets: TargetArgs,
    /// With --trace: write a line for each request of each strategy.
    #[arg(long, value_name = "FILE.csv", requires = "trace")]
    pub records: Option<PathBuf>,
    /// With --trace: steps, drawn.
    #[command(flatten)]
    pub timeline: timeline::TimelineArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// One line of the result.
struct Row {
    kind: &'static str,
    prompt: usize,
    gen_tokens: usize,
    batch: usize,
    depth: usize,
    rates: Vec<f64>,
    /// Bytes read per decode step, divided by the step's time.
    gb_s: f64,
}

impl Row {
    fn spread(&self) -> (f64, f64, f64) {
        let mut r = self.rates.clone();
        r.sort_by(f64::total_cmp);
        (r[r.len() / 2], r[0], r[r.len() - 1])
    }

    fn json(&self) -> serde_json::Value {
        let (median, min, max) = self.spread();
        serde_json::json!({
            "kind": self.kind, "prompt": self.prompt, "gen": self.gen_tokens, "batch": self.batch,
            "depth": self.depth, "tok_s": { "median": median, "min": min, "max": max }, "gb_s": self.gb_s,
        })
    }

    fn line(&self) -> String {
        let (median, min, max) = self.spread();
        let gb = if self.gb_s > 0.0 { format!("{:.1}", self.gb_s) } else { "-".into() };
        format!(
            "{:8} {:>6} {:>6} {:>6} {:>6} {median:>10.1} {min:>10.1} {max:>10.1} {gb:>7}",
            self.kind, self.prompt, self.gen_tokens, self.batch, self.depth
        )
    }
}

/// Runs a warm-up, then measures `--repeat` runs of each kind.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(source) = &args.trace {
        return trace::run(args, source);
    }
    if args.targets.is_some() {
        return Err(Error::usage("--ttft-target, --tpot-target: are of many requests; add --trace").into());
    }
    if args.timeline.timeline.is_some() {
        return Err(
            Error::usage("--timeline: shows how requests are served; add --trace, or use generate").into()
        );
    }
    if args.r#gen == 0 && args.prompt.iter().all(|&p| p == 0) {
        return Err(Error::usage("--prompt 0 --gen 0: nothing to measure").into());
    }
    let opened = open::open(args.model.as_deref())?;
    let max = |v: &[u32]| v.iter().copied().max().unwrap_or(0) as usize;
    let (gen_tokens, depth, batch) = (args.r#gen as usize, max(&args.depth), max(&args.batch).max(1));
    let decode_context = if gen_tokens > 0 { depth.max(1) + gen_tokens } else { 0 };
    let wanted = max(&args.prompt).max(decode_context).max(1);
    let context = args.engine.ctx.map_or(wanted, |c| c as usize);
    if context < wanted {
        return Err(Error::usage(format!("--ctx {context}: these measurements need {wanted} tokens")).into());
    }
    let sequences = if gen_tokens > 0 { batch } else { 1 };
    // The longest prompt that is measured.
    let prompt = max(&args.prompt).max(depth).max(1);
    let work = RunWork { prompt, gen_len: gen_tokens, batch: sequences };
    let demand = Demand { context, sequences, logits: sequences, pages: None, work };
    let mut running = open::engine(&opened, &args.engine, &demand)?;
    let mut requests = Batcher::with(running.engine, Box::<PromptsFirst>::default(), Box::new(Untimed));
    let mut rows = Vec::new();
    if !args.json {
        output::line(&format!(
            "{:8} {:>6} {:>6} {:>6} {:>6} {:>10} {:>10} {:>10} {:>7}",
            "kind", "prompt", "gen", "batch", "depth", "tok/s", "min", "max", "GB/s"
        ))?;
    }
    for &prompt in args.prompt.iter().filter(|&&p| p > 0) {
        let row = prefill(&mut requests, prompt as usize, args.repeat as usize)?;
        if !args.json {
            output::line(&row.line())?;
        }
        rows.push(row);
    }
    for &depth in args.depth.iter().filter(|_| gen_tokens > 0) {
        for &batch in &args.batch {
            let (batch, depth) = (batch as usize, depth as usize);
            let mut row = decode(&mut requests, batch, depth, gen_tokens, args.repeat as usize)?;
            // All types of 16 bits take the same.
            let kv = args.engine.kv_type.unwrap_or(KvType::BF16);
            row.gb_s = gb_s(requests.engine(), &row, kv);
            if !args.json {
                output::line(&row.line())?;
            }
            rows.push(row);
        }
    }
    running.engine = requests.into_engine();
    if args.json {
        return output::json(&serde_json::json!({
            "model": opened.name,
            "time": time_of(&running.engine),
            "threads": running.engine.placement().threads,
            "results": rows.iter().map(Row::json).collect::<Vec<_>>(),
            "plan": running.plan(&args.engine),
        }));
    }
    Ok(())
}

/// Arbitrary tokens of the vocabulary, equal in every run.
fn tokens(n: usize, vocab: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729 + 13) % vocab) as u32).collect()
}

/// Continuous batching whose decode rows wait until no prompt has rows left: all requests then decode from the same depth on.
#[derive(Default)]
struct PromptsFirst(Continuous);

impl Strategy for PromptsFirst {
    fn name(&self) -> &'static str {
        "prompts first"
    }

    fn most_pages(&self, limits: &Limits) -> usize {
        self.0.most_pages(limits)
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        let mut decision = self.0.plan(queues, limits, costs);
        let batches = &mut decision.iteration.sub_batches;
        if batches.iter().flat_map(|b| &b.groups).any(|g| g.phase == Phase::Prefill) {
            batches.iter_mut().for_each(|b| b.groups.retain(|g| g.phase == Phase::Prefill));
        }
        decision
    }
}

/// Ends with the error of a request that failed.
fn check(events: &Receiver<Event>) -> Result<(), Error> {
    let failed = events.try_iter().find_map(|event| match event {
        Event::End(Finish::Failed(error)) => Some(open::failed(error)),
        _ => None,
    });
    failed.map_or(Ok(()), Err)
}

fn prefill(requests: &mut Batcher, prompt: usize, repeat: usize) -> anyhow::Result<Row> {
    let ids = tokens(prompt, requests.engine().spec().vocab, 0);
    let mut rates = Vec::new();
    for i in 0..=repeat {
        let (_, events) = requests.submit(Request { prompt: ids.clone(), ..Request::default() })?;
        let began = Stopwatch::start(requests.engine());
        requests.run();
        let rate = prompt as f64 / began.seconds(requests.engine());
        check(&events)?;
        // The first run touches memory for the first time.
        if i > 0 {
            rates.push(rate);
        }
    }
    Ok(Row { kind: "prefill", prompt, gen_tokens: 0, batch: 1, depth: 0, rates, gb_s: 0.0 })
}

fn decode(
    requests: &mut Batcher,
    batch: usize,
    depth: usize,
    gen_tokens: usize,
    repeat: usize,
) -> anyhow::Result<Row> {
    let vocab = requests.engine().spec().vocab;
    // Prompts are computed once: the next measurement begins with their pages.
    requests.keep_prefixes(true);
    let mut rates = Vec::new();
    for i in 0..=repeat {
        // The warm-up is short.
        let steps = if i == 0 { gen_tokens.min(8) } else { gen_tokens };
        let streams = (0..batch)
            .map(|i| {
                // The prompt's own pass gives the first token.
                let (prompt, max_tokens) = (tokens(depth.max(1), vocab, i), steps + 1);
                Ok(requests.submit(Request { prompt, max_tokens, ..Request::default() })?.1)
            })
            .collect::<Result<Vec<_>, Error>>()?;
        let reads = |requests: &Batcher| {
            let queues = requests.queues();
            queues.waiting().len() > 0 || queues.running().iter().any(|job| job.phase() == Phase::Prefill)
        };
        while reads(requests) {
            requests.step();
        }
        let began = Stopwatch::start(requests.engine());
        requests.run();
        let rate = (steps * batch) as f64 / began.seconds(requests.engine());
        streams.iter().try_for_each(check)?;
        if i > 0 {
            rates.push(rate);
        }
    }
    requests.keep_prefixes(false);
    Ok(Row { kind: "decode", prompt: 0, gen_tokens, batch, depth, rates, gb_s: 0.0 })
}

/// GB/s of weights, keys and values that the steps of a row have read.
fn gb_s(engine: &Engine, row: &Row, kv: KvType) -> f64 {
    let kv = row.batch as f64 * kv_bytes(engine.spec(), kv, row.depth.max(1), row.gen_tokens);
    (engine.bytes_per_step() as f64 + kv) * row.spread().0 / row.batch as f64 / 1e9
}

/// Bytes of keys and values that a step reads for one sequence, on average over `steps` steps from `depth`
/// tokens on: those of all earlier tokens and of the new one; in layers with a window, at most the window's.
fn kv_bytes(spec: &ModelSpec, kv: KvType, depth: usize, steps: usize) -> f64 {
    let tokens = |layer: usize| {
        let window = spec.window_of(layer).unwrap_or(usize::MAX);
        (depth..depth + steps).map(|before| (before + 1).min(window)).sum::<usize>()
    };
    let tokens: usize = (0..spec.n_layers).map(tokens).sum();
    (2 * spec.n_kv_heads * kv.head_bytes(spec.head_dim) * tokens) as f64 / steps.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_bounds_what_is_read() {
        let spec = tandem::model::load("synth:tiny-gemma3,seed=1").unwrap().spec;
        let window = spec.window.as_ref().expect("layers with a window").size;
        let windowed = (0..spec.n_layers).filter(|&l| spec.window_of(l).is_some()).count();
        assert!(windowed > 0 && windowed < spec.n_layers, "both kinds of layers");
        let token = (2 * 2 * spec.kv_dim()) as f64;
        let bytes = |depth, steps| kv_bytes(&spec, KvType::F16, depth, steps) / token;
        assert_eq!(bytes(0, 1), spec.n_layers as f64);
        assert_eq!(bytes(0, 3), 2.0 * spec.n_layers as f64, "1, 2 and 3 tokens");
        let (far, whole) = (10 * window, spec.n_layers - windowed);
        assert_eq!(bytes(far, 1), (windowed * window + whole * (far + 1)) as f64);
    }
}
