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
//! | `strategy`, `decision` | what decides: the trait and the limits; and what it decides |
//! | `continuous` | continuous batching on one side, all memory promised |
//! | `draft` | memory of a step: eviction, swaps, admission |
//! | `rows` | rows of a sub-batch, and what they cost |
//! | `weigh` | what a step is worth; how many requests the host has time for |
//! | `pipeline` | which decode rows of the host go with which sub-batch |
//! | `overlap` | cohorts: which decode rows of the host advance by a layer |
//! | `hybrid` | the three ways to share an iteration, as APEX chooses among them |
//! | `mixed` | the best way of each step |
//! | `policy`, `rollout`, `compare` | strategies rolled out to the end of the present requests, and which of them finishes first |
//! | `copies` | copies of whole requests, before a step's rows or beside them |
//! | `steady` | the long run: how many requests the host is worth, and what rows are worth |
//! | `compose`, `split` | pipelined steps that no inequality holds back, and how they take least |
//! | `lengths` | how long answers turn out, learned from those that ended |
//! | `learn` | predictions corrected by what was measured |
//! | `model` | APEX's closed formulas, as corrected |
//! | `gpu_only`, `fastdecode`, `neo`, `apex` | a policy each |
//! | `choice` | the strategies: which of a few policies decides |
//!
//! | item | what |
//! |---|---|
//! | [`Strategy`], [`Limits`], [`Observed`], [`Decision`], [`by_name`], [`NAMES`] | the strategy interface, and its decisions |
//! | [`Continuous`], [`StepCopies`] | building blocks of strategies |
//! | [`Queues`], [`RequestView`], [`SlotMap`] | requests in the queues |
//! | [`Predict`], [`Untimed`] | the predictions that strategies use |
//! | [`Mode`], [`BalanceInputs`], [`apex_algorithm_1`], [`pipelining_pays_mixed`] | APEX's choice by closed formulas |
//!
//! A strategy is told nothing of tokens, samplers and devices. [`engine::Batcher`](crate::engine::Batcher) carries
//! its decisions out.

mod apex;
mod choice;
mod compare;
mod compose;
mod continuous;
mod copies;
mod decision;
mod draft;
mod fastdecode;
mod gpu_only;
mod hybrid;
mod learn;
mod lengths;
mod mixed;
mod model;
mod neo;
mod overlap;
mod pace;
mod pipeline;
mod policy;
mod predict;
mod queues;
mod rollout;
mod rows;
mod seconds;
mod slots;
mod split;
mod steady;
mod strategy;
mod targets;
mod turns;
mod view;
mod weigh;

pub use continuous::Continuous;
pub use copies::StepCopies;
pub use decision::Decision;
pub use model::{BalanceInputs, Mode, apex_algorithm_1, pipelining_pays_mixed};
pub use predict::{Predict, Untimed};
pub use queues::Queues;
pub use seconds::OptionalSeconds;
pub use slots::SlotMap;
pub use strategy::{Limits, Observed, Strategy};
pub use targets::{OwnTargets, Targets};
pub use view::RequestView;

use choice::Choice;
use fastdecode::FastDecode;
use policy::Policy;

/// Names of strategies for many requests, as on the command line.
pub const NAMES: [&str; 5] = ["gpu-only", "fastdecode", "neo", "apex", "auto"];

/// The strategy of that name: one of [`NAMES`], or `vllm`, the device alone as vLLM has it (decode rows first, and prompts in chunks
/// at full rate): what the papers compare with.
pub fn by_name(name: &str) -> Option<Box<dyn Strategy>> {
    Some(match name {
        "gpu-only" => Box::new(Choice::new("gpu-only", Policy::gpu_only)),
        "vllm" => Box::new(Choice::new("vllm", Policy::vllm)),
        "fastdecode" => Box::<FastDecode>::default(),
        "neo" => Box::new(Choice::new("neo", Policy::neo)),
        "apex" => Box::new(Choice::new("apex", Policy::apex)),
        "auto" => Box::new(Choice::new("auto", Policy::all)),
        _ => return None,
    })
}
