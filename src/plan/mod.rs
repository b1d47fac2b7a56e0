//! Where should a model run? Prediction of time and memory, and the choice among placements.
//!
//! ```text
//! hardware ┐
//!          ├─ roofline ─► Costs ─► price ─┐
//! sizes    ┘        (tables answer too)    ├─► choose ─► candidates, each with its Placement
//!          └─ memory ──────────────────────┘      partition (HELM), sublayer (LIA) search
//! ```
//! `predictor` answers what [`sched`](crate::sched) weighs, whole iterations from programs of a few layers.
//!
//! Everything here is pure: no device, no clock, no file. `cost` is the question that planners and the virtual
//! machine ask. `docs/plan.md` has the formulas and how to read the output.

pub mod choose;
mod cost;
mod crossings;
pub mod memory;
mod operation;
pub mod partition;
mod predictor;
pub mod price;
pub mod programs;
mod roofline;
pub mod sizes;
pub mod step_times;
pub mod sublayer;

pub use crate::hardware::{self, Hardware};
pub use cost::{Batch, Costs, Direction, Group, Scan};
pub use operation::OpCosts;
pub use predictor::{Predictor, Seconds};
pub use roofline::Roofline;
pub use sizes::Sizes;
pub use step_times::StepTimes;
