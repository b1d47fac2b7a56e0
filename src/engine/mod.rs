//! A loaded model and its forward pass.
//!
//! [`Engine`] holds the sequences in flight and a machine (`machine/`) that runs the program of each step: on the CPU
//! ([`Prepared`] is a model with its weights as the CPU's kernels read them, its sublayers are in `host`), on an
//! accelerator, whose weights are laid out in `weights`, or on both. One call of [`Engine::forward`] takes any mix of
//! rows: chunks of prompts, single tokens of many sequences; [`Batcher`] makes these rows from requests, and a
//! [`Service`] accepts requests from any thread. Data flows embedding → (norm → QKV → RoPE → append → attention → out →
//! norm → feed-forward) per layer → norm → head.
//!
//! | item | what |
//! |---|---|
//! | [`Engine`], [`Options`], [`Outcome`], [`CohortOutcome`], [`TokenSource`], [`NewTokens`], [`NOT_NUMBERS`] | a loaded model and its steps |
//! | [`Batcher`], [`Request`], [`Event`], [`Deliver`], [`Token`], [`Logprobs`], [`Finish`], [`StepReport`] | many requests, computed step by step |
//! | [`Service`], [`Client`], [`EventStream`], [`Flight`], [`Delivery`], [`Status`], [`Shutdown`], [`MOST_IN_FLIGHT`] | requests submitted from any thread |
//! | [`FarSteps`], [`SidePages`] | pages away from the device |
//! | [`RunInfo`] | where a model runs, for reports |
//! | [`Sizes`], [`Counted`], [`Memory`], [`Tiers`], [`LaneHandOver`], [`JobPause`], [`hand_overs`] | memory of a placement, and measured hand-over times of the lanes |
//! | [`Prepared`], [`Layer`], [`Host`], [`HostContext`], [`HostSeq`], [`HostStep`], [`HostWorkspace`], [`Residual`] | the CPU's sublayers |
//! | [`LayerLayout`], [`LayerSource`], [`LayerImage`], [`LayerStream`], [`Upload`] | weights in the layout of an accelerator |
//! | [`activation_type`], [`linear_shapes`], [`separate_gate_up`], [`embedding_bytes`], [`head_bytes`], [`table_bytes`] | matrices of a model on an accelerator, and their bytes |
//! | [`Timeline`] | spans of executed operations |

mod batcher;
mod cohorts;
mod divided;
mod forward;
mod homes;
mod host;
mod kv;
mod machine;
mod memory;
mod options;
mod outcome;
mod place;
mod prefix;
mod prepare;
mod residents;
mod sequences;
mod service;
mod step;
mod weights;

pub use crate::timeline::{self, Timeline};
pub use batcher::{
    Batcher, Deliver, Event, Finish, Likelihood, Logprobs, Request, StepReport, Token, best_of,
};
pub use forward::NewTokens;
pub use homes::SidePages;
pub use host::{Host, HostContext, HostSeq, HostStep, HostWorkspace, Residual};
pub use kv::FarSteps;
pub(crate) use machine::host_pages;
pub use machine::{Counted, JobPause, LaneHandOver, Sizes, Tiers, hand_overs};
pub use memory::Memory;
pub use options::Options;
pub use outcome::{CohortOutcome, Outcome, TokenSource};
pub use place::RunInfo;
pub use prepare::{Layer, Prepared};
pub use sequences::{Engine, NOT_NUMBERS};
pub use service::{Client, Delivery, EventStream, Flight, MOST_IN_FLIGHT, Service, Shutdown, Status};
pub use weights::{
    LayerImage, LayerLayout, LayerSource, LayerStream, Upload, activation_type, embedding_bytes, head_bytes,
    linear_shapes, separate_gate_up, table_bytes,
};
