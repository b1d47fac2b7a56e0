//! Accelerators, which run work beside the CPU, behind one contract.
//!
//! [`runtime`] is the interface of any accelerator: its own memory, in-order asynchronous lanes, events, pinned host
//! memory, launching a kernel by name. `kernels` (if the build contains it) plans and launches the kernels of `cuda/`
//! through a runtime, on a GPU or emulated. The modules here are public, and each has its own `mod.rs` as its
//! interface.

pub mod accelerator;
pub mod built;
pub mod clock;
pub mod cuda;
pub mod emulated;
#[cfg(tandem_kernels)]
pub mod kernels;
mod lane;
pub mod machine;
pub mod notice;
pub mod open;
pub mod preload;
pub mod runtime;
mod timed;
pub mod turns;
