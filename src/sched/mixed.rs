//! The best way of each step: whichever is predicted to do most work. One of the policies of [`auto`](super::auto).
//!
//! ```text
//! memory   evict, swap in, admit: the device first, the host as far as the long run gains by it       (steady)
//! prompts  at full rate until both sides have their requests, then as fast as requests end, and in bubbles             (pace)
//! steps    the device alone | pipelined, with all of the host's rows or the hidden ones | overlapped           (compose, overlap)
//! rate     worth of its rows / (predicted seconds · what was learned about such predictions)
//! ```
//! Rates within a few percent of each other say little about what comes after: then the host's rows are computed rather than left, and
//! not parked for a token ([`favour`]).
//!
//! Beyond the number that the long run needs, requests are admitted while fewer prompts are pending than the pace calls for:
//! prompts and answers mix.

use crate::program::{Phase, Side};

use super::compose::Parts;
use super::continuous::Continuous;
use super::decision::Decision;
use super::draft::Draft;
use super::hybrid::{best, leaving};
use super::learn::Learned;
use super::model::Mode;
use super::overlap::Cohorts;
use super::pace::Pace;
use super::pipeline::AGE;
use super::predict::Predict;
use super::queues::Queues;
use super::rows::{SubBatchRows, longest_waiting};
use super::steady::{LongRun, Steady};
use super::strategy::{Limits, Observed, Strategy};
use super::view::RequestView;
use super::weigh::rate;

/// The last waiting requests begin once the host has this many requests for each of them: a request that begins late ends alone.
const LAST: usize = 2;

/// See the [module](self).
#[derive(Debug, Clone)]
pub(super) struct Mixed {
    one_side: Continuous,
    cohorts: Cohorts,
    learned: Learned,
    /// How the last step was shared.
    mode: Mode,
    long_run: LongRun,
    /// Whether it only finishes the present cohorts.
    ends: bool,
}

impl Default for Mixed {
    fn default() -> Self {
        Mixed {
            one_side: Continuous::default(),
            cohorts: Cohorts::default(),
            learned: Learned::default(),
            mode: Mode::GpuOnly,
            long_run: LongRun::default(),
            ends: false,
        }
    }
}

/// Factor on a way's rate. Alone, the device leaves the host's rows for later; an overlap parks them for a token,
/// during which no other way is possible.
fn favour(way: Mode, last: Mode, long_run: Mode) -> f64 {
    match way {
        Mode::Pipelined => 1.0,
        Mode::Overlapped if last == way => 1.0,
        Mode::Overlapped if long_run == way => 0.96,
        Mode::Overlapped => 0.93,
        Mode::GpuOnly => 0.97,
    }
}

impl Mixed {
    /// A strategy that begins no cohort: it finishes parked rows before another strategy takes over.
    pub fn ending() -> Mixed {
        Mixed { ends: true, ..Mixed::default() }
    }
}

/// Admits to the host what the long run gains by, more while fewer rows of prompts are pending than `enough`, and the last of those
/// that wait.
fn admit(draft: &mut Draft<'_>, steady: &Steady, enough: u64, waiting: usize, limits: &Limits) {
    let mut on_host = draft.host.len();
    let mut pending: u64 = draft.prompts().iter().map(|(job, _)| u64::from(job.prompt - job.stored)).sum();
    let last = steady.least > 0 && LAST * waiting <= on_host;
    draft.admit(true, |job| {
        let takes = on_host < steady.least
            || last
            || (on_host < steady.most.max(2 * steady.least) && pending < enough)
            // Who fits nowhere else must get through, one at a time at least.
            || (on_host == 0 && job.pages() > limits.device_pages);
        if takes {
            on_host += 1;
            pending += u64::from(job.prompt);
        }
        takes
    });
}

impl Strategy for Mixed {
    fn name(&self) -> &'static str {
        "mixed"
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        if limits.one_sided() {
            return self.one_side.plan(queues, limits, costs);
        }
        let steady = self.long_run.estimate(queues, limits, costs, self.cohorts.fill());
        let mut draft = Draft::new(queues, limits);
        draft.evict();
        draft.swap_in();
        let [device, host] = [Side::Device, Side::Host].map(|side| draft.of(side, Phase::Decode).count());
        let pace = Pace::of(&steady, queues, [device, host]);
        let enough = pace.pending(device, host.max(steady.least));
        admit(&mut draft, &steady, enough, queues.waiting().len(), limits);
        let prompts = draft.prompts();
        let decode = SubBatchRows::decode(&draft, &prompts, limits);
        // In an overlap, a parked row yields a token only every so many iterations: count the tokens of one iteration.
        let share = 1.0 / f64::from(costs.token_iterations());
        let tokens = if steady.mode == Mode::Overlapped { share * host as f64 } else { 0.0 };
        let mut first = decode.clone();
        let rows = u64::from(limits.rows);
        let most = pace.rows(decode.load.rows, tokens).map_or(rows, |n| rows.min(decode.load.rows + n));
        first.prompts(&prompts, most as u32);
        let parked = self.cohorts.parked(draft.host.iter().map(|&(_, job)| job));
        let is_parked = parked.iter().any(|cohort| !cohort.is_empty());
        let hosts = longest_waiting(draft.of(Side::Host, Phase::Decode).collect());
        if hosts.is_empty() {
            self.mode = Mode::GpuOnly;
            return draft.decide(first.alone());
        }
        let pool: Vec<&RequestView> = hosts.iter().copied().filter(|job| job.at.is_none()).collect();
        let worth = steady.worth;
        let of = |mode, worth: f64, iteration: &_| {
            rate(worth, costs.iteration(iteration) * self.learned.ratio(mode))
        };
        // The three ways. Without rows of its own the device has nothing that an overlap could hide behind.
        let aged = pool.first().is_some_and(|job| job.waited >= AGE);
        let by_device = (!first.is_empty() && !aged)
            .then(|| of(Mode::GpuOnly, worth.of(&first.load), &first.clone().alone()));
        let stay = if draft.waits() { 0 } else { leaving(&draft, costs.token_iterations() - 1) };
        let beginners = &pool[..pool.len().saturating_sub(stay)];
        let can_overlap = !self.ends && limits.sub_batches > 1 && !first.is_empty() && !beginners.is_empty();
        let overlapped = (is_parked || can_overlap).then(|| {
            let resident = first.clone().alone();
            let window = (costs.iteration(&resident) - costs.host_part(&resident)).max(0.0);
            let step = self.cohorts.draft(&parked, beginners, window, limits, costs);
            let tokens = share * step.rows as f64;
            let worth = worth.of(&first.load) + worth.decode(tokens);
            let rate = of(Mode::Overlapped, worth, &step.iteration(&first));
            (step, rate)
        });
        // As if rows that are parked had their token: the question is whether to go on with them.
        let steps = Parts::new(decode, &prompts, &hosts, limits, costs).steps(&pace, &worth).into_iter();
        let steps = steps.map(|(iteration, worth)| (of(Mode::Pipelined, worth, &iteration), iteration));
        let (by_both, iteration) = steps.max_by(|a, b| a.0.total_cmp(&b.0)).expect("one at least");
        let rates = [by_device, Some(by_both), overlapped.as_ref().map(|(_, rate)| *rate)];
        let favoured = |way: Mode| rates[way as usize].map(|rate| rate * favour(way, self.mode, steady.mode));
        let ways = [Mode::GpuOnly, Mode::Pipelined, Mode::Overlapped].map(favoured);
        // It does not stay with the device alone: nothing is lost by leaving it.
        let last = if self.mode == Mode::GpuOnly { Mode::Pipelined } else { self.mode };
        let wanted = best(&ways, last);
        // Rows that are parked end their token; others begin one only if this is what is wanted.
        self.mode = if is_parked { Mode::Overlapped } else { wanted };
        match (self.mode, overlapped) {
            (Mode::Overlapped, Some((mut step, _))) => {
                if self.ends || wanted != Mode::Overlapped {
                    step = self.cohorts.draft(&parked, &[], 0.0, limits, costs);
                }
                draft.decide(self.cohorts.carry_out(step, first, costs))
            }
            (Mode::Pipelined, _) => draft.decide(iteration),
            _ => draft.decide(first.alone()),
        }
    }

    fn observe(&mut self, seen: &Observed) {
        self.learned.observe(self.mode, seen);
        self.cohorts.observe(seen);
    }
}
