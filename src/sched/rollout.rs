//! What a policy would make of the present requests: its steps one after the other, each as long as predicted, until all
//! requests have ended.
//!
//! ```text
//! plan ─► copies that must come first ─► iteration, with copies beside it ─► commit ─► requests that are complete end
//! ```
//! A cohort advances when the host has finished its attention by the time the device reaches its layer; otherwise it stays
//! parked, as on the machine. Steps that only repeat the last one are not planned ([`repeat`]). `rollout/tests.rs` compares
//! predicted runs with simulated ones.

mod repeat;

use crate::program::{CopySpans, Flow, Iteration, RequestId, SubBatch};

use super::copies::StepCopies;
use super::learn::Learned;
use super::model::Mode;
use super::policy::Policy;
use super::predict::Predict;
use super::queues::Queues;
use super::rows::RowLoad;
use super::strategy::{Limits, Observed, Strategy};
use super::weigh::Worth;

/// Steps without rows or copies after which a rollout is given up.
const PATIENCE: u32 = 8;

/// Steps of a rollout that is to be exact: more of them would leave no time for the other policies.
const EXACT: u32 = 512;

/// See the [module](self).
#[derive(Debug, Clone)]
pub(super) struct Rollout {
    policy: Policy,
    queues: Queues,
    worth: Worth,
    progress: RolloutProgress,
    seconds: f64,
    /// When it began.
    from: f64,
    /// Requests with targets that have ended, and those of them that were late.
    ended: (usize, usize),
    idle: u32,
    host: HostLane,
    /// Most requests that ran at a time.
    peak: usize,
    /// Steps of decode rows whose turns are still told apart.
    exact: u32,
}

/// How far a rollout is after which time: the worth of all rows so far, seconds of the long run.
#[derive(Debug, Clone, Default)]
pub(super) struct RolloutProgress {
    steps: Vec<(f64, f64)>,
}

impl RolloutProgress {
    /// When it ended, so far.
    pub fn seconds(&self) -> f64 {
        self.steps.last().map_or(0.0, |step| step.0)
    }

    /// The worth of the rows that were done within `seconds`.
    pub fn at(&self, seconds: f64) -> f64 {
        let steps = self.steps.partition_point(|step| step.0 <= seconds);
        let before = steps.checked_sub(1).map_or((0.0, 0.0), |last| self.steps[last]);
        match self.steps.get(steps) {
            Some(after) if after.0.is_finite() => {
                before.1 + (after.1 - before.1) * (seconds - before.0) / (after.0 - before.0)
            }
            _ => before.1,
        }
    }
}

/// How an iteration shares its work, by its flow.
pub(super) fn mode(iteration: &Iteration) -> Mode {
    match iteration.flow {
        Flow::Serial => Mode::GpuOnly,
        Flow::TwoLanes => Mode::Pipelined,
        Flow::Async => Mode::Overlapped,
    }
}

impl Rollout {
    /// Of `policy`, from these requests on, whose rows are worth so much.
    pub fn new(policy: Policy, queues: Queues, worth: Worth) -> Rollout {
        let (progress, host) = (RolloutProgress::default(), HostLane::default());
        let from = queues.now();
        Rollout {
            policy,
            queues,
            worth,
            progress,
            seconds: 0.0,
            from,
            ended: (0, 0),
            idle: 0,
            host,
            peak: 0,
            exact: 0,
        }
    }

    /// Its first steps of decode rows without [repetitions](repeat) where rows of the host take turns.
    pub fn exactly(self) -> Rollout {
        Rollout { exact: EXACT, ..self }
    }

    /// See [`Queues::first_seconds`].
    pub fn first_seconds(&self) -> f64 {
        self.queues.first_seconds()
    }

    /// Requests that are late, so far, and all that there were with targets: a single one is not outvoted by others that ask nothing.
    pub fn late(&self) -> (usize, usize) {
        (self.ended.1 + self.queues.hopeless(), self.ended.0 + self.queues.with_targets())
    }

    /// How far it is after which time.
    pub fn progress(&self) -> &RolloutProgress {
        &self.progress
    }

    /// Seconds so far; infinite if the policy does not finish the requests.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Those that wait.
    pub fn waiting(&self) -> usize {
        self.queues.waiting().len()
    }

    /// Those that run.
    pub fn running(&self) -> usize {
        self.queues.running().len()
    }

    /// Most requests that ran at a time, so far.
    pub fn peak(&self) -> usize {
        self.peak
    }

    /// Requests that have not ended.
    pub fn requests(&self) -> usize {
        self.running() + self.waiting()
    }

    /// The next step, and those that only repeat it. Returns how many of these were worked out.
    pub fn step(&mut self, limits: &Limits, costs: &dyn Predict, learned: &Learned) -> u32 {
        let decision = self.policy.plan(&self.queues, limits, costs);
        let copies = StepCopies::of(&decision, &self.queues, limits);
        let stays = decision.admit.is_empty() && decision.swaps.is_empty();
        self.queues.admit(&decision);
        self.peak = self.peak.max(self.running());
        let iteration = decision.iteration;
        let (first, beside) = copies.split(&iteration, &self.queues);
        if iteration.sub_batches.is_empty() && first.is_empty() && beside.is_empty() {
            self.idle += 1;
            if self.idle > PATIENCE {
                self.seconds = f64::INFINITY;
                self.advanced(0.0);
            }
            return 0;
        }
        self.idle = 0;
        if !first.is_empty() {
            let alone = Iteration { moves: first, ..Iteration::serial(Vec::new(), false) };
            self.seconds += costs.iteration(&alone);
        }
        let iteration = Iteration { moves: beside, ..iteration };
        let takes = costs.iteration(&iteration) * learned.ratio(mode(&iteration));
        let running = self.queues.running().len();
        let parked = self.commit(&iteration, takes, costs);
        if !stays || self.queues.running().len() < running {
            return 0;
        }
        self.repeat(&iteration, parked, takes, limits, costs, learned)
    }

    fn advanced(&mut self, worth: f64) {
        let done = self.progress.steps.last().map_or(0.0, |step| step.1);
        self.progress.steps.push((self.seconds, done + worth));
    }

    /// Returns the layers where sub-batches are parked.
    fn commit(&mut self, iteration: &Iteration, takes: f64, costs: &dyn Predict) -> Vec<Option<u32>> {
        let mut seen = Observed { predicted: takes, seconds: takes, ..Observed::default() };
        let mut parked = vec![None; iteration.sub_batches.len()];
        if iteration.flow == Flow::Async {
            self.seconds = self.host.wait(iteration, self.seconds);
            let (start, layers) = (self.seconds, f64::from(costs.layers()));
            self.host.beside(start, costs.copies(iteration), costs.beside_copies());
            let passes = |layer: u32| start + takes * f64::from(layer) / layers;
            for (b, batch) in iteration.cohorts() {
                seen.cohorts += 1;
                parked[b as usize] = batch.at;
                if self.host.is_ready(batch, passes(batch.at.unwrap_or(0))) {
                    seen.advanced += 1;
                    let next = costs.next_stop(batch.at);
                    parked[b as usize] = next;
                    self.host.attend(batch, next, passes(batch.at.map_or(0, |at| at + 1)), costs);
                }
            }
        }
        self.seconds += takes;
        // Rows that are parked have no token yet.
        let done = iteration.sub_batches.iter().zip(&parked).filter(|(_, parked)| parked.is_none());
        let load = RowLoad::of(done.flat_map(|(batch, _)| &batch.groups));
        self.advanced(self.worth.of(&load));
        self.queues.set_now(self.from + self.seconds);
        self.queues.commit(iteration, &parked, |g| g.tokens);
        let (ended, late) = self.queues.end_complete();
        self.ended = (self.ended.0 + ended, self.ended.1 + late);
        self.policy.observe(&seen);
        parked
    }
}

/// When the host finishes the attention of parked cohorts.
#[derive(Debug, Clone, Default)]
struct HostLane {
    /// When it has finished all of it.
    free: f64,
    /// When it has finished that of each cohort, by the cohort's first request.
    ready: Vec<(RequestId, f64)>,
    /// Copies that run beside it, and the share of its rate that it then keeps.
    copies: CopySpans,
    share: f64,
}

impl HostLane {
    fn at(&self, batch: &SubBatch) -> f64 {
        let first = batch.groups[0].request;
        self.ready.iter().find(|(id, _)| *id == first).map_or(0.0, |&(_, at)| at)
    }

    /// When the device starts: without rows of its own or a cohort that begins, it waits for the first cohort.
    fn wait(&self, iteration: &Iteration, now: f64) -> f64 {
        let own = iteration.sub_batches.first().is_some_and(|batch| !batch.groups.is_empty());
        if own || iteration.cohorts().any(|(_, batch)| batch.at.is_none()) {
            return now;
        }
        now.max(iteration.cohorts().map(|(_, batch)| self.at(batch)).reduce(f64::min).unwrap_or(now))
    }

    fn is_ready(&self, batch: &SubBatch, when: f64) -> bool {
        batch.at.is_none() || self.at(batch) <= when
    }

    /// An iteration begins whose copies run for so many seconds: they slow down what is under way.
    fn beside(&mut self, start: f64, copies: f64, share: f64) {
        self.copies = CopySpans::of([(start, start + copies)]);
        self.share = share;
        if copies > 0.0 {
            let slowed = |t: f64| if t > start { self.copies.end(start, t - start, share) } else { t };
            self.free = slowed(self.free);
            self.ready.iter_mut().for_each(|(_, t)| *t = slowed(*t));
        }
    }

    /// A cohort is handed over at `from` and waits at layer `next`, or has its token.
    fn attend(&mut self, batch: &SubBatch, next: Option<u32>, from: f64, costs: &dyn Predict) {
        let first = batch.groups[0].request;
        self.ready.retain(|(id, _)| *id != first);
        if next.is_none() {
            return;
        }
        let (rows, kv) = batch.groups.iter().fold((0, 0), |(n, kv), g| (n + 1, kv + u64::from(g.end())));
        self.free = self.copies.end(self.free.max(from), costs.cohort(rows, kv), self.share);
        self.ready.push((first, self.free));
    }
}

#[cfg(test)]
mod tests;
