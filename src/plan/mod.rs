//! Where should a model run? Prediction of time and memory, and the choice among placements.
//!
//! Everything here is pure: no device, no clock, no file. [`cost`] is the question that planners and the virtual
//! machine ask.

pub mod cost;

pub use cost::{Batch, Costs, Direction, Group};
