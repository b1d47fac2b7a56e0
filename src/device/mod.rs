//! Where work runs beside the CPU: accelerators behind one contract.
//!
//! [`runtime`] is what any accelerator gives: its own memory, in-order asynchronous lanes, events, pinned
//! host memory, launching a kernel by name. `kernels` (where the build has them) plans and launches those of `cuda/` through
//! it, whoever runs them. Modules here are public and have doors of their own.

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
