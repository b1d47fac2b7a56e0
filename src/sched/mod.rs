//! Who is computed when: requests in queues, and what each step has of them. Pure: no device, no clock, no file.
//!
//! ```text
//! submit ─► waiting ── admitted: a slot, and pages for all it may grow to ──► running ─► ended
//!                                                                               │
//!                Strategy::plan ─► Decision { admit, swaps, iteration } ◄──────────────┘   once per step
//! ```
//!
//! | a file | what |
//! |---|---|
//! | `slots` | ids with generations |
//! | `queues` | the two queues, and what is known of a request in them |
//! | `predict` | seconds that strategies weigh |
//! | `strategy` | what decides: the trait, the limits, the decision |
//! | `continuous` | continuous batching: the one strategy so far |
//!
//! A strategy is told nothing of tokens, samplers and devices. [`engine::Requests`](crate::engine::Requests) carries
//! its decisions out.

mod continuous;
mod predict;
mod queues;
mod slots;
mod strategy;

pub use continuous::Continuous;
pub use predict::{Predict, Untimed};
pub use queues::{Job, Queues};
pub use slots::Slots;
pub use strategy::{Decision, Limits, Observed, Strategy};
