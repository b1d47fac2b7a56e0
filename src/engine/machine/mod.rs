//! The machine that runs programs for real: lanes of a device, and the host's workers.
//!
//! ```text
//! Iteration ─ lower ─► Program ─► RealMachine      gpu, h2d, d2h: enqueued in the program's order, ordered by events
//!                                                  host: computed by the issuing thread when its inputs have arrived
//! ```
//!
//! Operations are issued in the program's order. Those of the device only enqueue; those of the host wait for the events of what
//! they read, and compute. So the device works through what was issued before a host operation while that runs.
//! Which operation waits for which [`crate::program::order`] derives from what they read and write.
//!
//! | a file | what |
//! |---|---|
//! | [`sizes`] | the dry run: what any placement takes on each side |
//! | `choose` | the placement that a strategy takes, by the dry run |
//! | `build` | allocates and loads a placement |
//! | `device` | what an operation on the device's lanes is for the accelerator |
//! | `host` | what an operation of the host's workers is for its sublayers |
//! | `carry` | rows across the link, through pinned memory |
//! | `run` | a step: lower, issue, collect logits |
//! | `trace` | when operations ran, if somebody wants to know |

mod build;
mod carry;
mod choose;
mod device;
mod host;
mod run;
mod sizes;
mod trace;

use self::carry::Areas;
use self::device::DeviceHalf;
use self::host::HostHalf;
use self::trace::Trace;
use super::executor::{Executor, Placement as Where, Want};
use super::input::Input;
use super::memory::Memory;
use super::timeline::Timeline;
use crate::Result;
use crate::cache::{BlockTable, PageList};
use crate::model::ModelSpec;
use crate::program::Placement;

pub use self::choose::{Choice, Strategy, choose};
pub use self::sizes::Sizes;

/// A model placed on two sides.
pub(super) struct RealMachine {
    spec: ModelSpec,
    placement: Placement,
    strategy: &'static str,
    device_name: String,
    /// Pages have one number on both sides: each side has them for the layers whose keys and values it keeps.
    pages: PageList,
    host: HostHalf,
    device: DeviceHalf,
    areas: Areas,
    memory: Memory,
    logits: Vec<f32>,
    argmax: Vec<u32>,
    trace: Option<Trace>,
}

impl Executor for RealMachine {
    fn pages(&mut self) -> &mut PageList {
        &mut self.pages
    }

    fn run(&mut self, inputs: &[Input<'_>], tables: &[&BlockTable], want: Want) -> Result<()> {
        self.step(inputs, tables, want)
    }

    fn logits(&self) -> &[f32] {
        &self.logits
    }

    fn argmax(&self) -> &[u32] {
        &self.argmax
    }

    fn trace(&mut self) -> Result<()> {
        self.trace = Some(Trace::new());
        Ok(())
    }

    fn timeline(&mut self) -> Option<Timeline> {
        self.trace.as_ref().map(|t| t.timeline.clone())
    }

    fn placement(&self) -> Where {
        Where {
            device: format!("{}+cpu", self.device_name),
            strategy: self.strategy,
            isa: format!("{}, cpu {}", self.device.describe(), self.host.isa().name()),
            threads: self.host.threads(),
            kv_type: self.device.shape.kv.name(),
        }
    }

    fn memory(&self) -> Memory {
        self.memory
    }

    fn bytes_per_step(&self) -> u64 {
        self.host.bytes_per_step() + self.device.bytes_per_step
    }
}
