//! The kernels of `cuda/`, and models on an accelerator that runs them: on their host emulation, and on a GPU if there is one.

#[cfg(tandem_kernels)]
mod any_memory;
mod engine;
mod faults;
mod hybrid;
#[cfg(tandem_kernels)]
mod kernels;
mod pages;
mod placements;
#[cfg(tandem_kernels)]
mod self_test;
#[cfg(tandem_kernels)]
mod stand_in;
#[path = "../support/mod.rs"]
mod support;
mod weights;
