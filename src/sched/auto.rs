//! `auto`: whichever way is predicted to do most work, at each step.
//!
//! ```text
//! rate(way) = worth of its rows / (predicted seconds · what was learned about such predictions)
//! step      = the best of: the device alone, pipelined (NEO, and FastDecode where the device has few rows), overlapped (APEX)
//! ```
//! It stays with the last way while no other is ahead by 2% ([`hybrid`](super::hybrid)): rows that are parked have to end their token
//! before a change.
//!
//! No paper has prompts in both sub-batches of a pipelined step: where many wait and the host has time to spare, the
//! second one's products would be paid for a few decode rows. Here they take prompts as well, as FastDecode's halves do.

use super::hybrid::{Hybrid, best};
use super::predict::Predict;
use super::queues::Queues;
use super::strategy::{Decision, Limits, Observed, Strategy};

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct Auto {
    hybrid: Hybrid,
}

impl Default for Auto {
    fn default() -> Self {
        Auto { hybrid: Hybrid::spreading() }
    }
}

impl Strategy for Auto {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        self.hybrid.plan(queues, limits, costs, |_, rates, last| best(rates, last))
    }

    fn observe(&mut self, seen: &Observed) {
        self.hybrid.observe(seen);
    }
}
