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
//! | `tiers` | pages for requests that live on two sides |
//! | `choose` | the placement that a strategy takes, by the dry run |
//! | `build` | a machine for a placement: on one side or two |
//! | `load` | allocates and fills the device's half |
//! | `device` | what an operation on the device's lanes is for the accelerator |
//! | `host` | what an operation of the host's workers is for its sublayers |
//! | `lane` | the host's lane: jobs, oldest ready first |
//! | `cohorts`, `chain` | rows that are parked between steps: the per-layer sync table; what a step does with them |
//! | `sync` | the word between the host's lane and the issuing thread |
//! | `carry` | rows across the link, through pinned memory |
//! | `parts` | attention in parts, through pinned memory |
//! | `lowered` | programs, kept by the structure of steps |
//! | `run`, `part` | a step, from its rows to its end; its sub-batches |
//! | `mode`, `lists` | what the accelerator has to know of a step's sequences |
//! | `issue` | an operation: enqueued, or given to the host |
//! | `segments`, `graphs` | operations of decode steps that can be one graph; recorded |
//! | `collect` | logits and tokens |
//! | `trace` | when operations ran, if somebody wants to know |
//! | `busy` | how long each unit worked, if somebody wants to know |
//! | `work` | how much an operation of the host does, for emulated time |

mod build;
mod busy;
mod carry;
mod chain;
mod choose;
mod cohorts;
mod collect;
mod device;
mod graphs;
mod host;
mod issue;
mod lane;
mod lists;
mod load;
mod lowered;
mod mode;
mod part;
mod parts;
mod run;
mod segments;
mod sizes;
mod sync;
#[cfg(test)]
mod tests;
mod tiers;
mod trace;
mod work;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// What `sync` is made of: a model checker gives it others.
mod atomics {
    pub use std::sync::atomic::{AtomicU32, Ordering};
}

use self::busy::Busy;
use self::carry::Areas;
use self::cohorts::Slot;
use self::device::DeviceHalf;
use self::graphs::Graphs;
use self::host::HostHalf;
use self::lane::Lane;
use self::lowered::Programs;
use self::trace::Trace;
use self::work::HostWork;
use super::kv::{FarSteps, KvStore, Moved};
use super::memory::Memory;
use super::place::Placement as Where;
use crate::Result;
use crate::device::Clock;
use crate::model::ModelSpec;
use crate::program::{Flow, Iteration, Placement};
use crate::timeline::Timeline;

pub use self::choose::time::{Among, Considered, Prices, Timed, choose_by_time};
pub use self::choose::{Choice, Strategy, choose};
pub(super) use self::cohorts::{Outcome, Parked};
pub use self::lane::hand_over::{LaneHandOver, hand_overs};
pub(super) use self::part::GroupRows;
pub use self::sizes::Sizes;
pub use self::tiers::Tiers;

/// A model placed on one side or two.
pub(super) struct RealMachine {
    spec: ModelSpec,
    placement: Placement,
    described: Where,
    programs: Programs,
    graphs: Graphs,
    /// Sub-batches that there is room for.
    sub_batches: usize,
    kv: KvStore,
    /// The place of a layer among those whose keys and values are on its side.
    places: Vec<usize>,
    host: Option<HostSide>,
    device: Option<DeviceHalf>,
    areas: Option<Areas>,
    /// How much operations of the host do.
    work: HostWork,
    /// The clock of emulated time where the host is alone; a device keeps its own.
    clock: Option<Arc<Clock>>,
    memory: Memory,
    /// Bytes of the host's workspace that the dry run counted, where the host is alone.
    planned: usize,
    bytes_per_step: u64,
    /// Rows of logits and tokens that the step is asked for.
    expected: (usize, usize),
    /// Whether the logits are where the host's head left them.
    in_place: bool,
    logits: Vec<f32>,
    argmax: Vec<Option<u32>>,
    /// What was downloaded last.
    bytes: Vec<u8>,
    trace: Option<Trace>,
    busy: Option<Busy>,
    /// The cohort that each sub-batch belongs to.
    slots: Vec<Slot>,
    /// Whether cohorts join at a fixed lag.
    deterministic: bool,
    /// How long they are waited for then.
    patience: Duration,
    /// Why there can be none, if somebody has asked.
    refuses_cohorts: OnceLock<Option<String>>,
    /// Steps so far, and the one that fails, where nothing is computed.
    #[cfg(test)]
    pretends: Option<(usize, Option<usize>)>,
}

/// The host's half, and the threads that run its operations.
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

    /// The pages of all sequences.
    pub fn kv(&mut self) -> &mut KvStore {
        &mut self.kv
    }

    /// The same, to look at.
    pub fn kv_ref(&self) -> &KvStore {
        &self.kv
    }

    /// Copies pages that have changed sides, and waits for it.
    ///
    /// # Errors
    /// The device failed. Then the pages are still where they were.
    pub fn move_pages(&mut self, moved: &[Moved]) -> Result<()> {
        let iteration = Iteration {
            sub_batches: Vec::new(),
            moves: Moved::all_of_iteration(moved),
            flow: Flow::Serial,
            pick: false,
        };
        self.run(&iteration, &[], moved)
    }

    /// Rows of a sub-batch whose logits there is room for in one iteration.
    pub fn logit_rows(&self) -> usize {
        self.device.as_ref().map_or(usize::MAX, |d| d.limits.logit_rows)
    }

    /// How steps so far attended such tokens.
    pub fn far_steps(&self) -> FarSteps {
        self.kv.far.steps()
    }

    /// Settles how a step attends tokens whose pages have left the device.
    pub fn settle(&mut self, iteration: &mut Iteration) {
        self.kv.far.settle(&self.placement, iteration);
    }

    /// Sub-batches of a step that there is room for.
    pub fn sub_batches(&self) -> usize {
        self.sub_batches
    }

    fn host_is_idle(&self) -> bool {
        match &self.host {
            Some(HostSide::Lane(lane)) => lane.is_idle(),
            _ => true,
        }
    }

    /// Begins to note when operations run.
    pub fn trace(&mut self) {
        self.trace = Some(Trace::new(self.clock().map(|clock| clock.now())));
    }

    /// What was noted since [`RealMachine::trace`].
    pub fn timeline(&self) -> Option<Timeline> {
        self.trace.as_ref().map(|t| t.timeline.clone())
    }

    /// What was noted since [`RealMachine::trace`]; from now on nothing is.
    pub fn end_trace(&mut self) -> Option<Timeline> {
        self.trace.take().map(|t| t.timeline)
    }

    /// Begins to count how long each unit works; a clock of emulated time does anyway.
    pub fn count_busy(&mut self) {
        if self.clock().is_none() {
            self.busy.get_or_insert_default();
        }
    }

    /// Seconds that each unit has worked: in emulated time, or by this computer's clock since [`RealMachine::count_busy`].
    pub fn busy_seconds(&self) -> Option<[f64; 4]> {
        let counted = || self.busy.as_ref().map(Busy::seconds);
        self.clock().map(|clock| clock.busy()).or_else(counted)
    }

    /// Writes to the host's pages of these ids, so that the system gives them memory.
    pub fn touch(&mut self, pages: &[u32]) {
        if let Some(host) = &mut self.host {
            host.with(|half| half.touch(pages));
        }
    }

    /// Where it runs.
    pub fn place(&self) -> Where {
        self.described.clone()
    }

    /// Memory as computed by the dry run.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// The clock of emulated time, if it runs in that.
    pub fn clock(&self) -> Option<&Arc<Clock>> {
        self.device.as_ref().map_or(self.clock.as_ref(), |d| d.runtime.clock())
    }

    /// Waits for all that was enqueued on the device.
    ///
    /// # Errors
    /// What it owes of earlier calls.
    pub fn check_device(&self) -> Result<()> {
        self.device.as_ref().map_or(Ok(()), |d| d.runtime.synchronize_all())
    }

    /// Bytes of weights that one decode step reads.
    pub fn bytes_per_step(&self) -> u64 {
        self.bytes_per_step
    }
}
