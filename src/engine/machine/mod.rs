//! The machine that runs programs for real: lanes of a device, and the host's workers.
//!
//! ```text
//! Iteration ─ lower ─► Program ─► RealMachine      gpu, h2d, d2h: enqueued in the program's order, ordered by events
//!                                                  host: jobs of a lane of its own, the oldest that is ready first
//! ```
//!
//! Operations are issued in the program's order, by a thread that computes nothing. Those of the device are enqueued on its lanes;
//! those of the host become jobs, each with the events and the earlier jobs that it waits for, which the host's lane runs with all
//! workers. The issuing thread waits for a job only where the device needs its results. So both sides work at the same time
//! wherever the program lets them. Which operation waits for which [`crate::program::order`] derives from what they read and
//! write.
//!
//! | a file | what |
//! |---|---|
//! | [`sizes`] | the dry run: what any placement takes on each side |
//! | `choose` | the placement that a strategy takes, by the dry run |
//! | `build` | allocates and loads a placement |
//! | `device` | what an operation on the device's lanes is for the accelerator |
//! | `host` | what an operation of the host's workers is for its sublayers |
//! | `lane` | the host's lane: jobs, oldest ready first |
//! | `carry` | rows across the link, through pinned memory |
//! | `lowered` | programs, kept by the structure of steps |
//! | `run` | a step, from its rows to its end |
//! | `lists` | what the accelerator has to know of a step's sequences |
//! | `issue` | an operation: enqueued, or given to the host |
//! | `collect` | logits and tokens |
//! | `trace` | when operations ran, if somebody wants to know |
//! | `work` | how much an operation of the host does, for emulated time |

mod build;
mod carry;
mod choose;
mod collect;
mod device;
mod host;
mod issue;
mod lane;
mod lists;
mod lowered;
mod run;
mod sizes;
mod trace;
mod work;

use std::sync::Arc;

use self::carry::Areas;
use self::device::DeviceHalf;
use self::host::HostHalf;
use self::lane::Lane;
use self::lowered::Programs;
use self::trace::Trace;
use self::work::HostWork;
use super::executor::{Executor, Placement as Where, Want};
use super::input::Input;
use super::iterate::{Sharing, iterations};
use super::memory::Memory;
use super::timeline::Timeline;
use crate::Result;
use crate::cache::{BlockTable, PageList};
use crate::device::clock::Clock;
use crate::model::ModelSpec;
use crate::program::Placement;

pub use self::choose::time::{Among, Considered, Prices, Timed, choose_by_time};
pub use self::choose::{Choice, Strategy, choose};
pub(super) use self::run::Rows;
pub use self::sizes::Sizes;

/// A model placed on one side or two.
pub(super) struct RealMachine {
    spec: ModelSpec,
    placement: Placement,
    strategy: &'static str,
    device_name: String,
    programs: Programs,
    /// Sub-batches that there is room for.
    sub_batches: usize,
    /// Pages have one number on both sides: each side has them for the layers whose keys and values it keeps.
    pages: PageList,
    /// The place of a layer among those with pages on the host.
    places: Vec<Option<usize>>,
    host: Option<HostSide>,
    device: Option<DeviceHalf>,
    areas: Option<Areas>,
    work: HostWork,
    memory: Memory,
    logits: Vec<f32>,
    argmax: Vec<Option<u32>>,
    /// What was downloaded last.
    bytes: Vec<u8>,
    trace: Option<Trace>,
}

/// The host's half, and who runs its operations.
#[allow(clippy::large_enum_variant)] // one per machine
enum HostSide {
    /// The thread that issues them: there is no device beside.
    Inline(HostHalf),
    /// A thread of their own.
    Lane(Lane<HostHalf>),
}

impl HostSide {
    /// Calls `f` with the host's half, between steps or when all jobs are done.
    fn with<R>(&mut self, f: impl FnOnce(&mut HostHalf) -> R) -> R {
        match self {
            HostSide::Inline(half) => f(half),
            HostSide::Lane(lane) => f(&mut lane.state()),
        }
    }
}

impl RealMachine {
    fn device(&self) -> &DeviceHalf {
        self.device.as_ref().expect("operations of a device, which the placement has")
    }

    fn device_mut(&mut self) -> &mut DeviceHalf {
        self.device.as_mut().expect("operations of a device, which the placement has")
    }

    fn lane(&self) -> &Lane<HostHalf> {
        match &self.host {
            Some(HostSide::Lane(lane)) => lane,
            _ => unreachable!("operations of both sides, and no lane for the host's"),
        }
    }

    fn lane_mut(&mut self) -> &mut Lane<HostHalf> {
        match &mut self.host {
            Some(HostSide::Lane(lane)) => lane,
            _ => unreachable!("operations of both sides, and no lane for the host's"),
        }
    }

    fn areas_mut(&mut self) -> &mut Areas {
        self.areas.as_mut().expect("transfers, which were planned with both sides")
    }

    /// Rows of a sub-batch whose logits there is room for.
    fn logit_rows(&self) -> usize {
        self.device.as_ref().map_or(usize::MAX, |d| d.limits.logit_rows)
    }
}

impl Executor for RealMachine {
    fn pages(&mut self) -> &mut PageList {
        &mut self.pages
    }

    fn run(
        &mut self,
        inputs: &[Input<'_>],
        tables: &[&BlockTable],
        want: Want,
        sharing: Sharing<'_>,
    ) -> Result<()> {
        let pick = want == Want::Argmax;
        let (iterations, n) = iterations(inputs, tables, sharing, pick, self.logit_rows());
        self.expect(n, pick);
        iterations.iter().try_for_each(|(iteration, rows)| RealMachine::run(self, iteration, rows))
    }

    fn logits(&self) -> &[f32] {
        &self.logits
    }

    fn sub_batches(&self) -> usize {
        self.sub_batches
    }

    fn argmax(&self) -> &[Option<u32>] {
        &self.argmax
    }

    fn trace(&mut self) -> Result<()> {
        self.trace = Some(Trace::new(self.clock().map(|clock| clock.now())));
        Ok(())
    }

    fn timeline(&mut self) -> Option<Timeline> {
        self.trace.as_ref().map(|t| t.timeline.clone())
    }

    fn placement(&self) -> Where {
        let lane = self.lane().state();
        Where {
            device: format!("{}+cpu", self.device_name),
            strategy: self.strategy,
            isa: format!("{}, cpu {}", self.device().describe(), lane.isa().name()),
            threads: lane.threads(),
            kv_type: self.device().shape.kv.name(),
        }
    }

    fn memory(&self) -> Memory {
        self.memory
    }

    fn clock(&self) -> Option<&Arc<Clock>> {
        self.device.as_ref().and_then(|d| d.runtime.clock())
    }

    fn bytes_per_step(&self) -> u64 {
        self.lane().state().bytes_per_step() + self.device().bytes_per_step
    }
}
