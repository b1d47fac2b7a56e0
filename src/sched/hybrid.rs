//! Three possible steps (the device alone, asymmetric pipelining, asynchronous overlap) and the choice among them.
//! What APEX chooses among, by Algorithm 1.
//!
//! ```text
//! memory   evict, swap in, admit: the device first, then the host up to one window of attention
//! steps    device alone | pipelined | overlapped, each with its predicted seconds and worth
//! choice   by a rule; parked rows end their token first
//! ```

use crate::program::{Phase, Side};

use super::continuous::Continuous;
use super::decision::Decision;
use super::draft::Draft;
use super::learn::Learned;
use super::model::{BalanceInputs, Mode};
use super::neo::decode_step;
use super::overlap::Cohorts;
use super::pace::{Pacer, PromptPace, most_rows};
use super::pipeline::{AGE, Pipelined};
use super::predict::Predict;
use super::queues::Queues;
use super::rows::{RowLoad, SubBatchRows, longest_waiting};
use super::strategy::{Limits, Observed, Strategy};
use super::view::RequestView;
use super::weigh::{HostPool, Worth, rate};

/// Factor by which another way must beat the last one: leaving an overlap first costs the steps that finish its tokens.
const MARGIN: f64 = 1.02;

/// The rates of the three ways, by [`Mode`]; `None` if a way is impossible in this step.
pub(super) type ModeRates = [Option<f64>; 3];

/// See the [module](self).
#[derive(Debug, Clone)]
pub(super) struct Hybrid {
    one_side: Continuous,
    cohorts: Cohorts,
    learned: Learned,
    pacer: Pacer,
    /// How the last step was shared.
    mode: Mode,
}

impl Default for Hybrid {
    fn default() -> Self {
        Hybrid {
            one_side: Continuous::default(),
            cohorts: Cohorts::default(),
            learned: Learned::default(),
            pacer: Pacer::default(),
            mode: Mode::GpuOnly,
        }
    }
}

/// The best way, unless the last one is nearly as good.
pub(super) fn best(rates: &ModeRates, last: Mode) -> Mode {
    let mut best = last;
    let mut most = rates[last as usize].map_or(f64::NEG_INFINITY, |rate| rate * MARGIN);
    for mode in [Mode::GpuOnly, Mode::Pipelined, Mode::Overlapped] {
        if let Some(rate) = rates[mode as usize].filter(|&rate| rate > most) {
            (best, most) = (mode, rate);
        }
    }
    best
}

impl Hybrid {
    /// With prompts at full rate or paced.
    pub fn new(prompts: PromptPace) -> Hybrid {
        Hybrid { pacer: Pacer::new(prompts), ..Hybrid::default() }
    }

    /// Whether prompts are paced.
    pub fn prompts(&self) -> PromptPace {
        self.pacer.prompts()
    }

    /// The next step; `rule` chooses among the ways.
    pub fn plan(
        &mut self,
        queues: &Queues,
        limits: &Limits,
        costs: &dyn Predict,
        rule: impl Fn(&BalanceInputs, &ModeRates, Mode) -> Mode,
    ) -> Decision {
        if limits.one_sided() {
            return self.one_side.plan(queues, limits, costs);
        }
        let mut draft = Draft::new(queues, limits);
        draft.evict();
        draft.swap_in();
        let (l, g) = decode_step(&draft, costs);
        // In an overlap the host has a whole iteration for one layer.
        let overlaps = limits.sub_batches > 1;
        let window = if overlaps { (l + g) * f64::from(costs.layers()) * self.cohorts.fill() } else { l + g };
        let mut takes = HostPool::of(&draft, window, limits.rows, costs);
        draft.admit(true, |job| takes.takes(job));
        let prompts = draft.prompts();
        let pace = self.pacer.pace(&draft, queues, limits, costs, self.cohorts.fill());
        let mut first = SubBatchRows::decode(&draft, &prompts, limits);
        // In an overlap, a parked row yields a token only every so many iterations: count the tokens of one iteration.
        let on_host = draft.of(Side::Host, Phase::Decode).count() as f64;
        let share = if self.mode == Mode::Overlapped { f64::from(costs.token_iterations()) } else { 1.0 };
        first.prompts(&prompts, most_rows(pace, first.load.rows, on_host / share, limits));
        let parked = self.cohorts.parked(draft.host.iter().map(|&(_, job)| job));
        let is_parked = parked.iter().any(|cohort| !cohort.is_empty());
        let waits = draft.of(Side::Host, Phase::Decode).filter(|job| job.at.is_none());
        let pool = longest_waiting(waits.collect());
        if pool.is_empty() && !is_parked {
            self.mode = Mode::GpuOnly;
            return draft.decide(first.alone());
        }
        let worth = Worth::beside(&first.load, limits, costs);
        let of = |mode, worth: f64, iteration: &_| {
            rate(worth, costs.iteration(iteration) * self.learned.ratio(mode))
        };
        // The three ways. Without rows of its own the device has nothing that an overlap could hide behind.
        let alone = first.on_device();
        let aged = pool.first().is_some_and(|job| job.waited >= AGE);
        let by_device = (!alone.is_empty() && !aged && !is_parked)
            .then(|| of(Mode::GpuOnly, worth.of(&alone.load), &alone.clone().alone()));
        let stay = if draft.waits() { 0 } else { leaving(&draft, costs.token_iterations() - 1) };
        let beginners = &pool[..pool.len().saturating_sub(stay)];
        let overlapped =
            (overlaps && (is_parked || (!first.is_empty() && !beginners.is_empty()))).then(|| {
                let resident = first.clone().alone();
                let window = (costs.iteration(&resident) - costs.host_part(&resident)).max(0.0);
                let step = self.cohorts.draft(&parked, beginners, window, limits, costs);
                let tokens = step.rows as f64 / f64::from(costs.token_iterations());
                let rate = of(
                    Mode::Overlapped,
                    worth.of(&first.load) + worth.decode(tokens),
                    &step.iteration(&first),
                );
                (step, rate)
            });
        let pipelined = (!pool.is_empty()).then(|| {
            // Prompts stay: what the host has time for was decided when they were admitted.
            let both = Pipelined::new(first.clone(), &pool, |_| true, limits, costs);
            let worths: f64 = both.batches.iter().map(|rows| worth.of(&rows.load)).sum();
            let iteration = both.iteration();
            let rate = of(Mode::Pipelined, worths, &iteration);
            (iteration, rate)
        });
        let rates = [by_device, pipelined.as_ref().map(|p| p.1), overlapped.as_ref().map(|o| o.1)];
        let wanted = rule(&seen(&first, &pool, (l, g), costs), &rates, self.mode);
        let mode = match wanted {
            // Parked rows end their token; others begin one only if this is what is wanted.
            _ if is_parked => Mode::Overlapped,
            mode if rates[mode as usize].is_some() => mode,
            _ => best(&rates, wanted),
        };
        self.mode = mode;
        match (mode, overlapped, pipelined) {
            (Mode::Overlapped, Some((mut step, _)), _) => {
                if wanted != Mode::Overlapped {
                    step = self.cohorts.draft(&parked, &[], 0.0, limits, costs);
                }
                draft.decide(self.cohorts.carry_out(step, first, costs))
            }
            (Mode::Pipelined, _, Some((iteration, _))) => draft.decide(iteration),
            _ => draft.decide(alone.alone()),
        }
    }

    /// What the last step took.
    pub fn observe(&mut self, seen: &Observed) {
        self.learned.observe(self.mode, seen);
        self.cohorts.observe(seen);
    }
}

/// Requests of the device that may end before a cohort that begins now has its token. As many of the host's stay out of it, to
/// take their place at once: rows that are parked cannot.
pub(super) fn leaving(draft: &Draft<'_>, layers: u32) -> usize {
    draft
        .of(Side::Device, Phase::Decode)
        .filter(|job| job.likely.saturating_sub(job.stored) <= layers + 1)
        .count()
}

/// The inputs of Algorithm 1: the rates at which each side attends its tokens.
fn seen(
    first: &SubBatchRows,
    pool: &[&RequestView],
    (l, g): (f64, f64),
    costs: &dyn Predict,
) -> BalanceInputs {
    let host = pool.iter().fold(RowLoad::default(), |load, job| load.with(&job.group(1, Side::Host)));
    let per_second = |tokens: u64, seconds: f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    BalanceInputs {
        prompts: first.load.prompt.0 > 0,
        host_requests: pool.len(),
        n_g: per_second(first.load.device.1, g),
        n_c: per_second(host.host.1, host.host_attention(costs)),
        l,
        g,
        lp: first.load.linear(costs),
        gp: first.load.device_attention(costs),
    }
}
