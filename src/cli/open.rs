//! Opens the model of `-m` and starts an engine with the given options, for generate, perplexity and bench.

mod scheduled;

use std::sync::Arc;
use std::time::Instant;

use tandem::Error;
use tandem::device::{self, Accelerator, Clock, Kind, Rates, Runtime};
use tandem::engine::{self, Among, Engine, Options, Prepared, Sizes};
use tandem::host::memory_available;
use tandem::model::{self, LoadedModel, TextSource, synth};
use tandem::program::Side;
use tandem::simd::Isa;
use tandem::simd::linear::{self, Linear, Mode};
use tandem::tensor::{DType, Half};
use tandem::text::Tokenizer;

use super::args::{EngineArgs, Strategy};
use super::decision::Decision;
use super::model_source::{self, ModelSource};
use super::predict::{self, Use};
use super::progress;

pub use self::scheduled::{Needs, Scheduled};

/// A model that has been read but not yet prepared for a tier.
pub struct Opened {
    /// The user's name for it.
    pub name: String,
    /// Sizes, weights, and material for text.
    pub model: LoadedModel,
    began: Instant,
}

/// The tier whose kernels a command measures and stores.
///
/// # Errors
/// As [`Isa::selected`]; and if `TANDEM_LINEAR` is set, since the measured times of the kernel that it names would be
/// used for runs without it.
pub fn measured_tier() -> tandem::Result<Isa> {
    let isa = Isa::selected()?;
    match linear::forced(isa)? {
        None => Ok(isa),
        Some(kernel) => Err(Error::Usage(format!(
            "TANDEM_LINEAR: what {kernel} alone takes is not kept for other runs; unset it to measure"
        ))),
    }
}

/// Reads the model that `-m` names, fetching the default one on first use.
pub fn open(name: Option<&str>) -> anyhow::Result<Opened> {
    let resolved = model_source::resolve(name)?;
    let began = Instant::now();
    let model = match &resolved.source {
        ModelSource::Path(path) => model::load(&path.to_string_lossy())?,
        ModelSource::Synth(spec) => {
            // Reject a bad specification before starting.
            synth::parse(spec)?;
            progress::note(&format!("making random weights for {spec}"));
            model::load(&format!("synth:{spec}"))?
        }
    };
    // For example a dtype that had to be replaced: measurements must not hide it.
    model.notes.iter().for_each(|note| progress::note(note));
    Ok(Opened { name: resolved.name, model, began })
}

/// The model that `name` names, for a description: random weights are not generated.
pub fn outline(name: &str) -> anyhow::Result<LoadedModel> {
    match model_source::resolve(Some(name))?.source {
        ModelSource::Synth(spec) => Ok(synth::outline(&spec)?),
        ModelSource::Path(path) => Ok(model::load(&path.to_string_lossy())?),
    }
}

impl Opened {
    /// The tokenizer; `None` for random weights, which have none.
    pub fn tokenizer(&self) -> anyhow::Result<Option<Tokenizer>> {
        let mut tokenizer = match &self.model.text {
            TextSource::Gguf(metadata) => Tokenizer::from_gguf(metadata)?,
            TextSource::TokenizerJson { path, config } => {
                let config = config.as_ref().map(ToString::to_string);
                Tokenizer::from_json_file(path, config.as_deref())?
            }
            TextSource::Missing(path) => {
                return Err(Error::format(
                    path.display().to_string(),
                    "missing; without a tokenizer there is no text (inspect and bench work); is the download complete?",
                )
                .into());
            }
            TextSource::None => return Ok(None),
        };
        self.model.eos_ids.iter().for_each(|&id| tokenizer.add_eog(id));
        Ok(Some(tokenizer))
    }

    /// Prepares the weights for up to `sequences` sequences of `context` tokens (checked against the
    /// model's own context, unless `--ctx` said otherwise), and logits of up to `logits` rows of a step (at least
    /// one per sequence), on the device of `--device`, in the placement predicted to finish `work` soonest.
    pub fn engine(
        &self,
        args: &EngineArgs,
        context: usize,
        sequences: usize,
        logits: usize,
        work: Use,
    ) -> anyhow::Result<Running> {
        self.engine_with_pages(args, context, sequences, logits, None, work)
    }

    /// [`Opened::engine`] with a given number of pages of keys and values for all sequences together. Sequences that do
    /// not all grow to the context need fewer.
    pub fn engine_with_pages(
        &self,
        args: &EngineArgs,
        context: usize,
        sequences: usize,
        logits: usize,
        pages: Option<usize>,
        work: Use,
    ) -> anyhow::Result<Running> {
        let isa = Isa::selected()?;
        if std::env::var_os("TANDEM_ISA").is_some_and(|v| !v.is_empty()) {
            progress::note(&format!("TANDEM_ISA: running the {isa} kernels"));
        }
        let options = self.options(args, isa, context, sequences, logits, pages)?;
        let on_cpu = || self.on_cpu(args, &options).map(|(engine, decision)| (engine, decision, None));
        let (engine, decision, runtime) = match args.kind() {
            None if args.strategy() == Strategy::CpuOnly => {
                let (engine, decision, runtime) = on_cpu()?;
                let predicted = predict::alone(args, &self.model, None, &options, decision.choice(), work)?;
                (engine, decision.with(predicted), runtime)
            }
            None => on_cpu()?,
            Some(kind) => {
                // Before it is opened: a device that was lost on the way is not found any more.
                let there = device::check(&kind).is_ok();
                match self.with_accelerator(&kind, args, &options, work) {
                    // No message if there is no GPU: most machines have none.
                    Err(Error::Device { .. } | Error::Unsupported(_)) if args.falls_back() && !there => {
                        on_cpu()?
                    }
                    Err(e @ (Error::Device { .. } | Error::Unsupported(_) | Error::Capacity(_)))
                        if args.falls_back() =>
                    {
                        progress::note(&format!("running on the CPU: {e}"));
                        on_cpu()?
                    }
                    decided => decided?,
                }
            }
        };
        decision.tell();
        tell_clock(args, &engine);
        if args.far.is_some() && !decision.pages_move() {
            progress::note("--far has no effect: all pages of keys and values stay where they are");
        }
        if args.kv_pages.is_some() && !decision.keeps_kv_on_device() {
            progress::note("--kv-pages has no effect: no block keeps its keys and values on the device");
        }
        if args.hardware != "auto" && !decision.is_predicted() {
            progress::note(&format!(
                "--hardware {} has no effect: there is nothing to choose",
                args.hardware
            ));
        }
        let described =
            args.timed_machine().and_then(|m| Some((m.weights.as_ref()?.describe(), m.name.clone())));
        let nodes = match (&options.weights_node, described) {
            (Some(nodes), _) => Some(nodes.describe()),
            (None, described) => described.map(|(nodes, machine)| format!("{nodes} of {machine}")),
        };
        if let Some(nodes) = nodes {
            match engine.placement().strategy {
                "gpu-only" => progress::note("--weights-node has no effect: all weights are on the device"),
                _ => progress::detail(&format!("weights on the host are on {nodes}")),
            }
        }
        let load_ms = self.began.elapsed().as_secs_f64() * 1e3;
        let (placement, memory) = (engine.placement(), engine.memory());
        progress::detail(&format!(
            "{}: {} ({}), {} threads, context {context}; weights {:.2} GB, KV {:.2} GB, activations {:.2} GB; \
             loaded in {load_ms:.0} ms",
            self.name,
            placement.device,
            placement.isa,
            placement.threads,
            memory.weights as f64 / 1e9,
            memory.kv as f64 / 1e9,
            memory.activations as f64 / 1e9
        ));
        if placement.strategy != "gpu-only" {
            progress::detail(&format!("products on the CPU: {}", self.products(&options)));
        }
        Ok(Running { engine, load_ms, decision, notices: Notices(runtime) })
    }

    /// Which kernels multiply the model's weights on the CPU, by dtype and number of rows.
    fn products(&self, options: &Options) -> String {
        let weights = self.model.weights.iter().map(|(_, t)| t);
        let mut dtypes: Vec<DType> = weights.filter(|t| t.shape.len() == 2).map(|t| t.dtype).collect();
        dtypes.sort_by_key(|d| d.to_string());
        dtypes.dedup();
        let of = |dtype: &DType| {
            let kernels = Linear::kernels_up_to(*dtype, options.isa, false, options.chunk, options.mode);
            let named = kernels.iter().map(|(from, kernel)| match from {
                1 => kernel.to_string(),
                _ => format!("from {from} rows {kernel}"),
            });
            format!("{dtype} by {}", named.collect::<Vec<_>>().join(", "))
        };
        dtypes.iter().map(of).collect::<Vec<_>>().join("; ")
    }

    /// The engine's options from the command line.
    fn options(
        &self,
        args: &EngineArgs,
        isa: Isa,
        context: usize,
        sequences: usize,
        logits: usize,
        pages: Option<usize>,
    ) -> tandem::Result<Options> {
        if let Some(kernel) = linear::forced(isa)? {
            progress::note(&format!("TANDEM_LINEAR: {kernel} multiplies on the CPU wherever it can"));
        }
        let mut options = Options::new(isa, context);
        options.threads = args.threads.map(|t| t as usize);
        if options.threads.is_none() {
            options.readers = tandem::profile::measured_readers(None);
        }
        options.mode = if args.deterministic { Mode::Deterministic } else { Mode::Fast };
        options.kv_dtype = args.kv_type.unwrap_or(Half::BF16);
        (options.sequences, options.logits, options.pages) = (sequences, logits, pages);
        options.weights_node = args.weights_binding()?;
        (options.kv_pages, options.far) = (args.kv_pages.map(|n| n as usize), args.far.map(Into::into));
        if let Some(chunk) = args.chunk {
            options.chunk = chunk as usize;
        }
        Ok(options)
    }

    fn on_cpu(&self, args: &EngineArgs, options: &Options) -> tandem::Result<(Engine, Decision)> {
        let (spec, weights) = (self.model.spec.clone(), &self.model.weights);
        let (layers, total) = (spec.n_layers, Prepared::bytes_to_pack(&spec, weights, options.isa));
        let available = memory_available();
        let engine = with_bar(total, "packing weights", |progress| match args.timed_machine() {
            None => Engine::new(spec, weights, options, progress),
            Some(machine) => {
                let clock = Arc::new(Clock::new(Rates::of(&machine)?));
                Engine::on_emulated_cpu(spec, weights, options, clock, progress)
            }
        })?;
        let decision = Decision::cpu(layers, engine.memory(), available);
        Ok((engine, decision))
    }

    /// An engine on an accelerator, on both sides, or on the CPU if nothing fits the accelerator and the strategy
    /// allows that. Where the device turns out to have less memory than was planned with (another process took it, the driver holds
    /// more), it is planned again with less.
    fn with_accelerator(
        &self,
        kind: &Kind,
        args: &EngineArgs,
        options: &Options,
        work: Use,
    ) -> tandem::Result<(Engine, Decision, Option<Arc<dyn Runtime>>)> {
        let mut granted = args.gpu_memory;
        for plan in 1.. {
            let accelerator = device::open(kind, granted)?;
            let free = accelerator.runtime().memory_free()?;
            match self.planned(accelerator, kind, args, options, work)? {
                Planned::Runs(engine, decision, runtime) => return Ok((*engine, *decision, runtime)),
                Planned::Short(why) if plan == PLANS => return Err(Error::Capacity(why)),
                Planned::Short(why) => {
                    let less = free.saturating_sub((free / 16).max(LESS));
                    let size = progress::megabytes(less);
                    progress::note(&format!("{why}; planning again with {size} of {kind}"));
                    granted = Some(less);
                }
            }
        }
        unreachable!("the last plan has returned")
    }

    /// The same, planned with the memory that is free on `accelerator`.
    fn planned(
        &self,
        accelerator: Arc<dyn Accelerator>,
        kind: &Kind,
        args: &EngineArgs,
        options: &Options,
        work: Use,
    ) -> tandem::Result<Planned> {
        let runs = |engine, decision, runtime| Planned::Runs(Box::new(engine), Box::new(decision), runtime);
        let runtime = Some(accelerator.runtime().clone());
        let mut on_device = options.clone();
        fit_types(args, &*accelerator, &mut on_device);
        let name = kind.to_string();
        let (spec, weights) = (&self.model.spec, &self.model.weights);
        let auto = args.strategy() == Strategy::Auto;
        let among = match args.split() {
            Some(strategy) => Among::One(strategy),
            None if auto => Among::All,
            None => {
                let (engine, decision) = self.on_accelerator(&accelerator, &name, &on_device)?;
                let device = Some((kind, accelerator.runtime().info()));
                let choice = decision.choice();
                let predicted = predict::alone(args, &self.model, device, &on_device, choice, work)?;
                return Ok(runs(engine, decision.with(predicted), runtime));
            }
        };
        let sizes = Sizes::new(spec, weights, &on_device, &*accelerator)?;
        let free = sizes.free();
        let info = accelerator.runtime().info().clone();
        let predicted = predict::fastest(args, &self.model, (kind, &info), &on_device, &sizes, among, work)?;
        let mut because = None;
        let (strategy, mut choice) = match (&predicted, among) {
            (Some(p), _) => {
                let whole = p.timed.considered.iter().find(|c| c.strategy.name() == "gpu-only");
                if let Some(c) = whole.filter(|c| c.seconds.is_none()) {
                    let (takes, there) = (progress::megabytes(c.bytes.0), progress::megabytes(free));
                    because = Some(format!("it takes {takes} of {name}, {there} free"));
                }
                (p.timed.strategy.name(), p.timed.choice.clone())
            }
            // Without predicted times: everything on the device, or as much as fits.
            (None, Among::All) => match self.on_accelerator(&accelerator, &name, &on_device) {
                Err(Error::Capacity(why)) => {
                    because = Some(why);
                    let strategy = engine::Strategy::Helm { boundary: None };
                    let choice = engine::choose(&sizes, strategy)?;
                    let cpu = choice.k == Some(spec.n_layers + 2);
                    (if cpu { "cpu-only" } else { strategy.name() }, choice)
                }
                whole => return whole.map(|(engine, decision)| runs(engine, decision, runtime)),
            },
            (None, Among::One(strategy)) => (strategy.name(), engine::choose(&sizes, strategy)?),
        };
        // Uses the faster way in each step, if that was chosen.
        on_device.far = choice.far;
        on_device.times = predicted.as_ref().filter(|_| choice.far.is_none()).map(|p| p.times());
        let decision =
            |choice| Decision::split(strategy, name.clone(), free, choice, because).with(predicted);
        if choice.k == Some(spec.n_layers + 2) && !choice.placement.uses(Side::Device) {
            drop((accelerator, runtime));
            let (engine, _) = self.on_cpu(args, options)?;
            choice.host = engine.memory();
            return Ok(runs(engine, decision(choice), None));
        }
        let loaded = with_bar(weights.bytes(), "loading weights", |progress| {
            let placement = choice.placement.clone();
            Engine::placed(
                spec.clone(),
                weights,
                &on_device,
                accelerator,
                &name,
                strategy,
                placement,
                progress,
            )
        });
        match loaded {
            Ok(engine) => Ok(runs(engine, decision(choice), runtime)),
            Err(Error::Capacity(why)) => Ok(Planned::Short(why)),
            Err(error) => Err(error),
        }
    }

    fn on_accelerator(
        &self,
        accelerator: &Arc<dyn Accelerator>,
        name: &str,
        options: &Options,
    ) -> tandem::Result<(Engine, Decision)> {
        let (spec, weights) = (self.model.spec.clone(), &self.model.weights);
        let (layers, free) = (spec.n_layers, accelerator.runtime().memory_free()?);
        let engine = with_bar(weights.bytes(), "loading weights", |progress| {
            Engine::on_accelerator(spec, weights, options, accelerator.clone(), name, progress)
        })?;
        let decision = Decision::gpu(layers, name.to_owned(), engine.memory(), free);
        Ok((engine, decision))
    }
}

/// Changes the type of keys and values to one that the accelerator supports.
fn fit_types(args: &EngineArgs, accelerator: &dyn Accelerator, options: &mut Options) {
    if args.kv_type.is_none() && accelerator.activations_for(DType::BF16) != Some(Half::BF16) {
        options.kv_dtype = Half::F16;
    }
}

/// Notes which machine's time is reported, if it is not this computer's.
fn tell_clock(args: &EngineArgs, engine: &Engine) {
    if engine.emulated_seconds().is_some() {
        let machine = args.timed_machine().map_or("another machine".into(), |machine| machine.name.clone());
        progress::note(&format!("times are those of {machine}, not of this computer"));
    }
}

/// Runs `work` with a bar over `total` bytes. Short work shows no bar, which would only flicker.
fn with_bar<T>(
    total: u64,
    what: &'static str,
    work: impl FnOnce(&(dyn Fn(u64) + Sync)) -> tandem::Result<T>,
) -> tandem::Result<T> {
    let bar = (total > 200 << 20).then(|| progress::bytes_bar(Some(total), what));
    let result = work(&|bytes| {
        if let Some(bar) = &bar {
            bar.inc(bytes);
        }
    });
    if let Some(bar) = &bar {
        bar.finish();
    }
    result
}

/// An engine and the time it took to load.
pub struct Running {
    /// Ready to run.
    pub engine: Engine,
    /// Milliseconds from opening the file until ready.
    pub load_ms: f64,
    decision: Decision,
    /// Reports notices when dropped.
    #[allow(dead_code)] // what counts is when
    pub notices: Notices,
}

/// How often a model is placed with ever less of the device's memory.
const PLANS: u32 = 4;

/// Least memory by which each is less than the one before: a sixteenth where that is more.
const LESS: u64 = 64 << 20;

/// What has become of a plan.
enum Planned {
    /// An engine, and how it was chosen.
    Runs(Box<Engine>, Box<Decision>, Option<Arc<dyn Runtime>>),
    /// The device has not had the memory that the plan says.
    Short(String),
}

/// Reports the accelerator's slower paths at the end of a run.
pub struct Notices(Option<Arc<dyn Runtime>>);

impl Drop for Notices {
    fn drop(&mut self) {
        let all = self.0.iter().flat_map(|runtime| runtime.notices());
        all.for_each(|sentence| progress::note(&sentence));
    }
}

impl Running {
    /// The decision, for `plan` in JSON.
    pub fn plan(&self, args: &EngineArgs) -> serde_json::Value {
        let (e, m, at) = (&self.engine, self.engine.memory(), self.engine.placement());
        let mut plan = serde_json::json!({
            "device": at.device,
            "strategy": at.strategy,
            "isa": at.isa,
            "threads": at.threads,
            "context": e.context(),
            "kv_type": at.kv_type,
            "deterministic": args.deterministic,
            "memory": { "weights": m.weights, "kv": m.kv, "activations": m.activations },
        });
        self.decision.add_to(&mut plan);
        // Counts of the steps run so far.
        let far = e.far_steps();
        if far.attend + far.stream > 0 {
            plan["kv_pages"]["steps"] = serde_json::json!({ "attend": far.attend, "stream": far.stream });
        }
        plan
    }
}

/// The error for a model whose scores are NaN or infinite.
pub fn not_numbers() -> Error {
    Error::Run(engine::NOT_NUMBERS.into())
}
