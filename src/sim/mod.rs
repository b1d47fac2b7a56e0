//! Many requests on a machine that is not there: the schedulers of [`sched`](crate::sched) over programs on the virtual
//! machine.
//!
//! ```text
//! Workload ─► waiting ─► Strategy::plan ─► Decision ─► Clock::run ─► seconds, busy units, who is parked ─┐
//!                ▲            (the engine's own)          lower() and the virtual machine                  │
//!                └──────────────── Queues::commit, tokens, ends ◄────────────────────────────────────────┘
//! ```
//!
//! | a file | what |
//! |---|---|
//! | `capacity` | pages on each side of a machine that holds a model's weights |
//! | `clock` | how long an iteration takes, which cohorts advance, what the host has left to do |
//! | `cohorts` | what a cohort adds to an iteration |
//! | `run` | the loop |
//! | `report` | throughput, latencies, busy fractions |
//! | `window` | a few steps, operation by operation |
//!
//! Seconds come from [`plan::Predictor`](crate::plan::Predictor), as those that the strategies weigh.
//! `docs/simulate.md` says what is modelled and what is not.

mod capacity;
mod clock;
mod cohorts;
mod report;
mod run;
mod window;

pub use capacity::{PageCapacity, Room};
pub use clock::{Lap, SimClock};
pub use report::{Latencies, LinkBytes, Quantiles, Report, RequestCounts, RunSums, Trip, report};
pub use run::{Options, simulate, timeline};

#[cfg(test)]
mod tests;
