//! What the strategies of the command line are: a few policies, of which the one that is predicted to finish the present requests first
//! decides.
//!
//! ```text
//! gpu-only     the device alone, prompts paced or at full rate
//! fastdecode   nothing else
//! neo, apex    the paper's, and what gpu-only has
//! auto         all of these, and mixed
//!
//! a run begins     every policy is rolled out to the end, before the first step            (compare, rollout)
//! while it runs    compared again, a few rolled-out steps beside each real one; what wins must win once more
//! each step        decided by the winner
//! ```
//! No rule about a single step foresees how a run ends: whether decode rows are left when the prompts run out, whether a cohort
//! of a few rows ends late, what pages cost that move to and fro. A rollout contains all of it: the same policies over
//! the same costs (decision 0024). What was measured corrects the costs ([`Learned`]).
//!
//! A comparison beside steps may take a third of a run. Then its winner and the policy that decides are compared once more, from the requests of
//! the moment: a switch that would have paid when the comparison began may cost more than it gains when it ends. Two rollouts take a fraction
//! of the time that all take.
//!
//! So no hybrid is slower than the device alone, up to the margin of a comparison and the error of predictions: where the host or the link
//! is slow, NEO and APEX leave it alone. And what they gain is over prompts that are paced as well as theirs (decision 0031).
//!
//! While the device has room for all requests there is nothing to compare, and the first policy decides; unless there are targets of
//! latency ([`Targets`](super::Targets)), of all requests or of one, which rollouts count late requests by.

use super::compare::Comparison;
use super::decision::Decision;
use super::learn::Learned;
use super::model::Mode;
use super::policy::Policy;
use super::predict::Predict;
use super::queues::Queues;
use super::rollout::mode;
use super::strategy::{Limits, Observed, Strategy};
use super::view::RequestView;
use crate::program::Side;

/// Work for a comparison before the first step of a run, counted in requests of rolled-out steps: some 0.2 s; for long runs more, a
/// fiftieth of their time.
const AT_FIRST: i64 = 2_000_000;

/// The same at each later step: some 50 µs.
const EACH_STEP: i64 = 400;

/// Steps that take longer than this many seconds are followed by as much more work: a thousandth of the time. Few long steps, of long prompts,
/// would otherwise be over before a comparison is.
const LONG_STEP: f64 = 0.05;

/// Most work at a step, some 1 ms.
const MOST_WORK: i64 = 8000;

/// Steps after which policies are compared again; sooner if the number of requests has changed by a quarter.
const COMPARES_AFTER: u32 = 64;

/// Per cent of the device's pages that requests may grow to before the host may be needed.
const FITS: usize = 95;

/// See the [module](self).
#[derive(Debug, Clone)]
pub(super) struct Choice {
    name: &'static str,
    /// What is chosen among, the first until something is known.
    among: fn() -> Vec<Policy>,
    policy: Policy,
    comparison: Option<Comparison>,
    /// Steps since the last comparison began.
    age: u32,
    /// Requests when it began.
    requests: usize,
    learned: Learned,
    /// How the last step was shared.
    mode: Mode,
    /// Work that the last step has done beyond its share; at most 0.
    work: i64,
    /// Seconds that it took.
    took: f64,
}

/// Whether all requests are on the device or wait, and the device has room for them at their longest.
fn fits(queues: &Queues, limits: &Limits) -> bool {
    let pages: usize = queues.running().iter().chain(queues.waiting()).map(RequestView::pages).sum();
    100 * pages <= FITS * limits.device_pages
        && queues.running().iter().all(|job| job.home == Some(Side::Device))
}

impl Choice {
    /// A strategy of this name, among these policies. The first must serve all requests that it is given.
    pub fn new(name: &'static str, among: fn() -> Vec<Policy>) -> Choice {
        Choice {
            name,
            among,
            policy: among().remove(0),
            comparison: None,
            age: 0,
            requests: 0,
            learned: Learned::default(),
            mode: Mode::GpuOnly,
            work: 0,
            took: 0.0,
        }
    }

    /// The policy of a new run, and of a moment that no other can serve.
    fn first(&self) -> Policy {
        (self.among)().remove(0)
    }

    /// Compares policies where that is due, and takes the better one.
    fn choose(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) {
        let n = queues.running().len() + queues.waiting().len();
        let begins = queues.running().is_empty();
        if begins {
            (self.policy, self.comparison, self.work) = (self.first(), None, 0);
        }
        self.age += 1;
        let changed = 4 * n.abs_diff(self.requests) > self.requests;
        let due = match self.comparison {
            // An answer about other requests than these is worth nothing.
            Some(_) => 2 * n.abs_diff(self.requests) > self.requests,
            None => begins || changed || self.age >= COMPARES_AFTER,
        };
        if due {
            let settled = self.policy.is_like(&self.first()) && fits(queues, limits) && !queues.has_targets();
            self.comparison = (!settled).then(|| {
                let all = Comparison::new(&self.policy, (self.among)(), queues, limits, costs);
                if begins { all.within(AT_FIRST) } else { all }
            });
            (self.age, self.requests) = (0, n);
        }
        if let Some(comparison) = &mut self.comparison {
            self.work += ((self.took / LONG_STEP).max(1.0) * EACH_STEP as f64).min(MOST_WORK as f64) as i64;
            // The one before the first step ends within what it was given: a request that is admitted now limits what may be chosen later.
            let mut all = i64::MAX;
            let work = if begins { &mut all } else { &mut self.work };
            if let Some(better) = comparison.advance(work, limits, costs, &self.learned) {
                // An answer found beside steps is about the requests of many steps ago; others that come make it old in any case.
                let is_old = !begins && !comparison.is_second() && !queues.is_online();
                self.comparison = None;
                match better {
                    Some(winner) if is_old => {
                        let second = Comparison::second(&self.policy, winner, queues, limits, costs);
                        (self.comparison, self.requests) = (Some(second), n);
                    }
                    Some(winner) => self.policy = winner,
                    None => {}
                }
            }
        }
        self.work = self.work.min(0);
        // Requests may have come that the winner has no place for.
        if !self.policy.serves(queues, limits) {
            self.policy = self.first();
        }
    }
}

impl Strategy for Choice {
    fn name(&self) -> &'static str {
        self.name
    }

    fn most_pages(&self, limits: &Limits) -> usize {
        (self.among)().iter().map(|policy| policy.most_pages(limits)).max().unwrap_or(0)
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        if !limits.one_sided() {
            self.choose(queues, limits, costs);
        }
        let decision = self.policy.plan(queues, limits, costs);
        self.mode = mode(&decision.iteration);
        decision
    }

    fn observe(&mut self, seen: &Observed) {
        self.took = seen.seconds;
        self.learned.observe(self.mode, seen);
        self.policy.observe(seen);
    }
}
