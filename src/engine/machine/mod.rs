//! The machine that runs programs for real: lanes of a device, and the host's workers.
//!
//! ```text
//! Iteration ─ lower ─► Program ─► RealMachine      gpu, h2d, d2h: enqueued in the program's order, ordered by events
//!                                                  host: jobs of a lane of its own, the oldest that is ready first
//! ```
//!
//! A thread that computes nothing issues the operations in the program's order. Those of the device are enqueued on its
//! lanes; those of the host become jobs, each with the events and the earlier jobs that it waits for, which the host's
//! lane runs with all workers. The issuing thread waits for a job only where the device needs its results. So both
//! sides work at the same time wherever the program lets them. Which operation waits for which
//! [`crate::program::order`] derives from what they read and write.
//!
//! | a file | what |
//! |---|---|
//! | [`sizes`] | the dry run: the bytes of any placement on each side |
//! | `tiers` | pages for requests that live on two sides |
//! | `counted` | the dry run, as the chooser of `plan` asks for it |
//! | `build` | a machine for a placement: on one side or two |
//! | `load` | allocates and fills the device's half |
//! | `device` | translates operations on the device's lanes into calls of the accelerator |
//! | `host` | translates operations of the host's workers into calls of its sublayers |
//! | `host_pages` | memory for keys and values that both sides use |
//! | `lane` | the host's lane: jobs, oldest ready first |
//! | `cohorts`, `chain` | rows that are parked between steps: the per-layer sync table, and a step's treatment of them
//! |
//! | `sync` | the word between the host's lane and the issuing thread |
//! | `carry` | rows across the link, through pinned memory |
//! | `parts` | attention in parts, through pinned memory |
//! | `lowered` | programs, kept by the structure of steps |
//! | `run`, `part` | a step, from its rows to its end; its sub-batches |
//! | `split` | an iteration that wants more logits than fit, in several steps |
//! | `mode`, `lists` | the accelerator's description of a step's sequences |
//! | `pack` | rows that want logits, put side by side behind the device's last attention |
//! | `issue` | an operation: enqueued, or given to the host |
//! | `follow`, `tally` | experts of divided layers that follow the routers, and how often these choose them |
//! | `segments`, `graphs` | operations of decode steps that can be one graph; recorded |
//! | `collect` | logits and tokens |
//! | `trace` | when operations ran, if requested |
//! | `busy` | how long each unit worked, if requested |
//! | `work` | the work of an operation of the host, for emulated time |

mod build;
mod busy;
mod carry;
mod cohort_turn;
mod cohorts;
mod collect;
mod counted;
mod crossed;
mod device;
mod follow;
mod graphs;
mod host;
mod host_pages;
mod issue;
mod lane;
mod lists;
mod load;
mod lowered;
mod mail;
mod mode;
mod pack;
mod part;
mod parts;
mod run;
mod segments;
mod sizes;
mod split;
mod sync;
mod tally;
#[cfg(test)]
mod tests;
mod tiers;
mod trace;
mod work;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The atomics of `sync`; a model checker replaces them.
mod atomics {
    pub use std::sync::atomic::{AtomicU32, Ordering};
}

use self::busy::Busy;
use self::carry::Areas;
use self::cohorts::Slot;
use self::crossed::Crossed;
use self::device::DeviceHalf;
use self::follow::Following;
use self::graphs::Graphs;
use self::host::HostHalf;
use self::lane::Lane;
use self::lowered::Programs;
use self::trace::Trace;
use self::work::HostWork;
use super::kv::{FarSteps, KvStore, Moved};
use super::memory::Memory;
use super::place::RunInfo;
use crate::Result;
use crate::device::Clock;
use crate::model::{ModelSpec, RouterProfile};
use crate::program::{Flow, Iteration, PerUnit, Placement};
use crate::text::Top;
use crate::timeline::Timeline;

pub(super) use self::cohorts::Parked;
pub use self::counted::Counted;
pub(crate) use self::host_pages::host_pages;
pub use self::lane::hand_over::{JobPause, LaneHandOver, hand_overs};
pub(super) use self::part::GroupRows;
pub(super) use self::run::Results;
pub use self::sizes::Sizes;
pub use self::tiers::Tiers;

/// A model placed on one side or two.
pub(super) struct RealMachine {
    spec: ModelSpec,
    placement: Placement,
    described: RunInfo,
    programs: Programs,
    graphs: Graphs,
    /// Maximum number of sub-batches.
    sub_batches: usize,
    kv: KvStore,
    /// For each layer, its index among those whose keys and values are on its side.
    places: Vec<usize>,
    host: Option<HostSide>,
    device: Option<DeviceHalf>,
    areas: Option<Areas>,
    /// Experts that follow the routers, if they do.
    following: Option<Following>,
    /// The work of the host's operations.
    work: HostWork,
    /// The clock of emulated time if the host is alone; a device keeps its own.
    clock: Option<Arc<Clock>>,
    memory: Memory,
    /// Bytes of the host's workspace that the dry run counted, if the host is alone.
    planned: usize,
    bytes_per_step: u64,
    /// Rows of logits, and tokens, requested of the step.
    expected: (usize, usize),
    /// Whether the logits are still in the host's workspace.
    in_place: bool,
    logits: Vec<f32>,
    /// Where the logits of rows are that have stayed on the device: sub-batch, and row there.
    stayed: Vec<Option<(usize, usize)>>,
    /// For each row, the factor of [`Top::sum`]; empty if whole rows are wanted.
    factors: Vec<f32>,
    tops: Vec<Option<Top>>,
    argmax: Vec<Option<u32>>,
    /// Buffer of the last download.
    bytes: Vec<u8>,
    trace: Option<Trace>,
    busy: Option<Busy>,
    crossed: Crossed,
    /// The cohort that each sub-batch belongs to.
    slots: Vec<Slot>,
    /// Whether cohorts join at a fixed lag.
    deterministic: bool,
    /// How long to wait for them then.
    patience: Duration,
    /// How long the last step took that kept the host's threads awake.
    active_step: Duration,
    /// Why cohorts cannot run, once checked.
    refuses_cohorts: OnceLock<Option<String>>,
    /// Steps so far, and the failing step, on a machine that computes nothing.
    #[cfg(test)]
    pretends: Option<(usize, Option<usize>)>,
}

/// The host's half, and the threads that run its operations.
#[allow(clippy::large_enum_variant)] // one per machine
enum HostSide {
    /// The issuing thread itself, since there is no device.
    Inline(HostHalf),
    /// A separate thread.
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

    /// The pages of all sequences, immutable.
    pub fn kv_ref(&self) -> &KvStore {
        &self.kv
    }

    /// Copies pages that have changed sides in the tables, and waits for the copies.
    ///
    /// # Errors
    /// If the device has failed; the pages are then still on their old side.
    pub fn move_pages(&mut self, moved: &[Moved]) -> Result<()> {
        let iteration = Iteration {
            sub_batches: Vec::new(),
            moves: Moved::all_of_iteration(moved),
            flow: Flow::Serial,
            pick: false,
            top: false,
        };
        self.step(&iteration, &[], moved).map(drop)
    }

    /// How the steps so far attended tokens whose pages have left the device.
    pub fn far_steps(&self) -> FarSteps {
        self.kv.far.steps()
    }

    /// Most sub-batches of a step.
    pub fn sub_batches(&self) -> usize {
        self.sub_batches
    }

    fn host_is_idle(&self) -> bool {
        match &self.host {
            Some(HostSide::Lane(lane)) => lane.is_idle(),
            _ => true,
        }
    }

    /// Starts recording when operations run.
    pub fn trace(&mut self) {
        self.trace = Some(Trace::new(self.clock().map(|clock| clock.now())));
    }

    /// The timeline recorded since [`RealMachine::trace`].
    pub fn timeline(&self) -> Option<Timeline> {
        self.trace.as_ref().map(|t| t.timeline.clone())
    }

    /// The timeline recorded since [`RealMachine::trace`]; stops recording.
    pub fn end_trace(&mut self) -> Option<Timeline> {
        self.trace.take().map(|t| t.timeline)
    }

    /// Starts counting how long each unit works; a clock of emulated time always counts.
    pub fn count_busy(&mut self) {
        if self.clock().is_none() {
            self.busy.get_or_insert_default();
        }
    }

    /// Seconds that each unit has worked: in emulated time, or by this computer's clock since [`RealMachine::count_busy`].
    pub fn busy_seconds(&self) -> Option<PerUnit<f64>> {
        let counted = || self.busy.as_ref().map(Busy::seconds);
        self.clock().map(|clock| PerUnit::from(clock.busy())).or_else(counted)
    }

    /// Writes to the host's pages of these ids, so that the system gives them memory.
    pub fn touch(&mut self, pages: &[u32]) {
        if let Some(host) = &mut self.host {
            host.with(|half| half.touch(pages));
        }
    }

    /// Counts the choices of routers that the host sees from now on, or no more.
    pub fn count_choices(&mut self, from: Option<Box<RouterProfile>>) {
        let Some(host) = &mut self.host else { return };
        if let Some(following) = &mut self.following {
            following.count_choices(from.clone(), host);
        }
        host.with(|half| half.choices = from);
    }

    /// The choices counted so far: of the host's layers, and of divided ones if their experts follow the routers.
    pub fn choices(&mut self) -> Option<RouterProfile> {
        let host = self.host.as_mut()?;
        let mut choices = host.with(|half| half.choices.as_deref().cloned())?;
        if let Some(of_divided) = self.following.as_mut().and_then(|following| following.choices(host)) {
            choices.add(of_divided);
        }
        Some(choices)
    }

    /// Whether experts of divided layers follow the routers.
    pub fn follows_router(&self) -> bool {
        self.following.is_some()
    }

    /// Where the model runs.
    pub fn place(&self) -> RunInfo {
        self.described.clone()
    }

    /// Memory as computed by the dry run.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// The clock of emulated time, if there is one.
    pub fn clock(&self) -> Option<&Arc<Clock>> {
        self.device.as_ref().map_or(self.clock.as_ref(), |d| d.runtime.clock())
    }

    /// Waits for all work enqueued on the device.
    ///
    /// # Errors
    /// Pending errors of earlier calls.
    pub fn check_device(&self) -> Result<()> {
        self.device.as_ref().map_or(Ok(()), |d| d.runtime.synchronize_all())
    }

    /// Bytes of weights that one decode step reads.
    pub fn bytes_per_step(&self) -> u64 {
        self.bytes_per_step
    }
}
