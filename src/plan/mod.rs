//! Where should a model run? Prediction of time and memory, and the choice among placements.
//!
//! ```text
//! hardware ┐
//!          ├─ roofline ─► Costs ─► price ─┐
//! sizes    ┘        (tables answer too)    ├─► choose ─► candidates, each with its Placement
//!          └─ memory ──────────────────────┘      partition (HELM), sublayer (LIA) search
//! ```
//!
//! | offered | what |
//! |---|---|
//! | [`plan_with`], [`Plan`], [`Candidate`], [`Request`], [`Strategy`], [`countable`], [`boundary_curve`] | the candidates of each strategy, and the one chosen |
//! | [`Sizes`], [`ELEMENT`], [`attention_elements`], [`ffn_elements`], [`norm_elements`] | what a model's units weigh |
//! | [`memory()`], [`Load`], [`Available`], [`page_bytes`] | what a placement takes of either memory |
//! | [`Costs`], [`Batch`], [`Group`], [`Scan`], [`Direction`] | the question that planners and the virtual machine ask |
//! | [`Hardware`], [`Roofline`], [`Uncached`], [`CostSource`] | who answers it from a machine's numbers; measured tables do, too |
//! | [`price()`], [`Workload`], [`Times`], [`Spilled`] | seconds of a run in closed form |
//! | [`programs()`], [`programs_with`], [`PredictedRun`], [`far_forecast`], [`FarForecast`] | the same of its programs, on the virtual machine |
//! | [`OpCosts`], [`StepTimes`] | seconds of one operation, and of one step |
//! | [`Predictor`], [`Seconds`] | what [`sched`](crate::sched) weighs, whole iterations from programs of a few layers |
//! | [`Prefix`], [`Stages`], [`search_boundary`], [`greedy_boundary`], [`weights_fit`] | the boundary between CPU and GPU (HELM) |
//! | [`best_policies`], [`batch_policies`], [`Resident`], [`incoming_bytes`], [`streaming_threshold`] | which sublayers run where (LIA) |
//!
//! Everything here is pure: no device, no clock, no file. `docs/plan.md` has the formulas and how to read the output.

mod choose;
mod cost;
mod crossings;
mod memory;
mod operation;
mod partition;
mod predictor;
mod price;
mod programs;
mod roofline;
mod sizes;
mod step_times;
mod sublayer;

pub use crate::hardware::{self, Hardware};
pub use choose::{Candidate, Plan, Request, Strategy, boundary_curve, countable, plan_with};
pub use cost::{Batch, Costs, Direction, Group, Scan};
pub use memory::{Available, GpuMemory, HostMemory, Load, Memory, memory, page_bytes};
pub use operation::OpCosts;
pub use partition::{Prefix, Stages, greedy_boundary, search_boundary, weights_fit};
pub use predictor::{Predictor, Seconds};
pub use price::{Spilled, Stage, Times, Workload, price};
pub use programs::{Busy, FarForecast, OperationTime, PredictedRun, far_forecast, programs, programs_with};
pub use roofline::Roofline;
pub use sizes::{Block, ELEMENT, Sizes, TwoSided, attention_elements, ffn_elements, norm_elements};
pub use step_times::{CostSource, StepTimes, Uncached};
pub use sublayer::{Priced, Resident, batch_policies, best_policies, incoming_bytes, streaming_threshold};
