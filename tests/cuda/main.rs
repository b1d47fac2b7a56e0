//! The CUDA runtime on a stand-in for the driver. Each case is a process of its own, this binary again: a driver is loaded once.

mod capture;
mod driver;
#[cfg(tandem_kernels)]
mod executes;
mod runtime;
#[path = "../support/mod.rs"]
mod support;
