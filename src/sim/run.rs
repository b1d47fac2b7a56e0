//! The loop: arrivals, decisions, iterations, tokens.

use std::collections::HashMap;

use super::capacity::PageCapacity;
use super::clock::SimClock;
use super::report::{Report, RunSums, Trip, report};
use super::window::WindowRecorder;
use crate::cache::PAGE_TOKENS;
use crate::plan::Predictor;
use crate::program::{Flow, Iteration, RequestId, Side, Wants};
use crate::sched::{Decision, Limits, Observed, Predict, Queues, RequestView, StepCopies, Strategy, Targets};
use crate::timeline::{StepWindow, Timeline};
use crate::workload::Arrival;
use crate::{Error, Result};

/// Waiting requests that a strategy sees; the others come in their turn. Scheduling takes time for every request that is looked
/// at, and no strategy lets so many overtake the first.
const IN_SIGHT: usize = 512;

/// Idle iterations after which the simulation gives up.
const PATIENCE: u32 = 10_000;

/// How requests are run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Rows of a sub-batch.
    pub rows: u32,
    /// Sub-batches of an iteration.
    pub sub_batches: u32,
    /// Requests that run at a time.
    pub sequences: u32,
    /// Pages on each side.
    pub capacity: PageCapacity,
    /// What is asked of latency.
    pub targets: Targets,
    /// Tokens that each answer may have, of which strategies know; `None`: they know where it ends.
    pub most_answer: Option<u32>,
    /// Whether they expect answers to be as long as those that have ended ([`Queues::set_learns_lengths`]).
    pub learns_lengths: bool,
}

/// Runs `requests`, in the order of their arrival, by `strategy`, which weighs what `predict` says; the clock goes by it, too. `seen` is told how many
/// requests are over.
///
/// # Errors
/// A strategy that decides what cannot be: more pages than there are, rows of requests that do not run, or nothing for
/// thousands of iterations.
pub fn simulate(
    requests: &[Arrival],
    strategy: &mut dyn Strategy,
    predict: &Predictor,
    options: &Options,
    seen: &mut dyn FnMut(u64),
) -> Result<Report> {
    let name = strategy.name();
    let sim = run(requests, strategy, predict, options, None, seen)?;
    Ok(report(name, &sim.trips, sim.sums, &options.targets))
}

/// Runs `requests` up to the end of the `window`, and returns what ran in it and when. Empty, if the run is
/// over before.
///
/// # Errors
/// As [`simulate`].
pub fn timeline(
    requests: &[Arrival],
    strategy: &mut dyn Strategy,
    predict: &Predictor,
    options: &Options,
    window: StepWindow,
    seen: &mut dyn FnMut(u64),
) -> Result<Timeline> {
    let tokens = requests.iter().map(|r| u64::from(r.output)).sum();
    let recorder = WindowRecorder::new(predict, window, tokens);
    let sim = run(requests, strategy, predict, options, Some(recorder), seen)?;
    Ok(sim.recorder.map(|r| r.timeline()).unwrap_or_default())
}

fn run<'a>(
    requests: &'a [Arrival],
    strategy: &mut dyn Strategy,
    predict: &'a Predictor,
    options: &Options,
    recorder: Option<WindowRecorder<'a>>,
    seen: &mut dyn FnMut(u64),
) -> Result<Sim<'a>> {
    let PageCapacity { device_pages, host_pages } = options.capacity;
    let limits = Limits {
        rows: options.rows,
        sub_batches: options.sub_batches,
        sequences: options.sequences,
        device_pages,
        host_pages,
    };
    let mut sim = Sim {
        trips: requests.iter().map(|r| Trip { arrived: r.at, output: r.output, ..Trip::default() }).collect(),
        requests,
        queues: Queues::default(),
        clock: SimClock::new(predict),
        recorder,
        most_pages: strategy.most_pages(&limits),
        limits,
        most_answer: options.most_answer.unwrap_or(0),
        sums: RunSums::default(),
        now: 0.0,
        made: 0,
        next: 0,
        over: 0,
    };
    sim.queues.set_targets(options.targets);
    sim.queues.set_learns_lengths(options.learns_lengths);
    let mut idle = 0;
    while sim.recorder.as_ref().is_none_or(|r| !r.is_done()) {
        sim.arrive();
        if sim.queues.is_empty() {
            match requests.get(sim.next) {
                Some(request) => sim.now = sim.now.max(request.at),
                None => break,
            }
            continue;
        }
        sim.queues.set_now(sim.now);
        let decision = strategy.plan(&sim.queues, &limits, predict);
        let before = sim.over;
        let (advanced, seen_now) = sim.iterate(strategy.name(), decision, predict)?;
        strategy.observe(&seen_now);
        idle = if advanced { 0 } else { idle + 1 };
        if idle > PATIENCE || (idle > 0 && seen_now.seconds == 0.0) {
            // Nothing runs: time goes on to the next arrival, or what is left can never run.
            match requests.get(sim.next) {
                Some(request) if request.at > sim.now => sim.now = request.at,
                _ => sim.give_up(strategy.name()),
            }
        }
        if sim.over > before {
            seen(sim.over);
        }
    }
    Ok(sim)
}

struct Sim<'a> {
    requests: &'a [Arrival],
    trips: Vec<Trip>,
    queues: Queues,
    clock: SimClock<'a>,
    /// Records a few steps.
    recorder: Option<WindowRecorder<'a>>,
    limits: Limits,
    /// Tokens that each answer may have, at least.
    most_answer: u32,
    /// Pages of the longest request that the strategy serves.
    most_pages: usize,
    sums: RunSums,
    now: f64,
    /// Tokens so far.
    made: u64,
    /// The first request that has not been submitted.
    next: usize,
    /// Requests that are over.
    over: u64,
}

fn id(at: usize) -> RequestId {
    RequestId { slot: at as u32, generation: 0 }
}

impl Sim<'_> {
    /// Submits what has arrived.
    fn arrive(&mut self) {
        while self.queues.waiting().len() < IN_SIGHT
            && let Some(request) = self.requests.get(self.next)
            && request.at <= self.now
        {
            // The last token of an answer is not stored.
            let answer = request.output.max(self.most_answer);
            let job = RequestView::new(id(self.next), request.input, request.input + answer - 1);
            let job = RequestView { arrived: Some(request.at).into(), ..job };
            let (pages, most) = (job.pages(), self.most_pages);
            if pages > most {
                self.trips[self.next].failed = true;
                self.over += 1;
                self.sums.fail(format!(
                    "needs more than the {most} pages of keys and values that a request may have"
                ));
            } else {
                self.queues.submit(job);
            }
            self.next += 1;
        }
    }

    /// Fails all requests in the queues.
    fn give_up(&mut self, name: &str) {
        let left: Vec<RequestId> = self.queues.waiting().chain(self.queues.running()).map(|j| j.id).collect();
        for id in left {
            self.queues.end(id);
            self.trips[id.slot as usize].failed = true;
            self.over += 1;
            self.sums.fail(format!("{name} never runs it: it fits no side that the strategy uses"));
        }
    }

    /// Carries a decision out. Returns whether anything advanced.
    fn iterate(&mut self, name: &str, decision: Decision, predict: &dyn Predict) -> Result<(bool, Observed)> {
        let copies = StepCopies::of(&decision, &self.queues, &self.limits);
        self.sums.swapped_pages += copies.pages();
        self.queues.admit(&decision);
        let iteration = Iteration { moves: copies.all(), ..decision.iteration };
        let rows: u32 = iteration.sub_batches.iter().map(|b| b.rows()).sum();
        if rows == 0 && iteration.moves.is_empty() {
            return Ok((!decision.admit.is_empty(), Observed::default()));
        }
        self.check(name, &iteration)?;
        let predicted = predict.iteration(&iteration);
        let (first, moves) = copies.split(&iteration, &self.queues);
        let iteration = Iteration { moves, ..iteration };
        let alone = self.clock.copies(first)?;
        if let Some(r) = self.recorder.as_mut().filter(|r| r.records(self.now, self.made)) {
            r.copies(&alone, self.now);
        }
        self.now += alone.seconds;
        let lap = match &mut self.recorder {
            Some(r) if r.records(self.now, self.made) => r.run(&iteration, self.now, &self.clock)?,
            _ => self.clock.run(&iteration, self.now)?,
        };
        self.now += lap.seconds;
        let sums = &mut self.sums;
        (sums.gpu, sums.cpu) = (sums.gpu + lap.gpu, sums.cpu + lap.cpu);
        (sums.h2d, sums.d2h) = (sums.h2d + alone.h2d + lap.h2d, sums.d2h + alone.d2h + lap.d2h);
        let seconds = alone.seconds + lap.seconds;
        sums.running += seconds;
        sums.iterations += 1;
        sums.flows[match iteration.flow {
            Flow::Serial => 0,
            Flow::TwoLanes => 1,
            Flow::Async => 2,
        }] += 1;
        self.queues.set_now(self.now);
        self.queues.commit(&iteration, &lap.parked, |g| g.tokens);
        let made = self.tokens(&iteration, &lap.parked);
        if made > 0 {
            self.sums.tokens.push((self.now, made));
            self.made += u64::from(made);
        }
        let advanced = lap.parked.iter().zip(&iteration.sub_batches).any(|(p, b)| *p != b.at || p.is_none());
        let seen = Observed { predicted, seconds, cohorts: lap.cohorts, advanced: lap.advanced };
        Ok((advanced, seen))
    }

    /// A decision that cannot be carried out is a mistake of the strategy.
    fn check(&self, name: &str, iteration: &Iteration) -> Result<()> {
        let wrong = |what: String| Err(Error::Run(format!("strategy {name}: {what}")));
        let jobs: HashMap<RequestId, &RequestView> =
            self.queues.running().iter().map(|j| (j.id, j)).collect();
        let mut more = [0usize; 2];
        for group in iteration.sub_batches.iter().flat_map(|b| &b.groups) {
            let Some(job) = jobs.get(&group.request) else {
                return wrong(format!("rows of request {}, which does not run", group.request.slot));
            };
            if group.first != job.stored || group.end() > job.most.max(job.prompt) {
                return wrong(format!(
                    "rows {}..{} of request {}, which has {} tokens and may have {}",
                    group.first,
                    group.end(),
                    group.request.slot,
                    job.stored,
                    job.most
                ));
            }
            more[job.home.unwrap_or(Side::Device) as usize] +=
                job.pages_with(group.tokens) - job.pages_with(0);
        }
        for side in [Side::Device, Side::Host] {
            let (used, there) = (self.queues.stored(side) + more[side as usize], self.limits.pages(side));
            if used > there {
                return wrong(format!(
                    "{used} pages of {PAGE_TOKENS} tokens on the {} side, which has {there}",
                    if side == Side::Host { "host's" } else { "device's" }
                ));
            }
        }
        Ok(())
    }

    /// Counts the tokens that an iteration yields, and ends the requests that have all of theirs.
    fn tokens(&mut self, iteration: &Iteration, parked: &[Option<u32>]) -> u32 {
        let homes: HashMap<RequestId, Side> =
            self.queues.running().iter().filter_map(|j| Some((j.id, j.home?))).collect();
        let mut made = 0;
        for (batch, parked) in iteration.sub_batches.iter().zip(parked) {
            if parked.is_some() {
                continue;
            }
            for group in batch.groups.iter().filter(|g| g.wants != Wants::Nothing) {
                let trip = &mut self.trips[group.request.slot as usize];
                trip.token(self.now, homes.get(&group.request).copied().unwrap_or(Side::Device));
                made += 1;
                if trip.made == trip.output {
                    self.queues.answered(group.request);
                    self.over += 1;
                }
            }
        }
        made
    }
}
