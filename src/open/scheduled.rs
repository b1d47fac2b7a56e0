//! An engine for many requests, and its schedulers.

use std::sync::Arc;

use super::place::{Demand, Planned, counted, fit_types, planned_again};
use super::predict::{RunWork, Scheduling};
use super::settings::{Settings, Strategy};
use super::{Model, PlacementDecision, Requests, Running, details};
use crate::cache::{KvGeometry, PAGE_TOKENS};
use crate::device::{Accelerator, Kind, Runtime};
use crate::engine::{Batcher, Engine, Options, Sizes};
use crate::plan::{ExpertCounts, FEW_REQUESTS, Workload};
use crate::program::{Placement, Side};
use crate::progress::Progress;
use crate::sched::{self, Targets};
use crate::{Error, Result};

/// Default limit of concurrent sequences: beyond it, more sequences do not make a step's weights cheaper for each.
const MOST_SEQUENCES: usize = 256;

/// The memory and context that requests need.
#[derive(Debug, Clone)]
pub struct Needs {
    /// Tokens of each request when its answer is complete, in descending order; at least one request.
    tokens: Vec<usize>,
    /// Mean tokens of prompts and answers.
    mean: (usize, usize),
    /// Tokens of the longest request, or the context that was asked for.
    context: usize,
}

impl Needs {
    /// The needs of at least one request, each given as its tokens of prompt and answer; `context` is the requested
    /// context, `most` the model's.
    pub fn new(requests: &[(usize, usize)], context: Option<usize>, most: usize) -> Needs {
        let limit = context.unwrap_or(most);
        let mut tokens: Vec<usize> = requests.iter().map(|(p, a)| (p + a).min(limit)).collect();
        tokens.sort_unstable_by_key(|&n| std::cmp::Reverse(n));
        let mean = |of: fn(&(usize, usize)) -> usize| {
            requests.iter().map(of).sum::<usize>().div_ceil(requests.len().max(1))
        };
        let context = context.unwrap_or(tokens.first().copied().unwrap_or(1));
        Needs { tokens, mean: (mean(|r| r.0), mean(|r| r.1)), context }
    }

    /// Pages for the `n` longest requests to run together, so that any `n` requests can run without waiting for pages.
    fn pages(&self, n: usize) -> usize {
        self.tokens[..n].iter().map(|&tokens| KvGeometry::pages_for(tokens)).sum()
    }

    /// What an engine is for that runs `n` of them together.
    fn demand(&self, n: usize) -> Demand {
        let work = RunWork { prompt: self.mean.0, gen_len: self.mean.1, batch: n };
        Demand { context: self.context, sequences: n, logits: n, pages: Some(self.pages(n)), work }
    }
}

/// See the [module](self).
pub struct Scheduled {
    /// The engine, unless requests are using it.
    engine: Option<Engine>,
    /// Where it runs, if one placement was chosen for all requests.
    pub decision: Option<PlacementDecision>,
    /// Sentences that everybody should read.
    pub notes: Vec<String>,
    /// Sentences for those who want to know more.
    pub details: Vec<String>,
    /// The accelerator's runtime, if it is used.
    pub runtime: Option<Arc<dyn Runtime>>,
    /// Of a mixture of experts, those on each side.
    experts: Option<ExpertCounts>,
    /// Whether requests may live on either side, so that schedulers differ.
    schedulers: bool,
    /// The predictions that schedulers use.
    scheduling: Option<Scheduling>,
    tokens: (usize, usize),
    targets: Targets,
    learns_lengths: bool,
}

impl Model {
    /// An engine for `parallel` concurrent requests, or for as many as fit in memory.
    ///
    /// # Errors
    /// As [`Model::engine`].
    pub fn scheduled(
        &self,
        settings: &Settings,
        needs: &Needs,
        parallel: Option<usize>,
        progress: &dyn Progress,
    ) -> Result<Scheduled> {
        settings.check(Requests::Compared)?;
        let mut n = parallel.unwrap_or(MOST_SEQUENCES).min(needs.tokens.len()).max(1);
        loop {
            let fewer = n > 1 && parallel.is_none();
            match self.scheduled_for(settings, needs, (n, fewer), progress) {
                Err(Error::Capacity(_)) if fewer => n = n.div_ceil(2),
                scheduled => return scheduled,
            }
        }
    }

    /// The same for `n` requests together, or an error of [`Error::Capacity`] if `fewer` may be tried then.
    fn scheduled_for(
        &self,
        settings: &Settings,
        needs: &Needs,
        (n, fewer): (usize, bool),
        progress: &dyn Progress,
    ) -> Result<Scheduled> {
        if let Some(kind) = settings.kind().filter(|_| settings.schedules()) {
            match self.on_tiers(&kind, settings, needs, (n, fewer), progress) {
                // Fall back to weights on both sides, or to the CPU.
                Err(Error::Device { .. } | Error::Unsupported(_) | Error::Capacity(_))
                    if settings.strategies[..] == [Strategy::Auto] => {}
                scheduled => return scheduled,
            }
        }
        let Running { mut engine, decision, mut notes, details, runtime, .. } =
            self.engine(settings, &needs.demand(n), progress)?;
        let all = engine.free_pages() * PAGE_TOKENS;
        let tokens = if engine.home() == Side::Device { (all, 0) } else { (0, all) };
        if settings.cohorts.is_some() {
            notes.push("`cohorts` has no effect: all requests live on one side".into());
        }
        Ok(Scheduled {
            engine: Some(engine),
            experts: decision.experts,
            decision: Some(decision),
            notes,
            details,
            runtime,
            schedulers: false,
            scheduling: None,
            tokens,
            targets: Targets::NONE,
            learns_lengths: settings.learns_lengths.unwrap_or(true),
        })
    }

    /// An engine with all weights on the accelerator, and keys and values of requests there and on the host.
    fn on_tiers(
        &self,
        kind: &Kind,
        settings: &Settings,
        needs: &Needs,
        (n, fewer): (usize, bool),
        progress: &dyn Progress,
    ) -> Result<Scheduled> {
        let options = self.options(settings, &needs.demand(n), progress)?;
        planned_again(kind, settings.gpu_memory, progress, |accelerator| {
            self.tiers_on(accelerator, kind, settings, options.clone(), (needs, n, fewer), progress)
        })
    }

    /// The same, planned with the memory that is free on `accelerator`, for `n` of the requests together.
    fn tiers_on(
        &self,
        accelerator: Arc<dyn Accelerator>,
        kind: &Kind,
        settings: &Settings,
        mut options: Options,
        (needs, n, fewer): (&Needs, usize, bool),
        progress: &dyn Progress,
    ) -> Result<Planned<Scheduled>> {
        let (spec, weights) = (&self.loaded.spec, &self.loaded.weights);
        let all = needs.pages(n);
        fit_types(settings, &*accelerator, &mut options);
        let info = accelerator.runtime().info();
        if let Some(readers) =
            crate::profile::measured_readers(Some(info)).filter(|_| settings.threads.is_none())
        {
            options.readers = Some(readers);
            progress.detail(&format!("attention of single rows on the host: at most {readers} threads"));
        }
        // The device's rows, and those of the host.
        options.sub_batches = 1 + settings.cohorts.unwrap_or(1);
        options.far_pages = Some(all);
        let most = options.kv_pages.map_or(all, |pages| pages.min(all));
        let info = accelerator.runtime().info().clone();
        let scheduling = Scheduling::of(settings, &self.loaded, (kind, &info), progress)?;
        let sizes = Sizes::new(spec, weights, &options, &*accelerator)?;
        let whole = Placement::all(Side::Device, sizes.layers(), 0);
        let tiers = match sizes.clone().tiers(&whole, most, all) {
            // Schedulers that are asked for run mixtures that do not fit, too; left to itself, a planner finds the best place for one.
            Err(Error::Capacity(what))
                if spec.experts.is_some() && settings.strategies[..] != [Strategy::Auto] =>
            {
                let few = needs.pages(n.min(FEW_REQUESTS)).min(most);
                let work = Workload {
                    prompt: needs.mean.0.max(1) as u64,
                    gen_len: needs.mean.1 as u64,
                    batch: n.min(FEW_REQUESTS) as u64,
                    chunk: options.chunk as u64,
                };
                let fits = |base: Placement| {
                    let tiers = sizes.clone().tiers(&base, most, all).ok()?;
                    (tiers.device_pages >= few).then_some(tiers)
                };
                scheduling.experts_on_host(&work, fits).ok_or(Error::Capacity(what))?
            }
            tiers => tiers?,
        };
        if let Some(pages) = options.kv_pages.filter(|&pages| pages.min(all) > tiers.device_pages) {
            return Err(Error::usage(format!(
                "`kv_pages` {pages}: {kind} has room for {} pages beside the weights; set at most that, or leave it out",
                tiers.device_pages
            )));
        }
        // Of fewer together the longest may find room, which this strategy does not look for elsewhere.
        if fewer && settings.strategies[..] == [Strategy::GpuOnly] && tiers.device_pages < needs.pages(1) {
            return Err(Error::Capacity(format!(
                "{kind} has room for {} pages of keys and values of {n} requests, of which the longest takes {}",
                tiers.device_pages,
                needs.pages(1)
            )));
        }
        options.kv_pages = Some(tiers.device_pages);
        options.far_pages = (tiers.host_pages > 0).then_some(tiers.host_pages);
        let placement = Placement { host_pages: tiers.host_pages, ..tiers.placement.clone() };
        let experts = ExpertCounts::of(spec, &placement);
        let scheduling = scheduling.on(placement);
        let runtime = Some(accelerator.runtime().clone());
        let name = kind.to_string();
        let engine = counted(progress, weights.bytes(), "loading weights", |done| {
            let (spec, placement) = (spec.clone(), tiers.placement);
            Engine::placed(spec, weights, &options, accelerator, &name, "gpu-only", placement, done)
        });
        let tokens = (tiers.device_pages * PAGE_TOKENS, tiers.host_pages * PAGE_TOKENS);
        let which = match experts {
            Some(experts) if experts.host > 0 => {
                format!("weights but {} of {} experts", experts.host, experts.host + experts.device)
            }
            _ => "weights".to_owned(),
        };
        let mut notes = vec![format!(
            "{which} on {name}, keys and values of {} tokens there and {} on the cpu",
            tokens.0, tokens.1
        )];
        Planned::of(engine, |engine| {
            notes.extend(details::clock(settings, &engine));
            Scheduled {
                engine: Some(engine),
                experts,
                decision: None,
                notes,
                details: Vec::new(),
                runtime,
                schedulers: true,
                scheduling: Some(scheduling),
                tokens,
                targets: Targets::NONE,
                learns_lengths: settings.learns_lengths.unwrap_or(true),
            }
        })
    }
}

impl Scheduled {
    /// Tokens whose keys and values fit on the device, and on the host.
    pub fn tokens(&self) -> (usize, usize) {
        self.tokens
    }

    /// Of a mixture of experts, those on each side.
    pub fn experts(&self) -> Option<ExpertCounts> {
        self.experts
    }

    /// The names of the schedulers of `settings`; the placement's name if there is only continuous batching.
    pub fn strategies(&self, settings: &Settings) -> Vec<String> {
        if self.schedulers {
            return settings.strategies.iter().map(|s| s.name().to_owned()).collect();
        }
        vec![self.engine.as_ref().map_or("", |e| e.placement().strategy).to_owned()]
    }

    /// Requests on the engine, with the named scheduler if there are several to choose from, else with continuous
    /// batching. Return the engine with [`Scheduled::back`].
    ///
    /// # Panics
    /// If the engine was not given back.
    pub fn requests(&mut self, strategy: &str) -> Batcher {
        let engine = self.engine.take().expect("it was given back");
        let costs = || match &self.scheduling {
            Some(scheduling) => scheduling.predict(),
            None => Box::new(sched::Untimed),
        };
        let mut requests = match sched::by_name(strategy).filter(|_| self.schedulers) {
            Some(strategy) => Batcher::with(engine, strategy, costs()),
            None => Batcher::new(engine),
        };
        requests.set_targets(self.targets);
        requests.set_learns_lengths(self.learns_lengths);
        requests
    }

    /// What is asked of latency from the next [`Scheduled::requests`] on.
    pub fn set_targets(&mut self, targets: Targets) {
        self.targets = targets;
    }

    /// Takes the engine back for other requests.
    pub fn back(&mut self, requests: Batcher) {
        self.engine = Some(requests.into_engine());
    }

    /// The engine, while it is not in use.
    ///
    /// # Panics
    /// If requests are using it.
    pub fn engine(&mut self) -> &mut Engine {
        self.engine.as_mut().expect("it was given back")
    }
}
