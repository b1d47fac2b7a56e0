//! CPU threads in the role of an accelerator: a separate arena, truly asynchronous lanes, faults on demand.
//!
//! * `options` sets its size, speed, delays and faults.
//! * `allocator` and `arena` are its memory: capped, poisoned, with guards between allocations.
//! * `order` checks that events order the work of different lanes on the same bytes.
//! * `op`, `lanes` are the work and the threads that do it; `runtime` implements the runtime contract with them.
//! * `program` runs the real kernels of `cuda/`, where a C++ compiler built them into this program
//!   (through `ffi`).
//! * `accelerator` implements the accelerator contract with plain functions on the host (`ops`); `step` describes a
//!   step to them.

mod accelerator;
mod allocator;
mod arena;
#[cfg(tandem_emulation)]
pub mod ffi;
mod lanes;
mod op;
mod ops;
mod options;
mod order;
mod pinned;
mod program;
mod random;
mod runtime;
mod step;

pub use accelerator::EmulatedAccelerator;
pub use op::Span;
pub use ops::pages::PageShape;
pub use options::{CopyTiming, EmulatedOptions, FaultPlan, KernelChecks, Schedule, Speed};
pub use runtime::EmulatedRuntime;
