//! The lanes: a thread and an in-order queue each; events between them; what goes wrong and who is told.
//!
//! An error of asynchronous work (a kernel that fails its checks) makes its lane skip everything behind it
//! until somebody is told: the next call on the lane, or whoever synchronises with an event behind the
//! failure. Lanes that wait for such an event fail with it. A lost device is lost for good: every call
//! gives the same error, and nothing waits any more.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::arena::Arena;
use super::op::{Direction, Hooks, Op, Span};
use super::options::{EmulatedOptions, FaultPlan};
use super::order::{Clock, Order};
use super::pinned::HostMemory;
use super::program::{self, OwnedLaunch};
use super::random::Random;
use crate::device::runtime::{DevPtr, DeviceInfo, Lane, Pinned};
use crate::{Error, Result};

/// The longest delay that jitter puts before a piece of work.
const JITTER: Duration = Duration::from_micros(400);

/// An error that can be told several times.
#[derive(Debug, Clone)]
pub(super) struct Problem(Arc<(String, String)>);

impl Problem {
    pub fn new(what: impl Into<String>, problem: impl Into<String>) -> Problem {
        Problem(Arc::new((what.into(), problem.into())))
    }

    fn of(error: Error, what: &str) -> Problem {
        match error {
            Error::Device { what, problem } => Problem::new(what, problem),
            other => Problem::new(what, other.to_string()),
        }
    }

    pub fn error(&self) -> Error {
        Error::Device { what: self.0.0.clone(), problem: self.0.1.clone() }
    }

    fn is(&self, other: &Problem) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A point in a lane.
pub(super) struct Mark {
    pub device: Weak<Core>,
    lane: Lane,
    clock: Clock,
    /// Set when the lane has come to it.
    done: OnceLock<std::result::Result<(), Problem>>,
}

enum Step {
    Work(Op),
    Signal(Arc<Mark>),
    Wait(Arc<Mark>),
}

struct Job {
    seq: u64,
    step: Step,
    /// The device is lost when it comes to this.
    lose: bool,
    /// It never ends.
    endless: bool,
    /// Pinned memory that it uses.
    _keep: Vec<Arc<HostMemory>>,
}

/// A failure, and up to which work of the lane it counts: unknown until somebody was told.
struct Trouble {
    problem: Problem,
    through: Option<u64>,
}

#[derive(Default)]
struct LaneState {
    queue: VecDeque<Job>,
    enqueued: u64,
    completed: u64,
    running: Option<(Instant, String)>,
    trouble: Option<Trouble>,
}

/// Calls since the plan was set.
#[derive(Default)]
struct Faults {
    plan: FaultPlan,
    allocations: u64,
    operations: u64,
    copies: u64,
    launches: u64,
}

#[derive(Default)]
struct State {
    lanes: [LaneState; 3],
    order: Order,
    lost: Option<Problem>,
    /// Of a call that could not return it.
    owed: Option<Problem>,
    shutdown: bool,
    faults: Faults,
    capture: Option<(ThreadId, Vec<Op>)>,
    /// Pinned memory by address. What was dropped since is cleared away when more is made.
    pinned: BTreeMap<u64, Weak<HostMemory>>,
}

/// What the host's calls and the lanes' threads share.
pub(super) struct Core {
    pub info: DeviceInfo,
    pub options: EmulatedOptions,
    arena: Mutex<Arena>,
    state: Mutex<State>,
    /// Of each lane: there is work.
    work: [Condvar; 3],
    /// Something was done, or everything is over.
    progress: Condvar,
    /// Everything is over: the device is lost, or nobody holds it any more.
    over: Condvar,
}

fn name(lane: Lane) -> &'static str {
    match lane {
        Lane::Compute => "compute lane",
        Lane::HostToDevice => "host-to-device lane",
        Lane::DeviceToHost => "device-to-host lane",
    }
}

/// A plan is complete before a lock is given back, and user code runs outside: poison means nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Tells of trouble that a call on `lane` has to know.
    fn report(&mut self, lane: Lane) -> Result<()> {
        self.alive()?;
        let lane = &mut self.lanes[lane as usize];
        if let Some(trouble) = lane.trouble.as_mut().filter(|t| t.through.is_none()) {
            trouble.through = Some(lane.enqueued);
            return Err(trouble.problem.error());
        }
        Ok(())
    }

    /// The device is not lost, and no earlier call is owed an error.
    fn alive(&mut self) -> Result<()> {
        if let Some(lost) = &self.lost {
            return Err(lost.error());
        }
        self.owed.take().map_or(Ok(()), |p| Err(p.error()))
    }

    fn over(&self) -> bool {
        self.shutdown || self.lost.is_some()
    }

    /// Calls that wait, or that touch what is not recorded, have no place in a recording.
    fn not_capturing(&self) -> Result<()> {
        match &self.capture {
            Some((thread, _)) if *thread == std::thread::current().id() => Err(Error::Device {
                what: "emulated accelerator".into(),
                problem: "work is being recorded: only enqueueing on the compute lane is possible".into(),
            }),
            _ => Ok(()),
        }
    }

    /// The pinned memory that a span lies in.
    fn pinned(&self, span: &Span) -> Option<Arc<HostMemory>> {
        let (&start, memory) = self.pinned.range(..=span.ptr.0).next_back()?;
        let memory = memory.upgrade()?;
        (span.len <= (start + memory.len() as u64).checked_sub(span.ptr.0)? as usize).then_some(memory)
    }
}

impl Core {
    pub fn new(info: DeviceInfo, options: EmulatedOptions) -> Result<Core> {
        let arena = Mutex::new(Arena::new(options.memory)?);
        let faults = Faults { plan: options.faults.clone(), ..Faults::default() };
        let state = Mutex::new(State { faults, ..State::default() });
        let work = std::array::from_fn(|_| Condvar::new());
        Ok(Core { info, options, arena, state, work, progress: Condvar::new(), over: Condvar::new() })
    }

    /// Replaces the plan of faults; counts begin again.
    pub fn set_faults(&self, plan: FaultPlan) {
        lock(&self.state).faults = Faults { plan, ..Faults::default() };
    }

    pub fn alive(&self) -> Result<()> {
        lock(&self.state).alive()
    }

    pub fn memory_left(&self) -> Result<u64> {
        self.alive()?;
        Ok(lock(&self.arena).left())
    }

    pub fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        let mut arena = lock(&self.arena);
        let mut state = lock(&self.state);
        state.alive()?;
        let faults = &mut state.faults;
        faults.allocations += 1;
        if faults.plan.out_of_memory_at == Some(faults.allocations)
            || faults.plan.out_of_memory_above.is_some_and(|most| bytes > most)
        {
            return Err(arena.no_room(bytes, " (a fault was injected)"));
        }
        let ptr = arena.alloc(bytes)?;
        state.order.forget(&Span::new(ptr, bytes));
        Ok(ptr)
    }

    pub fn pinned(&self, bytes: usize) -> Result<Arc<HostMemory>> {
        {
            let mut state = lock(&self.state);
            state.alive()?;
            if state.faults.plan.no_pinned_above.is_some_and(|most| bytes > most) {
                return Err(Error::Capacity(format!(
                    "{bytes} bytes of pinned host memory are refused (a fault was injected)"
                )));
            }
        }
        let memory = Arc::new(HostMemory::new(bytes)?);
        let mut state = lock(&self.state);
        state.pinned.retain(|_, m| m.strong_count() > 0);
        state.pinned.insert(memory.device().0, Arc::downgrade(&memory));
        state.order.forget(&Span::new(memory.device(), bytes));
        Ok(memory)
    }

    /// Ends what is in flight, then frees. Trouble is told to the next call.
    pub fn free(&self, ptr: DevPtr) {
        let retired = lock(&self.arena).retire(ptr);
        let mut state = lock(&self.state);
        if let Err(problem) = retired {
            state.owed = Some(Problem::new("emulated accelerator", problem));
            return;
        }
        let until: Vec<u64> = state.lanes.iter().map(|l| l.enqueued).collect();
        state = self.wait_while(state, |s| s.lanes.iter().zip(&until).any(|(l, &n)| l.completed < n));
        if state.lost.is_some() {
            // Work that nobody waits for may still touch it: it stays retired.
            return;
        }
        drop(state);
        let mut arena = lock(&self.arena);
        if let Err(problem) = arena.free(ptr) {
            lock(&self.state).owed = Some(Problem::new("emulated accelerator", problem));
        }
    }

    /// Waits until `pending` is over or the device is lost: also by the watchdog.
    fn wait_while<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        pending: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        while state.lost.is_none() && pending(&state) {
            let limit = self.options.watchdog;
            let mut patience = limit;
            let mut late = None;
            for (since, what) in state.lanes.iter().filter_map(|l| l.running.as_ref()) {
                let left = limit.saturating_sub(since.elapsed());
                if left.is_zero() {
                    late = Some(Problem::new(
                        what,
                        format!(
                            "has not ended after {} s; the emulated accelerator is taken for lost",
                            limit.as_secs_f32()
                        ),
                    ));
                }
                patience = patience.min(left);
            }
            if let Some(problem) = late {
                self.lose(&mut state, problem);
                break;
            }
            state = self.progress.wait_timeout(state, patience).unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    /// The end: nothing waits any more.
    fn lose(&self, state: &mut State, problem: Problem) {
        state.lost.get_or_insert(problem);
        self.over.notify_all();
        self.progress.notify_all();
        self.work.iter().for_each(Condvar::notify_all);
    }

    /// Ends the lanes' threads, after what they are doing now.
    pub fn shut_down(&self) {
        lock(&self.state).shutdown = true;
        self.over.notify_all();
        self.progress.notify_all();
        self.work.iter().for_each(Condvar::notify_all);
    }

    /// Enqueues work.
    pub fn enqueue(&self, lane: Lane, op: Op) -> Result<()> {
        let failed = |problem: String| Error::Device { what: op.describe(), problem };
        let (reads, writes) = op.touches();
        // The arena stays locked until the work is in the queue: a `free` from now on waits for it.
        let arena = lock(&self.arena);
        let mut state = lock(&self.state);
        state.report(lane)?;
        let mut keep = Vec::new();
        for span in reads.iter().chain(&writes).filter(|s| s.len > 0) {
            match state.pinned(span) {
                Some(memory) => keep.push(memory),
                None => arena.check(span.ptr, span.len).map_err(failed)?,
            }
        }
        if let Some((thread, ops)) = &mut state.capture {
            let here = *thread == std::thread::current().id();
            if here && lane == Lane::Compute {
                if matches!(op, Op::Upload { .. } | Op::ToHost { .. } | Op::Graph(_)) {
                    return Err(failed("cannot be recorded".into()));
                }
                ops.push(op);
                return Ok(());
            }
            if here || lane == Lane::Compute {
                return Err(failed("the compute lane is being recorded, by one thread and alone".into()));
            }
        }
        let seq = state.lanes[lane as usize].enqueued + 1;
        if !self.options.strict_order {
            let done = Lane::ALL.map(|l| state.lanes[l as usize].completed);
            state.order.seen(&done);
        }
        if let Err(race) = state.order.enter(lane, seq, &reads, &writes) {
            return Err(failed(format!(
                "on the {}, touches {:#x}, which work on the {} {}; no event orders the two",
                name(lane),
                race.at,
                name(race.with),
                if race.wrote { "writes" } else { "reads" }
            )));
        }
        let copy = op.copied().is_some();
        let faults = &mut state.faults;
        faults.operations += 1;
        faults.copies += copy as u64;
        let lose = faults.plan.lost_at == Some(faults.operations);
        let endless = copy && faults.plan.endless_copy == Some(faults.copies);
        self.push(&mut state, lane, Step::Work(op), lose, endless, keep);
        Ok(())
    }

    fn push(
        &self,
        state: &mut State,
        lane: Lane,
        step: Step,
        lose: bool,
        endless: bool,
        keep: Vec<Arc<HostMemory>>,
    ) {
        let l = &mut state.lanes[lane as usize];
        l.enqueued += 1;
        l.queue.push_back(Job { seq: l.enqueued, step, lose, endless, _keep: keep });
        self.work[lane as usize].notify_one();
    }

    /// Whether a launch of `kernel` is refused by the plan of faults.
    pub fn may_launch(&self, kernel: &str) -> Result<()> {
        let faults = &mut lock(&self.state).faults;
        faults.launches += 1;
        let by_name = faults.plan.refuse_kernel.as_deref() == Some(kernel);
        if by_name || faults.plan.refuse_launch == Some(faults.launches) {
            return Err(Error::Device {
                what: format!("kernel {kernel}"),
                problem: "the launch was refused (a fault was injected)".into(),
            });
        }
        Ok(())
    }

    pub fn record(self: &Arc<Core>, lane: Lane) -> Result<Arc<Mark>> {
        let mut state = lock(&self.state);
        state.report(lane)?;
        state.not_capturing()?;
        let seq = state.lanes[lane as usize].enqueued + 1;
        let clock = state.order.mark(lane, seq);
        let mark = Arc::new(Mark { device: Arc::downgrade(self), lane, clock, done: OnceLock::new() });
        self.push(&mut state, lane, Step::Signal(mark.clone()), false, false, vec![]);
        Ok(mark)
    }

    pub fn wait(&self, lane: Lane, mark: &Arc<Mark>) -> Result<()> {
        let mut state = lock(&self.state);
        state.report(lane)?;
        state.not_capturing()?;
        state.order.wait(lane, &mark.clock);
        self.push(&mut state, lane, Step::Wait(mark.clone()), false, false, vec![]);
        Ok(())
    }

    /// Whether the lane has come to `mark`, and how.
    pub fn is_done(&self, mark: &Mark) -> Result<bool> {
        Core::outcome(&mut lock(&self.state), mark)
    }

    pub fn synchronize(&self, mark: &Mark) -> Result<()> {
        let state = lock(&self.state);
        state.not_capturing()?;
        let mut state = self.wait_while(state, |_| mark.done.get().is_none());
        Core::outcome(&mut state, mark).map(|_| ())
    }

    fn outcome(state: &mut State, mark: &Mark) -> Result<bool> {
        state.alive()?;
        match mark.done.get() {
            None => Ok(false),
            Some(Ok(())) => {
                state.order.seen(&mark.clock);
                Ok(true)
            }
            Some(Err(problem)) => {
                let lane = &mut state.lanes[mark.lane as usize];
                if let Some(t) = lane.trouble.as_mut().filter(|t| t.problem.is(problem)) {
                    t.through.get_or_insert(lane.enqueued);
                }
                Err(problem.error())
            }
        }
    }

    /// Records what `enqueue` enqueues.
    pub fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Vec<Op>> {
        {
            let mut state = lock(&self.state);
            state.report(Lane::Compute)?;
            if state.capture.is_some() {
                return Err(Error::Device {
                    what: "emulated accelerator".into(),
                    problem: "the compute lane is being recorded already".into(),
                });
            }
            state.capture = Some((std::thread::current().id(), Vec::new()));
        }
        /// Ends the recording, also when `enqueue` panics.
        struct Recording<'a>(&'a Core);
        impl Recording<'_> {
            fn take(&self) -> Option<(ThreadId, Vec<Op>)> {
                lock(&self.0.state).capture.take()
            }
        }
        impl Drop for Recording<'_> {
            fn drop(&mut self) {
                self.take();
            }
        }
        let recording = Recording(self);
        enqueue()?;
        Ok(recording.take().expect("nobody else ends a recording").1)
    }

    /// The thread of a lane.
    pub fn serve(&self, lane: Lane) {
        let l = lane as usize;
        let mut random = self.options.jitter.map(|seed| Random::new(seed.wrapping_mul(3) + l as u64));
        let mut state = lock(&self.state);
        loop {
            if state.over() {
                // Dropped outside the lock: closures may own anything.
                let rest = std::mem::take(&mut state.lanes[l].queue);
                state.lanes[l].completed = state.lanes[l].enqueued;
                let end = state.shutdown;
                drop(state);
                drop(rest);
                self.progress.notify_all();
                if end {
                    return;
                }
                state = lock(&self.state);
            }
            let Some(job) = state.lanes[l].queue.pop_front() else {
                if !state.shutdown {
                    state = self.work[l].wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                continue;
            };
            let trouble = state.lanes[l].trouble_of(job.seq);
            match &job.step {
                Step::Signal(mark) => {
                    let set = mark.done.set(trouble.map_or(Ok(()), Err));
                    assert!(set.is_ok(), "a mark is enqueued once");
                }
                Step::Wait(mark) => {
                    while mark.done.get().is_none() && !state.over() {
                        state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                    if let (Some(Err(problem)), None) = (mark.done.get(), trouble) {
                        state.lanes[l].trouble = Some(Trouble { problem: problem.clone(), through: None });
                    }
                }
                Step::Work(_) if trouble.is_some() => {}
                Step::Work(op) if job.lose => {
                    let why = format!("lost at {} (a fault was injected)", op.describe());
                    self.lose(&mut state, Problem::new("emulated accelerator", why));
                }
                Step::Work(op) => {
                    state.lanes[l].running = Some((Instant::now(), op.describe()));
                    drop(state);
                    let outcome = self.run(op, job.endless, random.as_mut());
                    state = lock(&self.state);
                    state.lanes[l].running = None;
                    if let Err(problem) = outcome {
                        state.lanes[l].trouble = Some(Trouble { problem, through: None });
                    }
                }
            }
            state.lanes[l].completed = job.seq;
            drop(state);
            drop(job);
            self.progress.notify_all();
            state = lock(&self.state);
        }
    }

    /// Does one piece of work, as late and as slowly as asked.
    fn run(&self, op: &Op, endless: bool, random: Option<&mut Random>) -> std::result::Result<(), Problem> {
        if endless {
            let state = lock(&self.state);
            let wait = self.over.wait_while(state, |s| !s.over());
            drop(wait.unwrap_or_else(PoisonError::into_inner));
            return Ok(());
        }
        let speed = &self.options.speed;
        let seconds = |bytes: usize, gb_s: Option<f64>| {
            gb_s.map_or(Duration::ZERO, |s| Duration::from_secs_f64(bytes as f64 / (s * 1e9)))
        };
        let transfer = match op.copied() {
            Some((Direction::ToDevice, bytes)) => seconds(bytes, speed.host_to_device),
            Some((Direction::ToHost, bytes)) => seconds(bytes, speed.device_to_host),
            _ => Duration::ZERO,
        };
        // A copy's bytes may arrive at any time between its beginning and its end.
        let mut late = false;
        if let Some(random) = random {
            if random.below(2) == 0 {
                self.pause(JITTER.mul_f64(random.unit()));
            }
            late = random.below(2) == 0;
        }
        if late {
            self.pause(transfer);
        }
        let begin = Instant::now();
        let checks = &self.options.checks;
        let kernel = |launch: &OwnedLaunch| program::launch(launch, checks);
        let check = |span: &Span| {
            let found = lock(&self.arena).check(span.ptr, span.len);
            found.map_err(|problem| Error::Device { what: op.describe(), problem })
        };
        let hooks = Hooks { kernel: &kernel, check: &check };
        // SAFETY: `enqueue` found every span allocated, and `free` waits for the work enqueued before it;
        // pinned memory is kept by the job. `order` refused work whose bytes another lane's unordered
        // work touches, and events are waited for before this runs, so nobody else uses them now.
        let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { op.run(&hooks) }));
        let outcome = match outcome {
            Ok(outcome) => outcome.map_err(|e| Problem::of(e, &op.describe())),
            Err(panic) => Err(Problem::new(op.describe(), format!("panicked: {}", message(&*panic)))),
        };
        if op.is_launch() {
            let slower = (speed.kernel_factor - 1.0).max(0.0);
            self.pause(speed.launch + begin.elapsed().mul_f64(slower));
        }
        if !late {
            self.pause(transfer);
        }
        outcome
    }

    /// Sleeps, unless everything is over.
    fn pause(&self, time: Duration) {
        if !time.is_zero() {
            let state = lock(&self.state);
            let wait = self.over.wait_timeout_while(state, time, |s| !s.over());
            drop(wait.unwrap_or_else(PoisonError::into_inner));
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

impl LaneState {
    /// The failure that work number `seq` falls under.
    fn trouble_of(&mut self, seq: u64) -> Option<Problem> {
        let trouble = self.trouble.as_ref()?;
        if trouble.through.is_some_and(|last| seq > last) {
            self.trouble = None;
            return None;
        }
        Some(trouble.problem.clone())
    }
}
