//! From a model and settings to an engine: chooses where everything lives, and loads it there.
//!
//! ```text
//! settings ─► an accelerator? ─ no ────────────────────────────────► CPU
//!                  │ yes                                              ▲
//!                  ▼                                                  │ nothing fits, and it is left to us
//!             sizes ─► the fastest placement that fits ─► load ───────┤
//!                            ▲                              │         └─► Running
//!                            └── less memory than planned ──┘
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::by_chunk::ByChunk;
use super::decision::PlacementDecision;
use super::model::Model;
use super::predict::{PredictionSubject, RunWork, router};
use super::settings::{Settings, Strategy};
use super::source::decimal;
use super::{Requests, details};
use crate::cache::KvType;
use crate::device::{self, Accelerator, Clock, Kind, Rates, Runtime};
use crate::engine::{Engine, Options, Prepared};
use crate::host::memory_available;
use crate::plan::{Available, ExpertCounts, Strategy as System};
use crate::progress::{Progress, WorkUnit};
use crate::simd::Isa;
use crate::simd::linear::{self, Mode};
use crate::tensor::{DType, Half};
use crate::{Error, Result};

/// What an engine is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// Most tokens of a sequence.
    pub context: usize,
    /// Most sequences at a time.
    pub sequences: usize,
    /// Most rows of a step whose logits are wanted; at least one for each sequence.
    pub logits: usize,
    /// Pages of keys and values of all sequences together; `None`: each may grow to the context.
    pub pages: Option<usize>,
    /// The work that the placement should be fast for.
    pub work: RunWork,
}

impl Demand {
    /// One prompt of so many tokens and its answer.
    pub fn one(prompt: usize, answer: usize) -> Demand {
        let work = RunWork { prompt, gen_len: answer, batch: 1 };
        Demand { context: prompt + answer, sequences: 1, logits: 1, pages: None, work }
    }
}

/// An engine, and how it came to be where it is.
pub struct Running {
    /// Ready to run.
    pub engine: Engine,
    /// Milliseconds from opening the model's files until ready.
    pub load_ms: f64,
    /// Where it runs.
    pub decision: PlacementDecision,
    /// Sentences that everybody should read, such as settings without an effect.
    pub notes: Vec<String>,
    /// Sentences for those who want to know more.
    pub details: Vec<String>,
    /// The accelerator's runtime, if it is used.
    pub runtime: Option<Arc<dyn Runtime>>,
}

/// An engine, and how it was chosen.
pub(super) type PlacedEngine = (Engine, PlacementDecision, Option<Arc<dyn Runtime>>);

/// How often a model is placed with ever less of the device's memory.
const PLANS: u32 = 4;

/// Memory of a device for the next plan, after one for `free` bytes was too large: a sixteenth less, and 64 MiB at least, of small
/// devices a quarter.
pub(super) fn less(free: u64) -> u64 {
    free - (free / 16).max((64 << 20).min(free / 4))
}

/// What has become of a plan.
pub(super) enum Planned<T> {
    Runs(T),
    /// The device has not had the memory that the plan says.
    Short(String),
}

impl<T> Planned<T> {
    /// What has become of loading it: only this may find less memory than there was for the plan.
    pub fn of<E>(loaded: Result<E>, runs: impl FnOnce(E) -> T) -> Result<Planned<T>> {
        match loaded {
            Ok(engine) => Ok(Planned::Runs(runs(engine))),
            Err(Error::Capacity(why)) => Ok(Planned::Short(why)),
            Err(error) => Err(error),
        }
    }
}

/// Plans for a device, of whose memory `granted` may be used. Where it turns out to have less than was planned with (another process
/// took it, the driver holds more), it is planned again with less.
pub(super) fn planned_again<T>(
    kind: &Kind,
    mut granted: Option<u64>,
    progress: &dyn Progress,
    mut planned: impl FnMut(Arc<dyn Accelerator>) -> Result<Planned<T>>,
) -> Result<T> {
    for plan in 1.. {
        let accelerator = device::open(kind, granted)?;
        let free = accelerator.runtime().memory_free()?;
        match planned(accelerator)? {
            Planned::Runs(what) => return Ok(what),
            Planned::Short(why) if plan == PLANS => return Err(Error::Capacity(why)),
            Planned::Short(why) => {
                let less = less(free);
                progress.note(&format!("{why}; planning again with {} of {kind}", decimal(less)));
                granted = Some(less);
            }
        }
    }
    unreachable!("the last plan has returned")
}

impl Model {
    /// Prepares the weights for `demand`, on the device of `settings`, in the placement predicted to finish its work
    /// soonest.
    ///
    /// # Errors
    /// Settings that contradict each other or the model; a device that is not there; a model that does not fit.
    pub fn engine(&self, settings: &Settings, demand: &Demand, progress: &dyn Progress) -> Result<Running> {
        settings.check(if demand.sequences > 1 { Requests::Compared } else { Requests::One })?;
        let isa = Isa::selected()?;
        if std::env::var_os("TANDEM_ISA").is_some_and(|v| !v.is_empty()) {
            progress.note(&format!("TANDEM_ISA: running the {isa} kernels"));
        }
        let options = self.options(settings, demand, progress)?;
        let place = Placing { model: self, settings, options: &options, work: demand.work, progress };
        let (engine, mut decision, runtime) = place.anywhere()?;
        let cached = engine.follows_router();
        let experts = ExpertCounts::of(&self.loaded.spec, &decision.placement);
        decision.experts = experts.map(|experts| experts.with_cache(cached));
        let load_ms = self.began.elapsed().as_secs_f64() * 1e3;
        let notes = details::notes(settings, &engine, &decision);
        let details = details::of_run(self, settings, &options, &engine, load_ms);
        Ok(Running { engine, load_ms, decision, notes, details, runtime })
    }

    /// The engine's options from the settings.
    pub(super) fn options(
        &self,
        settings: &Settings,
        demand: &Demand,
        progress: &dyn Progress,
    ) -> Result<Options> {
        if settings.fixed_experts && self.loaded.spec.experts.is_none() {
            return Err(Error::usage("`fixed_experts`: the model has no experts"));
        }
        let isa = Isa::selected()?;
        if let Some(kernel) = linear::forced(isa)? {
            progress.note(&format!("TANDEM_LINEAR: {kernel} multiplies on the CPU wherever it can"));
        }
        let readers = match settings.threads {
            None => crate::profile::measured_readers(None),
            Some(_) => None,
        };
        let defaults = Options::new(isa, demand.context);
        Ok(Options {
            threads: settings.threads,
            readers,
            mode: if settings.deterministic { Mode::Deterministic } else { Mode::Fast },
            kv_dtype: settings.kv_type.unwrap_or(KvType::BF16),
            sequences: demand.sequences,
            logits: demand.logits,
            pages: demand.pages,
            weights_node: settings.weights_binding()?,
            follow: settings.follows(&self.loaded.spec),
            router: settings.kind().and_then(|_| router(&self.loaded, progress)).map(Arc::new),
            kv_pages: settings.kv_pages,
            far: settings.far,
            chunk: settings.chunk.unwrap_or(defaults.chunk),
            ..defaults
        })
    }
}

/// What is placed, and how.
pub(super) struct Placing<'a> {
    pub model: &'a Model,
    pub settings: &'a Settings,
    pub options: &'a Options,
    pub work: RunWork,
    pub progress: &'a dyn Progress,
}

impl Placing<'_> {
    fn subject<'a>(&'a self, options: &'a Options) -> PredictionSubject<'a> {
        let model = &self.model.loaded;
        PredictionSubject {
            settings: self.settings,
            model,
            options,
            work: self.work,
            progress: self.progress,
        }
    }

    /// On the device of the settings; on the CPU if there is none and that is left to us.
    fn anywhere(&self) -> Result<PlacedEngine> {
        let settings = self.settings;
        let Some(kind) = settings.kind() else {
            let (engine, decision) = self.on_cpu(self.options)?;
            let predicted = match settings.strategy() {
                Strategy::CpuOnly => {
                    self.subject(self.options).alone(None, &decision.placement, decision.bytes())?
                }
                _ => None,
            };
            return Ok((engine, decision.with(predicted), None));
        };
        let on_cpu = || self.on_cpu(self.options).map(|(engine, decision)| (engine, decision, None));
        // Before it is opened: a device that was lost on the way is not found any more.
        let there = device::check(&kind).is_ok();
        match self.on_accelerator(&kind) {
            // No message if there is no GPU: most machines have none.
            Err(Error::Device { .. } | Error::Unsupported(_)) if settings.falls_back() && !there => on_cpu(),
            Err(e @ (Error::Device { .. } | Error::Unsupported(_) | Error::Capacity(_)))
                if settings.falls_back() =>
            {
                self.progress.note(&format!("running on the CPU: {e}"));
                on_cpu()
            }
            decided => decided,
        }
    }

    fn on_cpu(&self, options: &Options) -> Result<(Engine, PlacementDecision)> {
        let (spec, weights) = (self.model.loaded.spec.clone(), &self.model.loaded.weights);
        let (layers, total) = (spec.n_layers, Prepared::bytes_to_pack(&spec, weights, options.isa));
        let available = memory_available();
        let engine =
            counted(self.progress, total, "packing weights", |done| match self.settings.timed_machine() {
                None => Engine::new(spec, weights, options, done),
                Some(machine) => {
                    let clock = Arc::new(Clock::new(Rates::of(&machine)?));
                    Engine::on_emulated_cpu(spec, weights, options, clock, done)
                }
            })?;
        let decision = PlacementDecision::cpu(layers, engine.memory(), available);
        Ok((engine, decision))
    }

    /// On an accelerator, on both sides, or on the CPU if nothing fits the accelerator and the strategy allows that.
    fn on_accelerator(&self, kind: &Kind) -> Result<PlacedEngine> {
        planned_again(kind, self.settings.gpu_memory, self.progress, |accelerator| {
            self.planned(accelerator, kind)
        })
    }

    /// The same, planned with the memory that is free on `accelerator`.
    fn planned(&self, accelerator: Arc<dyn Accelerator>, kind: &Kind) -> Result<Planned<PlacedEngine>> {
        let settings = self.settings;
        let runs = |engine, decision, runtime| Planned::Runs((engine, decision, runtime));
        let runtime = Some(accelerator.runtime().clone());
        let mut on_device = self.options.clone();
        fit_types(settings, &*accelerator, &mut on_device);
        let name = kind.to_string();
        let (spec, weights) = (&self.model.loaded.spec, &self.model.loaded.weights);
        let Some(strategies) = settings.placements() else {
            let (engine, decision) = self.whole(&accelerator, &name, &on_device)?;
            let device = Some((kind, accelerator.runtime().info()));
            let predicted = self.subject(&on_device).alone(device, &decision.placement, decision.bytes())?;
            return Ok(runs(engine, decision.with(predicted), runtime));
        };
        let info = accelerator.runtime().info().clone();
        let (chosen, predicted, sizes) = {
            let available = Available {
                gpu: accelerator.runtime().memory_free()?,
                host: memory_available().unwrap_or(u64::MAX),
                nodes: None,
            };
            let chunk = on_device.chunk as u64;
            let bytes = ByChunk::new(&self.model.loaded, &on_device, &*accelerator, available, chunk)?;
            let (chosen, predicted) = self.subject(&on_device).fastest((kind, &info), &bytes, strategies)?;
            let sizes = bytes.sizes(chosen.chunk)?;
            (chosen, predicted, sizes)
        };
        on_device.chunk = chosen.chunk as usize;
        // Where the host reads as fast as the device, nothing makes up for an exchange.
        on_device.follow = on_device.follow.and(predicted.exchange_pays);
        let mut decision = PlacementDecision::of(&chosen, &sizes, name.clone());
        let whole = predicted.considered.iter().find(|c| c.strategy == System::GpuOnly);
        decision.because = whole
            .filter(|c| c.seconds.is_none())
            .map(|c| format!("it takes {} of {name}, {} free", decimal(c.bytes.0), decimal(sizes.free())));
        // Uses the faster way in each step, if that was chosen.
        on_device.far = chosen.way;
        on_device.times = chosen.way.is_none().then(|| predicted.times());
        decision.predicted = Some(predicted);
        if decision.placement.is_host_alone() {
            drop((accelerator, runtime));
            let (engine, _) = self.on_cpu(&Options { chunk: on_device.chunk, ..self.options.clone() })?;
            decision.host = Some((engine.memory(), memory_available()));
            return Ok(runs(engine, decision, None));
        }
        let loaded = counted(self.progress, weights.bytes(), "loading weights", |done| {
            let (placement, strategy) = (decision.placement.clone(), decision.strategy);
            Engine::placed(spec.clone(), weights, &on_device, accelerator, &name, strategy, placement, done)
        });
        Planned::of(loaded, |engine| (engine, decision, runtime))
    }

    /// Everything on the accelerator.
    fn whole(
        &self,
        accelerator: &Arc<dyn Accelerator>,
        name: &str,
        options: &Options,
    ) -> Result<(Engine, PlacementDecision)> {
        let (spec, weights) = (self.model.loaded.spec.clone(), &self.model.loaded.weights);
        let (layers, free) = (spec.n_layers, accelerator.runtime().memory_free()?);
        let engine = counted(self.progress, weights.bytes(), "loading weights", |done| {
            Engine::on_accelerator(spec, weights, options, accelerator.clone(), name, done)
        })?;
        let decision = PlacementDecision::gpu(layers, name.to_owned(), engine.memory(), free);
        Ok((engine, decision))
    }
}

/// Changes the type of keys and values to one that the accelerator supports, unless it was asked for: then the device's check refuses
/// what it has no kernels for, and nobody gets another type, or another device, than was asked for.
pub(super) fn fit_types(settings: &Settings, accelerator: &dyn Accelerator, options: &mut Options) {
    if settings.kv_type.is_none() && accelerator.activations_for(DType::BF16) != Some(Half::BF16) {
        options.kv_dtype = KvType::F16;
    }
}

/// Runs `work`, and tells how many of its `total` bytes are done. Of short work nothing is told: a bar would only flicker.
pub(super) fn counted<T>(
    progress: &dyn Progress,
    total: u64,
    what: &str,
    work: impl FnOnce(&(dyn Fn(u64) + Sync)) -> Result<T>,
) -> Result<T> {
    if total <= 200 << 20 {
        return work(&|_| ());
    }
    progress.begin(what, Some(total), WorkUnit::Bytes);
    let done = AtomicU64::new(0);
    let result = work(&|bytes| progress.at(done.fetch_add(bytes, Ordering::Relaxed) + bytes));
    progress.end();
    result
}
