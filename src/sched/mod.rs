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
//! | `continuous` | continuous batching on one side, all memory promised |
//! | `draft` | memory of a step: eviction, swaps, admission |
//! | `rows` | rows of a sub-batch, and what they cost |
//! | `weigh` | what a step is worth; how many requests the host has time for |
//! | `pipeline` | which decode rows of the host go with which sub-batch |
//! | `model` | the papers' closed formulas, as corrected |
//! | `gpu_only`, `fastdecode`, `neo` | a strategy each |
//!
//! A strategy is told nothing of tokens, samplers and devices. [`engine::Requests`](crate::engine::Requests) carries
//! its decisions out.

mod continuous;
mod draft;
mod fastdecode;
mod gpu_only;
pub mod model;
mod neo;
mod pipeline;
mod predict;
mod queues;
mod rows;
mod slots;
mod strategy;
mod weigh;

pub use continuous::Continuous;
pub use fastdecode::FastDecode;
pub use gpu_only::GpuOnly;
pub use neo::Neo;
pub use predict::{Predict, Untimed};
pub use queues::{Job, Queues};
pub use slots::Slots;
pub use strategy::{Decision, Limits, Observed, Strategy};

/// Names of strategies for many requests, as on the command line.
pub const NAMES: [&str; 3] = ["gpu-only", "fastdecode", "neo"];

/// The strategy of that name: one of [`NAMES`].
pub fn by_name(name: &str) -> Option<Box<dyn Strategy>> {
    Some(match name {
        "gpu-only" => Box::<GpuOnly>::default(),
        "fastdecode" => Box::<FastDecode>::default(),
        "neo" => Box::<Neo>::default(),
        _ => return None,
    })
}
