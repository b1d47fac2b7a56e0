//! Where should a model run? Prediction of time and memory, and the choice among placements.
//!
//! ```text
//! hardware ┐
//!          ├─ roofline ─► Costs ─► price ─┐
//! sizes    ┘        (tables answer too)    ├─► choose ─► candidates, each with its Placement
//!          └─ memory ──────────────────────┘      search: choose/helm (HELM), sublayer (LIA)
//! ```
//!
//! | item | what |
//! |---|---|
//! | [`plan_with`], [`plan_within`], [`Plan`], [`Candidate`], [`PlanRequest`], [`Fixed`], [`Strategy`], [`countable`], [`boundary_curve`] | compares the candidates of all strategies and chooses one |
//! | [`Sizes`], [`ELEMENT`], [`attention_elements`], [`ffn_elements`], [`norm_elements`], [`ffn_of_row`], [`RowWork`] | bytes and elements of a model's units |
//! | [`Bytes`], [`Outline`], [`memory()`], [`Load`], [`Available`], [`NodesRoom`], [`page_bytes`], [`FAR_WAYS`] | memory that a placement needs on each side, and on memory nodes |
//! | [`Costs`], [`Batch`], [`Group`], [`Scan`], [`Direction`] | the cost interface of planners and of the virtual machine |
//! | [`Hardware`], [`Roofline`], [`Uncached`], [`CostSource`] | costs computed from a machine's description; measured tables implement the same interface |
//! | [`price()`], [`Workload`], [`Times`], [`Spilled`] | seconds of a run in closed form |
//! | [`programs()`], [`programs_with`], [`PredictedRun`], [`far_forecast`], [`FarForecast`] | seconds of a run from its programs, on the virtual machine |
//! | [`OpCosts`], [`StepTimes`] | seconds of one operation and of one step |
//! | [`Predictor`], [`Seconds`] | seconds of whole iterations for [`sched`](crate::sched), from programs of a few layers |
//! | [`Prefix`] | sums over ranges of units |
//! | [`best_policies`], [`batch_policies`], [`Resident`], [`incoming_bytes`], [`streaming_threshold`] | which sublayers run on which side (LIA) |
//!
//! Everything here is pure: no device, no clock, no file. `docs/plan.md` has the formulas and how to read the output.

mod bytes;
mod choose;
mod cost;
mod crossings;
mod experts;
mod memory;
mod operation;
mod outline;
mod predictor;
mod prefix;
mod price;
mod programs;
mod roofline;
mod search;
mod sizes;
mod step_times;
mod sublayer;

pub use crate::hardware::{self, Hardware};
pub use bytes::{Bytes, FAR_WAYS};
pub use choose::{
    Candidate, FEW_REQUESTS, Fixed, Plan, PlanRequest, Strategy, boundary_curve, countable,
    experts_for_requests, experts_on_host, plan_with, plan_within,
};
pub use cost::{Batch, Costs, Direction, Group, Scan};
pub use experts::{ExpertCounts, exchange_pays};
pub use memory::{Available, GpuMemory, HostMemory, Load, Memory, NodeMemory, NodesRoom, memory, page_bytes};
pub use operation::OpCosts;
pub use outline::Outline;
pub(crate) use predictor::products_of_host;
pub use predictor::{Predictor, Seconds};
pub use prefix::Prefix;
pub(crate) use price::experts_of_side;
pub use price::{Spilled, Times, UnitRun, Workload, price};
pub use programs::{
    BusyShares, FarForecast, OperationTime, PredictedRun, far_forecast, programs, programs_with,
};
pub use roofline::Roofline;
pub(crate) use search::most;
pub use sizes::{
    Block, ELEMENT, RowWork, Sizes, TwoSided, attention_elements, ffn_elements, ffn_of_row, norm_elements,
};
pub use step_times::{CostSource, StepTimes, Uncached};
pub use sublayer::{Priced, Resident, batch_policies, best_policies, incoming_bytes, streaming_threshold};
