//! An engine for many requests and its scheduler, for `generate --prompts` and `bench --trace`.

use tandem::cache::{KvGeometry, PAGE_TOKENS};
use tandem::device::{self, Kind};
use tandem::engine::{Batcher, Engine, Sizes};
use tandem::program::{Placement, Side};
use tandem::sched::{self, Targets};
use tandem::simd::Isa;
use tandem::{Error, Result};

use super::{Notices, Opened, with_bar};
use crate::cli::args::{EngineArgs, Lengths, Strategy};
use crate::cli::predict::{self, Scheduling, Use};
use crate::cli::progress;

/// Default limit of concurrent sequences: beyond it, more sequences do not make a step's weights cheaper for each.
const MOST_SEQUENCES: usize = 256;

/// The memory and context that requests need.
#[derive(Debug, Clone)]
pub struct Needs {
    /// Tokens of each request when its answer is complete, in descending order; at least one request.
    tokens: Vec<usize>,
    /// Mean tokens of prompts and answers.
    mean: (usize, usize),
    /// Tokens of the longest request, or `--ctx`.
    context: usize,
}

impl Needs {
    /// The needs of at least one request, each given as its tokens of prompt and answer; `ctx` is the requested
    /// context, `most` the model's.
    pub fn new(requests: &[(usize, usize)], ctx: Option<u32>, most: usize) -> Needs {
        let limit = ctx.map_or(most, |c| c as usize);
        let mut tokens: Vec<usize> = requests.iter().map(|(p, a)| (p + a).min(limit)).collect();
        tokens.sort_unstable_by_key(|&n| std::cmp::Reverse(n));
        let mean = |of: fn(&(usize, usize)) -> usize| {
            requests.iter().map(of).sum::<usize>().div_ceil(requests.len().max(1))
        };
        let context = ctx.map_or(tokens.first().copied().unwrap_or(1), |c| c as usize);
        Needs { tokens, mean: (mean(|r| r.0), mean(|r| r.1)), context }
    }

    /// Pages for the `n` longest requests to run together, so that any `n` requests can run without waiting for pages.
    fn pages(&self, n: usize) -> usize {
        self.tokens[..n].iter().map(|&tokens| KvGeometry::pages_for(tokens)).sum()
    }
}

/// See the [module](self).
pub struct Scheduled {
    /// The engine, unless requests are using it.
    engine: Option<Engine>,
    /// Reports notices when dropped.
    #[allow(dead_code)] // what counts is when
    pub notices: Notices,
    /// Whether requests may live on either side, so that schedulers differ.
    schedulers: bool,
    /// The predictions that schedulers use.
    scheduling: Option<Scheduling>,
    tokens: (usize, usize),
    targets: Targets,
    learns_lengths: bool,
}

impl Opened {
    /// An engine for `parallel` concurrent requests, or for as many as fit in memory.
    ///
    /// # Errors
    /// As [`Opened::engine`].
    pub fn scheduled(
        &self,
        args: &EngineArgs,
        needs: &Needs,
        parallel: Option<u32>,
    ) -> anyhow::Result<Scheduled> {
        let mut n = parallel.map_or(MOST_SEQUENCES, |n| n as usize).min(needs.tokens.len()).max(1);
        loop {
            match self.scheduled_for(args, needs, n) {
                Err(e) if n > 1 && parallel.is_none() && is_capacity(&e) => n = n.div_ceil(2),
                scheduled => return scheduled,
            }
        }
    }

    fn scheduled_for(&self, args: &EngineArgs, needs: &Needs, n: usize) -> anyhow::Result<Scheduled> {
        if let Some(kind) = args.kind().filter(|_| args.schedules()) {
            match self.on_tiers(&kind, args, needs, n) {
                Ok(scheduled) => return Ok(scheduled),
                // Fall back to weights on both sides, or to the CPU.
                Err(Error::Device { .. } | Error::Unsupported(_) | Error::Capacity(_))
                    if args.strategies[..] == [Strategy::Auto] => {}
                Err(e) => return Err(e.into()),
            }
        }
        let work = Use { prompt: needs.mean.0, gen_len: needs.mean.1, batch: n };
        let running = self.engine_with_pages(args, needs.context, n, n, Some(needs.pages(n)), work)?;
        let super::Running { mut engine, notices, .. } = running;
        let all = engine.free_pages() * PAGE_TOKENS;
        let tokens = if engine.home() == Side::Device { (all, 0) } else { (0, all) };
        if args.cohorts.is_some() {
            progress::note("--cohorts has no effect: all requests live on one side");
        }
        Ok(Scheduled {
            engine: Some(engine),
            notices,
            schedulers: false,
            scheduling: None,
            tokens,
            targets: Targets::NONE,
            learns_lengths: args.lengths != Some(Lengths::Allowed),
        })
    }

    /// An engine with all weights on the accelerator, and keys and values of requests there and on the host.
    fn on_tiers(&self, kind: &Kind, args: &EngineArgs, needs: &Needs, n: usize) -> Result<Scheduled> {
        let accelerator = device::open(kind, args.gpu_memory)?;
        let (spec, weights) = (&self.model.spec, &self.model.weights);
        let all = needs.pages(n);
        let mut options = self.options(args, Isa::selected()?, needs.context, n, n, Some(all))?;
        super::fit_types(args, &*accelerator, &mut options);
        let info = accelerator.runtime().info();
        if let Some(readers) =
            tandem::profile::measured_readers(Some(info)).filter(|_| args.threads.is_none())
        {
            options.readers = Some(readers);
            progress::detail(&format!("attention of single rows on the host: at most {readers} threads"));
        }
        // The device's rows, and those of the host.
        options.sub_batches = 1 + args.cohorts.unwrap_or(1) as usize;
        options.far_pages = Some(all);
        let most = options.kv_pages.map_or(all, |pages| pages.min(all));
        let tiers = Sizes::new(spec, weights, &options, &*accelerator)?.tiers(most, all)?;
        if let Some(pages) = options.kv_pages.filter(|&pages| pages.min(all) > tiers.device_pages) {
            return Err(Error::usage(format!(
                "--kv-pages {pages}: {kind} has room for {} pages beside the weights; set at most that, or leave the option out",
                tiers.device_pages
            )));
        }
        options.kv_pages = Some(tiers.device_pages);
        options.far_pages = (tiers.host_pages > 0).then_some(tiers.host_pages);
        let info = accelerator.runtime().info().clone();
        let placement = Placement { host_pages: tiers.host_pages, ..tiers.placement.clone() };
        let scheduling = predict::scheduling(args, &self.model, (kind, &info), &placement)?;
        if scheduling.is_none()
            && let Some(other) = args.strategies.iter().find(|&&s| s != Strategy::GpuOnly)
        {
            return Err(Error::usage(format!(
                "--strategy {}: there are no figures of {}, which it decides by; measure them with tandem profile, or name \
                 a description with --hardware",
                other.name(),
                info.name
            )));
        }
        let runtime = Some(accelerator.runtime().clone());
        let name = kind.to_string();
        let engine = with_bar(weights.bytes(), "loading weights", |progress| {
            let (spec, placement) = (spec.clone(), tiers.placement);
            Engine::placed(spec, weights, &options, accelerator, &name, "gpu-only", placement, progress)
        })?;
        let tokens = (tiers.device_pages * PAGE_TOKENS, tiers.host_pages * PAGE_TOKENS);
        progress::note(&format!(
            "weights on {name}, keys and values of {} tokens there and {} on the cpu",
            tokens.0, tokens.1
        ));
        super::tell_clock(args, &engine);
        let (engine, notices) = (Some(engine), Notices(runtime));
        let (targets, learns_lengths) = (Targets::NONE, args.lengths != Some(Lengths::Allowed));
        Ok(Scheduled { engine, notices, schedulers: true, scheduling, tokens, targets, learns_lengths })
    }
}

fn is_capacity(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Capacity(_)))
}

impl Scheduled {
    /// Tokens whose keys and values fit on the device, and on the host.
    pub fn tokens(&self) -> (usize, usize) {
        self.tokens
    }

    /// The names of the requested schedulers; the placement's name if there is only continuous batching.
    pub fn strategies(&self, args: &EngineArgs) -> Vec<String> {
        if self.schedulers {
            return args.strategies.iter().map(|s| s.name()).collect();
        }
        vec![self.engine.as_ref().map_or("", |e| e.placement().strategy).to_owned()]
    }

    /// Requests on the engine, with the named scheduler if there are several to choose from, else with continuous
    /// batching. Return the engine with [`Scheduled::back`].
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
    pub fn engine(&mut self) -> &mut Engine {
        self.engine.as_mut().expect("it was given back")
    }
}
