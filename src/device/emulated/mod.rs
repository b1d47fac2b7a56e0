//! CPU threads in the role of an accelerator: a separate arena, truly asynchronous lanes, faults on demand.
//!
//! * `options` says how large, how fast, how unpunctual and how broken it shall be.
//! * `allocator` and `arena` are its memory: capped, poisoned, with guards between allocations.
//! * `order` watches that work of different lanes on the same bytes is ordered by events.
//! * `op`, `lanes` are the work and the threads that do it; `runtime` is the contract over them.
//! * `program` runs the real kernels of `cuda/`, where a C++ compiler built them into this program
//!   (through `ffi`).
//! * `accelerator` is the accelerator contract by plain functions on the host (`ops`); `step` is what
//!   they know of a step.

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
