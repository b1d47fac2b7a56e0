//! The host as a device: its cores and the thread pool over them.

pub mod cgroup;
pub mod cpu;
mod pool;

pub use pool::{MAX_RANGES, Pool};
