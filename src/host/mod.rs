//! The host's cores, its pages, and the thread pool over them: the ground floor, which kernels, caches and devices stand on.
//!
//! | offered | what |
//! |---|---|
//! | [`Pool`], [`MAX_RANGES`] | threads, one a core, and the jobs they share |
//! | [`RowSet`], [`Pieces`] | rows of one buffer that threads write side by side |
//! | [`allowed_cores`], [`cores_beside_device`], [`unpin_current_thread`] | how many threads to have, and where they may run |
//! | [`memory_available`], [`cgroup_memory`], [`MemoryLimit`], [`cpu_quota`] | what the control group of this process leaves it |
//! | [`Mapping`], [`HUGE_PAGE`], [`ask_for_huge_pages`] | memory in huge pages |
//! | [`numa_nodes`], [`NumaNode`], [`NumaWish`], [`NumaBinding`] | on which memory node weights lie |

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
