//! Asynchronous overlap: cohorts of the host's requests, each at one layer (APEX §4).
//!
//! ```text
//! gpu    | layers 0..i | + cohort: post i, pre i+1 | layers i+1..L |  next iteration: joins behind layer i+1 …
//! host     (attends)     | attends layer i+1 of the cohort, as long as an iteration takes                    |
//! ```
//!
//! A cohort makes one token in L + 1 iterations, and its products are one layer's in each; where the host computes layers, too, it
//! goes through a run of them within one ([`Predict::token_iterations`]). Its size follows from the
//! tables: the host's attention of one layer of it fits the window of one iteration. A cohort a little too large loses half
//! its rate, since it advances by whole iterations; one that lags is made smaller ([`Cohorts::observe`]).
//!
//! A request is in a cohort for a token; between tokens it may go to the device, or stay behind for those that have waited
//! longer. Parked rows are neither swapped nor put into another flow: whoever wants one lets the cohorts end their token.

use crate::program::{Flow, Iteration, RequestId, Side, SubBatch};

use super::pipeline::most;
use super::predict::Predict;
use super::rows::SubBatchRows;
use super::strategy::{Limits, Observed};
use super::view::RequestView;

/// Most cohorts at a time: as many as a step has sub-batches beside the first, up to this.
///
/// Several are the paper's pool of tasks: each begins with its share of the window, and the host always has another one when one is
/// done. But each one's products read a layer's weights once more in an iteration, so that one is best where a sub-batch has room for it
/// (docs/scheduling.md has the measurements).
const MOST: usize = 8;

/// The share of the window that is filled: at first, at most and at least.
const FILL: f64 = 0.95;
const FILL_MOST: f64 = 1.1;
const FILL_LEAST: f64 = 0.05;

/// Added to the share after a token without a lag; least factor on it after one with many.
const GROWS: f64 = 0.01;
const SHRINKS: f64 = 0.75;

/// Lags, of a token's iterations, from which the share shrinks, by as much, and below which it grows. A few cost less than a smaller
/// cohort: windows change from step to step, with prompts.
const MANY: f64 = 0.07;
const HARDLY: f64 = 0.02;

/// See the [module](self).
#[derive(Debug, Clone)]
pub(super) struct Cohorts {
    /// The requests of each. A place stays a cohort's own while it is parked.
    parked: [Vec<RequestId>; MOST],
    fill: f64,
    /// Iterations since as many cohorts have begun as there are, and those in which none was ready.
    steps: u32,
    lags: u32,
    /// Cohorts that have begun since.
    begun: usize,
    /// Whether a single request exceeds the window, so that its lags say nothing about the share.
    oversized: bool,
}

impl Default for Cohorts {
    fn default() -> Self {
        Cohorts { parked: Default::default(), fill: FILL, steps: 0, lags: 0, begun: 0, oversized: false }
    }
}

/// Cohorts of a step: those that are parked, and those that may begin.
pub(super) struct Overlapped {
    /// The cohorts, by place.
    pub cohorts: Vec<SubBatch>,
    /// Rows of all of them.
    pub rows: u64,
    /// Requests of the cohorts that begin, by place.
    begins: [Vec<RequestId>; MOST],
}

impl Overlapped {
    /// As an iteration, with the device's rows.
    pub fn iteration(&self, first: &SubBatchRows) -> Iteration {
        let mut sub_batches = vec![first.clone().batch()];
        sub_batches.extend(self.cohorts.iter().cloned());
        while sub_batches.last().is_some_and(|batch| batch.groups.is_empty()) {
            sub_batches.pop();
        }
        Iteration { sub_batches, moves: Vec::new(), flow: Flow::Async, pick: true, top: false }
    }
}

impl Cohorts {
    /// The share of the window that cohorts fill.
    pub fn fill(&self) -> f64 {
        self.fill
    }

    /// Updates which requests are parked; returns them by cohort. `hosts` are the host's requests.
    pub fn parked<'a>(
        &mut self,
        hosts: impl Iterator<Item = &'a RequestView>,
    ) -> [Vec<&'a RequestView>; MOST] {
        let parked: Vec<&RequestView> = hosts.filter(|job| job.at.is_some()).collect();
        let mut places: [Vec<&RequestView>; MOST] = Default::default();
        for (place, ids) in places.iter_mut().zip(&mut self.parked) {
            // Cohorts are few, and so are the requests that are parked; both are in the same order most of the time.
            let mut next = 0;
            ids.retain(|id| {
                let found = (next..parked.len()).chain(0..next).find(|&i| parked[i].id == *id);
                next = found.map_or(next, |i| i + 1);
                place.extend(found.map(|i| parked[i]));
                found.is_some()
            });
        }
        // Rows that another strategy has parked: by layer, where there is a place.
        let known: usize = places.iter().map(Vec::len).sum();
        if known < parked.len() {
            for job in parked {
                if places.iter().flatten().any(|known| known.id == job.id) {
                    continue;
                }
                let fits = |place: &Vec<&RequestView>| place.first().is_none_or(|first| first.at == job.at);
                if let Some(i) = places.iter().position(fits) {
                    places[i].push(job);
                    self.parked[i].push(job.id);
                }
            }
        }
        places
    }

    /// Cohorts of this step: those that are parked and, from the `pool` of requests that wait for their next token, others
    /// whose attention fits what is left of `window` seconds.
    pub fn draft(
        &self,
        parked: &[Vec<&RequestView>; MOST],
        pool: &[&RequestView],
        window: f64,
        limits: &Limits,
        costs: &dyn Predict,
    ) -> Overlapped {
        let seconds = |rows: u64, kv: u64| costs.cohort(rows, kv) + costs.launch();
        let kv = |job: &RequestView| u64::from(job.stored) + 1;
        let mut cohorts = Vec::new();
        let mut busy = 0.0;
        for jobs in parked {
            if !jobs.is_empty() {
                busy += seconds(jobs.len() as u64, jobs.iter().map(|j| kv(j)).sum());
            }
            cohorts.push(batch(jobs));
        }
        let places = MOST.min((limits.sub_batches as usize).saturating_sub(1));
        let mut begins: [Vec<RequestId>; MOST] = Default::default();
        let mut pool = pool;
        let free: Vec<usize> = (0..places).filter(|&place| parked[place].is_empty()).collect();
        for (i, &place) in free.iter().enumerate() {
            let share = (self.fill * window - busy) / (free.len() - i) as f64;
            let mut sum = 0;
            let mut tokens = vec![0];
            tokens.extend(pool.iter().map(|job| {
                sum += kv(job);
                sum
            }));
            let room = pool.len().min(limits.rows as usize);
            let fits = |n: usize| seconds(n as u64, tokens[n]) <= share;
            // One at least, where nothing else is under way.
            let least = usize::from(busy == 0.0).min(room);
            let n = most(room, fits).max(least);
            if n > 0 {
                let (jobs, rest) = pool.split_at(n);
                busy += seconds(n as u64, tokens[n]);
                begins[place] = jobs.iter().map(|job| job.id).collect();
                cohorts[place] = batch(jobs);
                pool = rest;
            }
        }
        let rows = cohorts.iter().map(|c| u64::from(c.rows())).sum();
        Overlapped { cohorts, rows, begins }
    }

    /// Records that the step runs beside the device's rows; returns its iteration.
    pub fn carry_out(&mut self, step: Overlapped, first: SubBatchRows, costs: &dyn Predict) -> Iteration {
        let iteration = step.iteration(&first);
        let groups = step.cohorts.iter().flat_map(|c| &c.groups);
        let (rows, kv) = groups.fold((0, 0), |(n, kv), group| (n + 1, kv + u64::from(group.end())));
        // A single request whose attention takes longer than an iteration lags, whatever its cohort's size.
        let window = costs.iteration(&first.alone());
        let takes = costs.host_attention(rows, kv) / f64::from(costs.layers());
        self.begin(step, rows == 1 && takes > window);
        iteration
    }

    fn begin(&mut self, step: Overlapped, oversized: bool) {
        self.oversized = oversized;
        for (parked, begins) in self.parked.iter_mut().zip(step.begins) {
            if begins.is_empty() {
                continue;
            }
            *parked = begins;
            self.begun += 1;
        }
        if self.begun > 0 && self.begun >= self.parked.iter().filter(|ids| !ids.is_empty()).count() {
            let share = f64::from(self.lags) / f64::from(self.steps.max(1));
            if share > MANY {
                self.fill = (self.fill * (1.0 - share).max(SHRINKS)).max(FILL_LEAST);
            } else if share < HARDLY {
                self.fill = (self.fill + GROWS).min(FILL_MOST);
            }
            (self.steps, self.lags, self.begun) = (0, 0, 0);
        }
    }

    /// Where no cohort was ready they were too large: the share shrinks. One of several may lag: the host works on the others.
    pub fn observe(&mut self, seen: &Observed) {
        if seen.cohorts > 0 && !self.oversized {
            // What follows from it waits for the end of their tokens: a cohort that lags can only change behind it.
            self.steps += 1;
            self.lags += u32::from(seen.advanced == 0);
        }
    }
}

fn batch(jobs: &[&RequestView]) -> SubBatch {
    let groups = jobs.iter().map(|job| job.group(1, Side::Host)).collect();
    match jobs.first().and_then(|job| job.at) {
        Some(at) => SubBatch::parked(groups, at),
        None => SubBatch::of(groups),
    }
}
