//! The host's cores, its pages, and the thread pool over them: the ground floor, on which kernels, caches and devices
//! build.
//!
//! | item | what |
//! |---|---|
//! | [`Pool`], [`MAX_RANGES`] | the thread pool, one thread per core |
//! | [`ActiveWait`] | keeps idle threads awake for a bounded time |
//! | [`RowSet`], [`Pieces`] | rows of one buffer that several threads write |
//! | [`allowed_cores`], [`cores_beside_device`], [`unpin_current_thread`] | number and pinning of threads |
//! | [`memory_available`], [`cgroup_memory`], [`MemoryLimit`], [`cpu_quota`] | available memory, and limits of the control group |
//! | [`AlignedBuffer`], [`Plain`] | numbers that begin on a cache line |
//! | [`Mapping`], [`HUGE_PAGE`] | memory in huge pages |
//! | [`numa_nodes`], [`NumaNode`], [`NumaWish`], [`NumaBinding`] | memory nodes, and binding weights to them |

mod active_wait;
mod aligned;
mod cgroup;
mod cpu;
mod memory;
mod numa;
mod pool;
mod rows;

pub use active_wait::ActiveWait;
pub use aligned::{AlignedBuffer, Plain};
pub use cgroup::{MemoryLimit, cgroup_memory, cpu_quota, memory_available};
pub use cpu::{allowed_cores, cores_beside_device, unpin_current_thread};
pub use memory::{HUGE_PAGE, Mapping};
pub use numa::{NumaBinding, NumaNode, NumaWish, numa_nodes};
pub use pool::{MAX_RANGES, Pool};
pub use rows::{Pieces, RowSet};
