//! The host's cores, its pages, and the thread pool over them: the ground floor, which kernels, caches and devices stand on.

pub mod cgroup;
pub mod cpu;
pub mod memory;
pub mod numa;
mod pool;
mod rows;

pub use pool::{MAX_RANGES, Pool};
pub use rows::{Pieces, RowSet};
