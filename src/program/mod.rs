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
//! Everything here is pure: no device, no clock, no file. Predictions and execution are about one value, so they
//! cannot drift apart.

pub mod check;
mod iteration;
pub mod lower;
mod op;
pub mod order;
mod placement;
pub mod virtual_machine;

pub use check::check;
pub use check::parked::Parked;
pub use iteration::{Far, Flow, Group, Iteration, Kv, PageMove, RequestId, SubBatch, Wants};
pub use lower::lower;
pub use op::{Buffer, Cargo, Kind, Op, Part, Program, Region, RowsOf, Unit, Work};
pub use placement::{LayerPlacement, Phase, Placement, Policy, Residence, Side, Sublayer};
