//! The host's cores, its pages, and the thread pool over them: the ground floor, on which kernels, caches and devices
//! build.
//!
//! | offered | what |
//! |---|---|
//! | [`Pool`], [`MAX_RANGES`] | threads, one per core, and the jobs they share |
//! | [`RowSet`], [`Pieces`] | rows of one buffer that threads write concurrently |
//! | [`allowed_cores`], [`cores_beside_device`], [`unpin_current_thread`] | the number of threads to start, and where
//! they may run |
//! | [`memory_available`], [`cgroup_memory`], [`MemoryLimit`], [`cpu_quota`] | limits of this process's control groups
//! |
//! | [`Mapping`], [`HUGE_PAGE`], [`ask_for_huge_pages`] | memory in huge pages |
//! | [`numa_nodes`], [`NumaNode`], [`NumaWish`], [`NumaBinding`] | the memory nodes that weights lie on |

mod cgroup;
mod cpu;
mod memory;
mod numa;
mod pool;
mod rows;

pub use cgroup::{MemoryLimit, cgroup_memory, cpu_quota, memory_available};
pub use cpu::{allowed_cores, cores_beside_device, unpin_current_thread};
pub use memory::{HUGE_PAGE, Mapping, ask_for_huge_pages};
pub use numa::{NumaBinding, NumaNode, NumaWish, numa_nodes};
pub use pool::{MAX_RANGES, Pool};
pub use rows::{Pieces, RowSet};
