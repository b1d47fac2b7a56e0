//! Opening a model: from a name and settings to an engine that is ready to run.
//!
//! ```text
//! name ─► Model::open (find, fetch, map) ─► Model::engine (choose a placement, load) ─► Running: one request at a time
//!                                       └─► Model::scheduled ──────────────────────────► Scheduled: many, by schedulers
//! ```
//!
//! Everything that the command line can do with a model is here without a command line. What long work tells goes to a
//! [`Progress`](crate::progress::Progress). Errors and notes name settings as [`Settings`] does, in backticks, like
//! `` `gpu_memory` ``.
//!
//! | item | what |
//! |---|---|
//! | [`Model`], [`pull`], [`decimal`] | a model that has been read, with its tokenizer and template |
//! | [`Settings`], [`Device`], [`Strategy`], [`Requests`] | how it is to run |
//! | [`Demand`], [`RunWork`], [`Running`] | what an engine is for, and the engine |
//! | [`Needs`], [`Scheduled`] | an engine for many requests |
//! | [`PlacementDecision`], [`Prediction`], [`Considered`] | where it runs, and why |
//! | [`RouterLearning`] | what routers choose meanwhile, kept for the next runs |
//! | [`planned`] | how a model would run on a machine that is described |
//! | [`hardware`], [`profiled`], [`measure_machine`] | figures of the machine that times are predicted for |

mod basis;
mod by_chunk;
mod check;
mod decision;
mod details;
mod dry;
mod figures;
mod learn;
mod model;
mod place;
mod predict;
mod scheduled;
mod settings;
mod source;

pub use check::Requests;
pub use decision::PlacementDecision;
pub use dry::planned;
pub use figures::{hardware, measure_machine, profiled};
pub use learn::RouterLearning;
pub use model::Model;
pub use place::{Demand, Running};
pub use predict::{Considered, Prediction, RunWork};
pub use scheduled::{Needs, Scheduled};
pub use settings::{Device, Settings, Strategy};
pub use source::{decimal, pull};
