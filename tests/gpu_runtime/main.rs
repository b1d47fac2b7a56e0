//! The runtime contract: what every accelerator must do, on every accelerator that this machine has; then
//! what only the emulated one does: refuse races, inject faults, be late. A binary of its own: `time` and
//! `lanes` measure, so nothing heavy may run beside them.

mod contract;
mod faults;
mod lanes;
mod model;
#[cfg(tandem_kernels)]
mod stand_in;
#[path = "../support/mod.rs"]
mod support;
mod time;

use std::sync::Arc;

use crate::support::gpu;
use tandem::device::Runtime;
use tandem::device::emulated::{EmulatedOptions, EmulatedRuntime};

/// Small, so that filling it up costs nothing.
fn options() -> EmulatedOptions {
    EmulatedOptions { memory: 1 << 20, ..EmulatedOptions::default() }
}

fn emulated(options: EmulatedOptions) -> Arc<EmulatedRuntime> {
    Arc::new(EmulatedRuntime::new(options).expect("the emulated accelerator starts"))
}

/// The emulated one, punctual and not.
fn each_emulated(test: impl Fn(&str, Arc<dyn Runtime>)) {
    test("emulated", emulated(options()));
    for seed in 1..4 {
        let late = EmulatedOptions { jitter: Some(seed), ..options() };
        test(&format!("emulated, jitter {seed}"), emulated(late));
    }
}

/// Every runtime of this machine, or of those that `TANDEM_TEST_DEVICE` leaves (tests/support/gpu/mod.rs).
fn each(test: impl Fn(&str, Arc<dyn Runtime>)) {
    if gpu::wanted("emulated") {
        each_emulated(&test);
    }
    if !gpu::wanted("cuda") {
        return;
    }
    if let Some(rt) = gpu::gpu() {
        test("cuda", rt);
    }
}
