//! What is to be done, as plain data: `placement` and iteration, lowered to a program that any
//! machine can run.
//!
//! ```text
//! Placement   where weights and sublayers live; made once by plan/      ┐            ┌─► RealMachine     lanes of the device, a lane of the host
//!                                                                       ├ lower() ─► Program
//! Iteration   which rows now, in which sub-batches, which pages move;   ┘            └─► VirtualMachine  a clock over a cost table
//!             made at every step by sched/
//! ```
//!
//! | item | what |
//! |---|---|
//! | [`Placement`], [`LayerPlacement`], [`Residence`], [`Staging`], [`Policy`], [`Sublayer`], [`Side`], [`Phase`] | where a model's layers are stored and computed |
//! | [`Iteration`], [`SubBatch`], [`Group`], [`Kv`], [`Far`], [`Flow`], [`MoveRequest`], [`RequestId`], [`Wants`] | the rows and page moves of a step |
//! | [`lower()`], [`Program`], [`Op`], [`Kind`], [`Work`], [`Unit`], [`PerUnit`], [`Part`], [`Cargo`], [`RowsOf`], [`Buffer`], [`Region`] | the program of a step |
//! | [`check()`], [`ParkedRows`] | verifies that a program computes its iteration |
//! | [`waits`] | derives which operation waits for which |
//! | [`virtual_machine`] | runs a program on a clock, without computing |
//!
//! Everything here is pure: no device, no clock, no file. Predictions and execution are about one value, so they
//! cannot drift apart.

mod check;
mod iteration;
mod lower;
mod op;
mod order;
mod placement;
mod unit;
pub mod virtual_machine;

/// The device's clock knows both: they are below programs.
pub use crate::device::{CopySpans, Launches};
pub use check::{ParkedRows, check};
pub use iteration::{Far, Flow, Group, Iteration, Kv, MoveRequest, RequestId, SubBatch, Wants};
pub use lower::lower;
pub(crate) use lower::{cohort_pieces, copy_lanes_pay};
pub use op::{Buffer, Cargo, Kind, Op, Part, Program, Region, RowsOf, Work};
pub use order::waits;
pub use placement::{
    COPY_LANE_ROWS, EXPERTS_UNDER_WAY, LayerPlacement, Phase, Placement, Policy, Residence, Side, Staging,
    Sublayer,
};
pub use unit::{PerUnit, Unit};
