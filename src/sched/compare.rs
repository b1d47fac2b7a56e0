//! Which policy finishes the present requests first: each is rolled out in turn, the current policy before the others.
//!
//! Another policy must beat the current one by [`MARGIN`]; its rollout stops as soon as it cannot. The work is done in
//! portions, so that no step of the real run waits long for the answer.

use super::learn::Learned;
use super::policy::Policy;
use super::predict::Predict;
use super::queues::Queues;
use super::rollout::Rollout;
use super::strategy::{Limits, Strategy};

/// The share of its time by which another policy must beat the current one.
const MARGIN: f64 = 0.01;

/// The fixed cost of a rollout's step, in requests: a step costs this and one for each request in it.
const STEP: i64 = 32;

/// Waiting requests that are rolled out; those behind them come in their turn.
const IN_SIGHT: usize = 512;

/// See the [module](self).
#[derive(Debug, Clone)]
pub(super) struct Comparison {
    /// The requests as they were when it began.
    queues: Queues,
    /// Policies that have not been tried, the next one last.
    left: Vec<Policy>,
    /// The policy that is being tried, and its rollout.
    trying: Option<(Policy, Rollout)>,
    /// Whether that is the current policy.
    is_current: bool,
    /// Seconds that the next policy must stay below.
    bound: f64,
    /// The best of the others so far.
    best: Option<Policy>,
}

impl Comparison {
    /// Of `current` with all others of these that can serve the requests.
    pub fn new(current: &Policy, among: Vec<Policy>, queues: &Queues, limits: &Limits) -> Comparison {
        let others = among.into_iter().filter(|p| p.name() != current.name() && p.serves(queues, limits));
        let seen = queues.in_sight(IN_SIGHT);
        Comparison {
            queues: seen.clone(),
            left: others.rev().collect(),
            trying: Some((current.clone(), Rollout::new(current.clone(), seen))),
            is_current: true,
            bound: f64::INFINITY,
            best: None,
        }
    }

    /// Continues while there is `work` left, counted in requests of rolled-out steps. Returns the answer once it is known:
    /// `Some(None)` if the current policy stays.
    pub fn advance(
        &mut self,
        work: &mut i64,
        limits: &Limits,
        costs: &dyn Predict,
        learned: &Learned,
    ) -> Option<Option<Policy>> {
        while let Some((policy, rollout)) = &mut self.trying {
            while rollout.requests() > 0 && rollout.seconds() < self.bound {
                if *work <= 0 {
                    return None;
                }
                *work -= rollout.requests() as i64 + STEP;
                rollout.step(limits, costs, learned);
            }
            let seconds = rollout.seconds();
            if self.is_current {
                self.bound = seconds * (1.0 - MARGIN);
            } else if seconds < self.bound {
                self.bound = seconds;
                self.best = Some(policy.clone());
            }
            self.is_current = false;
            self.trying = self.left.pop().map(|p| (p.clone(), Rollout::new(p, self.queues.clone())));
        }
        Some(self.best.take())
    }

    /// The best of those that have been tried, if it beats the current policy.
    pub fn best(self) -> Option<Policy> {
        self.best
    }
}

#[cfg(test)]
mod tests;
