//! APEX: asymmetric pipelining where it pays, asynchronous overlap where it does not (APEX §3, Algorithm 1).
//!
//! ```text
//! no request on the host                        the device alone
//! N_G/N_C < 2·l/g + 3 + g/l  (decode only)      pipelined:    gpu | linear 0 | linear 1 | attend 0 |   host | attend 1 | attend 0 |
//! the mixed inequality       (with prompts)     pipelined
//! else                                          overlapped:   gpu | all layers, a cohort's rows join at one |
//!                                                             host | attention of one layer of the cohort    |
//! ```
//!
//! The inequalities are those of [`model`](super::model), with l, g, N_G and N_C of the requests at hand. They hold for products that
//! do not grow with the rows and a host whose window is always full; so the three steps are priced as well, and where one is
//! predicted to do more work by [`CLEARLY`] than what the inequality says, it is made.
//!
//! Departures from print: the mixed inequality has the prompts in both cycles; the device alone keeps its prompts; rows that are
//! parked end their token before another way is gone (print prefers them in the host's sub-batch, which costs a copy of their
//! state for the layers that are left); a cohort is sized from the tables, not by 8 requests of the host to one of the device.

use super::decision::Decision;
use super::hybrid::{Hybrid, ModeRates, best};
use super::model::{BalanceInputs, Mode, apex_algorithm_1};
use super::pace::PromptPace;
use super::predict::Predict;
use super::queues::Queues;
use super::strategy::{Limits, Observed, Strategy};

/// What a prediction must be ahead of the inequality's choice by.
const CLEARLY: f64 = 1.05;

/// See the [module](self).
#[derive(Debug, Clone, Default)]
pub(super) struct Apex {
    hybrid: Hybrid,
}

impl Apex {
    /// With prompts at full rate or paced.
    pub fn new(prompts: PromptPace) -> Apex {
        Apex { hybrid: Hybrid::new(prompts) }
    }
}

/// Algorithm 1, and predictions where they say clearly otherwise.
fn rule(seen: &BalanceInputs, rates: &ModeRates, last: Mode) -> Mode {
    let said = apex_algorithm_1(seen);
    let predicted = best(rates, last);
    let of = |mode: Mode| rates[mode as usize].unwrap_or(0.0);
    if of(predicted) > CLEARLY * of(said) { predicted } else { said }
}

impl Strategy for Apex {
    fn name(&self) -> &'static str {
        match self.hybrid.prompts() {
            PromptPace::Paced => "apex, paced",
            PromptPace::Full => "apex",
        }
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        self.hybrid.plan(queues, limits, costs, rule)
    }

    fn observe(&mut self, seen: &Observed) {
        self.hybrid.observe(seen);
    }
}
