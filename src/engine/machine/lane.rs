//! The host's lane: a thread that takes jobs from one queue while the issuing thread goes on.
//!
//! A job waits for events of the device and for earlier jobs. Among the ready jobs the oldest of the step runs, or else
//! the oldest of a cohort, for which the device does not wait. It runs alone, with exclusive access to the state and
//! with all workers of its pool. If none is ready, the lane waits for the event that the oldest one waits for.
//!
//! The first job that fails ends the step: queued jobs are dropped, threads that wait for a job get the error, and the lane is idle
//! again. A panic of a job is such a failure.
//!
//! A detached job, which belongs to a parked cohort, outlives the step, and its failure affects only its cohort
//! ([`Detached`]).
//!
//! If the device's lanes take turns ([`crate::device::Turns`]), this lane does, too: it has no thread, and runs any of
//! the ready jobs.

pub(super) mod hand_over;

use std::any::Any;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::lowered::Lowered;
use super::sync::{SyncState, SyncWord};
use crate::device::{Actor, Event, Moment, Runtime, uncount_waits};
use crate::host::{ActiveWait, unpin_current_thread};
use crate::{Error, Result};

/// How long either thread spins for the other before it sleeps, about as long as waking up takes; while the lane waits actively
/// ([`Lane::wait_actively`]), they go on spinning.
const SPIN: Duration = Duration::from_micros(30);

/// Spins between two questions about an event: each takes the driver's lock, which the issuing thread needs.
const BETWEEN: usize = 16;

/// How long the lane sleeps for an event before it checks the queue again, since another job may be ready first.
const NAP: Duration = Duration::from_micros(200);

/// The operation of a job that belongs to none: it only prepares what others need, and nothing waits for it.
pub(super) const NONE: usize = usize::MAX;

/// A job's number, counted since the lane began.
pub(super) type Ticket = usize;

/// A job of a cohort. It belongs to a chain, whose first job begins the work and whose last one marks it as ready.
pub(super) struct Detached {
    /// The cohort's sub-batch.
    pub of: usize,
    pub word: Arc<SyncWord>,
    pub epoch: u32,
    /// The error if it failed, written before the word reports the failure.
    pub error: Arc<Mutex<Option<Error>>>,
    pub first: bool,
    pub last: bool,
}

impl Detached {
    /// Whether the job should run: its work must not have been given up or have failed.
    fn begin(&self) -> bool {
        if self.first { self.word.begin(self.epoch) } else { self.word.has_begun(self.epoch) }
    }

    fn end(&self, result: Result<()>) {
        match result {
            Err(error) => {
                *lock(&self.error) = Some(error);
                self.word.fail(self.epoch);
            }
            Ok(()) if self.last => self.word.complete(self.epoch),
            Ok(()) => {}
        }
    }
}

/// When a job ran, and its operation.
#[derive(Clone)]
pub(super) struct Ran {
    pub op: usize,
    /// The job's program, if it may be an earlier step's.
    pub program: Option<Arc<Lowered>>,
    pub from: Instant,
    pub to: Instant,
    /// Begin and end in emulated time, if the device keeps it.
    pub emulated: Option<(f64, f64)>,
}

impl fmt::Debug for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ran").field("op", &self.op).field("emulated", &self.emulated).finish_non_exhaustive()
    }
}

/// The work of a job on the state.
pub(super) type Work<S> = Box<dyn FnOnce(&mut S) -> Result<()> + Send>;

/// One piece of the host's work.
pub(super) struct HostJob<S> {
    /// The job's operation, by its place in the program, or [`NONE`].
    pub op: usize,
    /// Events of the device that it waits for.
    pub events: Vec<Event>,
    /// Jobs that it waits for.
    pub after: Vec<Ticket>,
    /// Its duration in emulated time, alone.
    pub seconds: f64,
    /// Whether it is attention, which copies over the link slow down.
    pub attends: bool,
    /// For a job that outlives the step, its owner.
    pub detached: Option<Detached>,
    /// The operation's program, if it may be an earlier step's.
    pub program: Option<Arc<Lowered>>,
    pub work: Work<S>,
}

impl<S> HostJob<S> {
    /// Whether the device may wait for it, which it never does for a cohort.
    fn is_first(&self) -> bool {
        self.detached.is_none() || self.op == NONE
    }
}

struct Queue<S> {
    pending: VecDeque<(Ticket, HostJob<S>)>,
    /// Jobs that have been given but are neither done nor dropped.
    open: HashSet<Ticket>,
    /// Number of these that belong to the step.
    of_step: usize,
    /// Whether nothing more runs in this step.
    ended: bool,
    error: Option<Error>,
    ran: Vec<(Ticket, Ran)>,
    stop: bool,
}

struct Shared<S> {
    runtime: Arc<dyn Runtime>,
    state: Mutex<S>,
    queue: Mutex<Queue<S>>,
    /// Number of jobs given to the lane since it began, then the number of changes of the queue by the lane; threads
    /// spin on these.
    given: AtomicUsize,
    changes: AtomicUsize,
    to_lane: Condvar,
    from_lane: Condvar,
    /// Keeps both threads, and the workers, awake during a step of two sides; without it each sleeps when it has nothing to do.
    active_wait: Option<ActiveWait>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lane whose thread has started and made its initial state.
pub(super) struct Started<S> {
    thread: JoinHandle<()>,
    hand_over: mpsc::Sender<Arc<Shared<S>>>,
}

/// See the [module](self). `S` is the state that jobs work on.
pub(super) struct Lane<S> {
    shared: Arc<Shared<S>>,
    thread: Option<JoinHandle<()>>,
    issued: usize,
    /// The step's first job.
    step: Ticket,
    /// Emulated times of the step's jobs, and of those that outlive it.
    moments: HashMap<Ticket, Moment>,
    /// The sub-batches of jobs that outlive the step.
    detached: HashMap<Ticket, usize>,
}

impl<S: Send + 'static> Started<S> {
    /// Starts the thread, which first calls `make`: it creates a pool whose leader it will be, so that this thread is
    /// pinned with the workers.
    ///
    /// # Errors
    /// If the system refuses to start a thread.
    pub fn new<P: Send + 'static>(make: impl FnOnce() -> P + Send + 'static) -> Result<(Started<S>, P)> {
        let (made, take_made) = mpsc::channel();
        let (hand_over, shared) = mpsc::channel::<Arc<Shared<S>>>();
        let body = move || {
            // Not on the core of the thread that starts it, with which it alternates: a pool may have pinned that one.
            unpin_current_thread();
            uncount_waits();
            if made.send(make()).is_ok()
                && let Ok(shared) = shared.recv()
            {
                shared.serve();
            }
        };
        let failed = |problem: String| Error::Run(format!("the host's lane: {problem}"));
        let thread = std::thread::Builder::new().name("tandem-host".into()).spawn(body);
        let thread = thread.map_err(|e| failed(format!("the system refuses to start a thread: {e}")))?;
        let made = take_made.recv().map_err(|_| failed("no workers could be started".into()))?;
        Ok((Started { thread, hand_over }, made))
    }

    /// Begins to take jobs, which wait for events of `runtime`. `active_wait` is for machines with a core for every thread.
    pub fn serve(self, state: S, runtime: Arc<dyn Runtime>, active_wait: Option<ActiveWait>) -> Lane<S> {
        let queue = Queue {
            pending: VecDeque::new(),
            open: HashSet::new(),
            of_step: 0,
            ended: false,
            error: None,
            ran: Vec::new(),
            stop: false,
        };
        let shared = Arc::new(Shared {
            runtime,
            state: Mutex::new(state),
            queue: Mutex::new(queue),
            given: AtomicUsize::new(0),
            changes: AtomicUsize::new(0),
            to_lane: Condvar::new(),
            from_lane: Condvar::new(),
            active_wait,
        });
        let thread = match shared.runtime.turns() {
            None => {
                // The thread waits for it, or has ended in a panic that `finish` would report as a job that never ran.
                self.hand_over.send(shared.clone()).expect("the lane's thread waits for its state");
                Some(self.thread)
            }
            Some(turns) => {
                drop(self.hand_over);
                self.thread.join().ok();
                let actor: Arc<dyn Actor> = shared.clone();
                turns.add(Arc::downgrade(&actor));
                None
            }
        };
        Lane { shared, thread, issued: 0, step: 0, moments: HashMap::new(), detached: HashMap::new() }
    }
}

impl<S: Send + 'static> Lane<S> {
    /// The state, between steps.
    pub fn state(&self) -> MutexGuard<'_, S> {
        lock(&self.shared.state)
    }

    /// From now on neither this thread, waiting for a job, nor the lane and its workers, waiting for one, sleep: until
    /// [`Lane::wait_passively`], or for `most` at the longest. Nothing without a [`ActiveWait`].
    pub fn wait_actively(&self, most: Duration) {
        if let Some(active_wait) = &self.shared.active_wait {
            active_wait.begin(most);
            self.shared.to_lane.notify_one();
        }
    }

    /// From now on they sleep when they have nothing to do.
    pub fn wait_passively(&self) {
        if let Some(active_wait) = &self.shared.active_wait {
            active_wait.end();
        }
    }

    /// Gives the lane a job. If the step has failed, a job of the step is dropped.
    pub fn give(&mut self, job: HostJob<S>) -> Ticket {
        let ticket = self.issued;
        self.issued += 1;
        self.enter_time(ticket, &job);
        if let Some(detached) = &job.detached {
            self.detached.insert(ticket, detached.of);
        }
        let mut queue = lock(&self.shared.queue);
        let of_step = job.detached.is_none();
        if !queue.ended || !of_step {
            queue.open.insert(ticket);
            queue.of_step += usize::from(of_step);
            queue.pending.push_back((ticket, job));
            drop(queue);
            // After the lock is free: who spins on this takes it at once.
            self.shared.given.fetch_add(1, Ordering::Release);
            match self.shared.runtime.turns() {
                // Waking is a system call even if no thread waits.
                None => self.shared.to_lane.notify_one(),
                Some(turns) => turns.some(),
            }
        }
        ticket
    }

    /// Enters the job in emulated time.
    fn enter_time(&mut self, ticket: Ticket, job: &HostJob<S>) {
        let runtime = &self.shared.runtime;
        let Some(clock) = runtime.clock() else { return };
        let events = job.events.iter().filter_map(|e| runtime.moment(e));
        let after = events.chain(job.after.iter().map(|t| self.moments[t].clone())).collect();
        self.moments.insert(ticket, clock.host(job.seconds, after, job.is_first(), job.attends));
    }

    /// Advances this thread's emulated time to the end of jobs that it has waited for.
    pub fn reach(&self, jobs: impl IntoIterator<Item = Ticket>) {
        if let Some(clock) = self.shared.runtime.clock() {
            jobs.into_iter().for_each(|t| clock.reach(&self.moments[&t]));
        }
    }

    /// The step's jobs.
    fn of_step(&self) -> Vec<Ticket> {
        (self.step..self.issued).filter(|t| !self.detached.contains_key(t)).collect()
    }

    /// Whether no job waits for events.
    pub fn is_idle(&self) -> bool {
        lock(&self.shared.queue).pending.is_empty()
    }

    /// Whether a detached job has ended in emulated time; `None` in real time.
    pub fn is_past(&self, job: Ticket) -> Option<bool> {
        let clock = self.shared.runtime.clock()?;
        Some(self.moments.get(&job).is_none_or(|moment| clock.is_past(moment)))
    }

    /// In emulated time, the detached job that ends first, to which this thread's time advances. `None` in real time.
    pub fn reach_first(&self, jobs: impl Iterator<Item = Ticket>) -> Option<Ticket> {
        let clock = self.shared.runtime.clock()?;
        let end = |t: Ticket| Some((t, clock.end(self.moments.get(&t)?)));
        let first = jobs.filter_map(end).min_by(|a, b| a.1.total_cmp(&b.1))?.0;
        clock.reach(&self.moments[&first]);
        Some(first)
    }

    /// Waits until detached work has ended or the deadline has passed. Returns whether it has ended.
    pub fn wait_for_end(&self, word: &SyncWord, epoch: u32, deadline: Option<Instant>) -> bool {
        let not_yet = || word.look(epoch) == SyncState::Waiting;
        if let Some(turns) = self.shared.runtime.turns() {
            while not_yet() {
                self.shared.turn(turns);
            }
            return true;
        }
        let mut queue = lock(&self.shared.queue);
        while not_yet() {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            let wait = left.unwrap_or(Duration::from_secs(1));
            let waited = self.shared.from_lane.wait_timeout(queue, wait);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Waits until `ended` returns that detached work has ended.
    pub fn wait_for_ends(&self, mut ended: impl FnMut() -> bool) {
        drop(self.wait_while(|_| !ended()));
    }

    /// The times of a sub-batch's detached jobs before `job` are no longer needed.
    pub fn forget(&mut self, of: usize, before: Ticket) {
        let gone = |t: &Ticket, b: usize| b == of && *t < before;
        let detached = &self.detached;
        self.moments.retain(|t, _| !detached.get(t).is_some_and(|&b| gone(t, b)));
        // Times of this step's jobs are needed when it ends.
        let step = self.step;
        self.detached.retain(|t, b| !gone(t, *b) || *t >= step);
    }

    /// Waits until a job is done.
    ///
    /// # Errors
    /// If the step has failed: the error of the first failed job, reported once.
    pub fn wait(&self, ticket: Ticket) -> Result<()> {
        let mut queue = self.wait_while(|q| !q.ended && q.open.contains(&ticket));
        match queue.ended {
            false => {
                self.reach([ticket]);
                Ok(())
            }
            true => Err(queue.failure()),
        }
    }

    /// Waits until all jobs of the step are done.
    ///
    /// # Errors
    /// As [`Lane::wait`].
    pub fn wait_all(&self) -> Result<()> {
        let mut queue = self.wait_while(|q| q.of_step > 0);
        match queue.ended {
            false => {
                self.reach(self.of_step());
                Ok(())
            }
            true => Err(queue.failure()),
        }
    }

    /// Drops the step's queued jobs.
    pub fn cancel(&self) {
        let mut queue = lock(&self.shared.queue);
        queue.end();
        drop(queue);
        self.shared.to_lane.notify_one();
    }

    /// Waits until the step's jobs are done and ends the step. Returns when jobs ran, including detached ones of
    /// earlier steps.
    ///
    /// # Errors
    /// If a job of the step has failed and the error has not been reported yet.
    pub fn finish(&mut self) -> Result<Vec<Ran>> {
        let mut queue = self.wait_while(|q| q.of_step > 0);
        let (error, mut ran) = (queue.error.take(), std::mem::take(&mut queue.ran));
        queue.ended = false;
        drop(queue);
        self.reach(self.of_step());
        for (ticket, ran) in &mut ran {
            ran.emulated = self.moments.get(ticket).and_then(Moment::span);
        }
        if self.shared.runtime.clock().is_some() {
            // This computer may be ahead of emulated time; such jobs are reported later.
            let (done, early) = ran.into_iter().partition(|(_, r): &(_, Ran)| r.emulated.is_some());
            ran = done;
            lock(&self.shared.queue).ran.splice(0..0, early);
        }
        let of_step = self.of_step();
        of_step.iter().for_each(|t| drop(self.moments.remove(t)));
        self.step = self.issued;
        let ran = ran.into_iter().map(|(_, ran)| ran).collect();
        error.map_or(Ok(ran), Err)
    }

    fn wait_while(&self, mut not_yet: impl FnMut(&Queue<S>) -> bool) -> MutexGuard<'_, Queue<S>> {
        let shared = &*self.shared;
        if let Some(turns) = shared.runtime.turns() {
            loop {
                let queue = lock(&shared.queue);
                if !not_yet(&queue) {
                    return queue;
                }
                drop(queue);
                shared.turn(turns);
            }
        }
        let since = Instant::now();
        loop {
            let seen = shared.changes.load(Ordering::Acquire);
            let queue = lock(&shared.queue);
            if !not_yet(&queue) {
                return queue;
            }
            if !shared.spins(since) {
                return shared
                    .from_lane
                    .wait_while(queue, |q| not_yet(q))
                    .unwrap_or_else(PoisonError::into_inner);
            }
            drop(queue);
            while shared.changes.load(Ordering::Acquire) == seen && shared.spins(since) {
                std::hint::spin_loop();
            }
        }
    }
}

impl<S> Queue<S> {
    /// The error that ended the step, returned once.
    fn failure(&mut self) -> Error {
        self.error.take().unwrap_or_else(|| Error::Run("the step has failed already".into()))
    }

    /// Ends the step: no more of its jobs run.
    fn end(&mut self) {
        self.ended = true;
        let (kept, dropped) = self.pending.drain(..).partition(|(_, job)| job.detached.is_some());
        self.pending = kept;
        let dropped: VecDeque<(Ticket, HostJob<S>)> = dropped;
        for (ticket, _) in &dropped {
            self.open.remove(ticket);
        }
        self.of_step -= dropped.len();
    }

    /// Called after the device failed: no job that waits for it runs, of this step or of a cohort.
    fn fail(&mut self, error: Error) {
        for (ticket, job) in self.pending.drain(..) {
            self.open.remove(&ticket);
            match &job.detached {
                None => self.of_step -= 1,
                Some(detached) if detached.begin() => {
                    detached.end(Err(Error::Run(format!("the device failed: {error}"))));
                }
                Some(_) => {}
            }
        }
        self.error.get_or_insert(error);
        self.ended = true;
    }

    /// The index of the oldest ready job of the step, or else of a cohort. If none is ready, the event that the oldest
    /// job waits for.
    fn ready(&self, runtime: &dyn Runtime) -> Result<std::result::Result<usize, Event>> {
        let (mut oldest, mut cohort) = (None, None);
        for (at, (_, job)) in self.pending.iter().enumerate() {
            if job.after.iter().any(|t| self.open.contains(t)) {
                continue;
            }
            match missing(job, runtime)? {
                None if job.is_first() => return Ok(Ok(at)),
                None => {
                    cohort.get_or_insert(at);
                }
                Some(event) => {
                    oldest.get_or_insert(event);
                }
            }
        }
        if let Some(at) = cohort {
            return Ok(Ok(at));
        }
        // Jobs wait for earlier ones only, so the oldest waits for an event.
        Ok(Err(oldest.expect("a job that waits for no other").clone()))
    }
}

/// An event that a job still waits for.
fn missing<'a, S>(job: &'a HostJob<S>, runtime: &dyn Runtime) -> Result<Option<&'a Event>> {
    for event in &job.events {
        if !runtime.is_done(event)? {
            return Ok(Some(event));
        }
    }
    Ok(None)
}

impl<S> Shared<S> {
    fn is_active(&self) -> bool {
        self.active_wait.as_ref().is_some_and(ActiveWait::is_on)
    }

    /// Whether a thread that has waited since `since` spins on.
    fn spins(&self, since: Instant) -> bool {
        since.elapsed() < SPIN || self.is_active()
    }

    /// Runs jobs until the lane is dropped.
    fn serve(&self) {
        while let Some((ticket, job)) = self.next() {
            self.run(ticket, job);
        }
    }

    /// Runs a job.
    fn run(&self, ticket: Ticket, job: HostJob<S>) {
        let HostJob { op, detached, program, work, .. } = job;
        let runs = detached.as_ref().is_none_or(Detached::begin);
        let from = Instant::now();
        let result = match runs {
            true => {
                let mut state = lock(&self.state);
                let work = || {
                    self.runtime.host_works();
                    work(&mut state)
                };
                catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|p| Err(panicked(&*p)))
            }
            false => Ok(()),
        };
        self.runtime.host_worked(from.elapsed());
        let mut queue = lock(&self.queue);
        if runs && op != NONE {
            queue.ran.push((ticket, Ran { op, program, from, to: Instant::now(), emulated: None }));
        }
        queue.open.remove(&ticket);
        match (detached, result) {
            (Some(detached), result) if runs => detached.end(result),
            (Some(_), _) => {}
            (None, result) => {
                queue.of_step -= 1;
                if let Err(error) = result {
                    queue.error.get_or_insert(error);
                    queue.end();
                }
            }
        }
        self.changed(queue);
    }

    fn changed(&self, queue: MutexGuard<'_, Queue<S>>) {
        drop(queue);
        self.changes.fetch_add(1, Ordering::Release);
        if self.runtime.turns().is_none() {
            self.from_lane.notify_all();
        }
    }

    /// The next job to run; `None` when the lane is to end.
    fn next(&self) -> Option<(Ticket, HostJob<S>)> {
        loop {
            let mut queue = self.wait_for_jobs()?;
            let event = match queue.ready(&*self.runtime) {
                Ok(Ok(at)) => return queue.pending.remove(at),
                Ok(Err(event)) => event,
                Err(error) => {
                    queue.fail(error);
                    self.changed(queue);
                    continue;
                }
            };
            // While locked: a job that comes later counts as new.
            let given = self.given.load(Ordering::Acquire);
            drop(queue);
            let since = Instant::now();
            let new_job = || self.given.load(Ordering::Acquire) != given;
            let mut done = self.runtime.is_done(&event);
            while matches!(done, Ok(false)) && self.spins(since) && !new_job() {
                (0..BETWEEN).for_each(|_| std::hint::spin_loop());
                done = self.runtime.is_done(&event);
            }
            if matches!(done, Ok(false)) && !new_job() {
                done = self.runtime.synchronize_until(&event, Instant::now() + NAP);
            }
            if let Err(error) = done {
                let mut queue = lock(&self.queue);
                queue.fail(error);
                self.changed(queue);
            }
        }
    }

    /// Waits for jobs; `None` when the lane is to end.
    fn wait_for_jobs(&self) -> Option<MutexGuard<'_, Queue<S>>> {
        let (since, mut given) = (Instant::now(), self.given.load(Ordering::Acquire));
        let mut queue = lock(&self.queue);
        let idle = |q: &mut Queue<S>| q.pending.is_empty() && !q.stop && !self.is_active();
        let queue = loop {
            if !queue.pending.is_empty() || queue.stop {
                break queue;
            }
            drop(queue);
            while self.given.load(Ordering::Acquire) == given && self.spins(since) {
                std::hint::spin_loop();
            }
            let waited = self.to_lane.wait_while(lock(&self.queue), idle);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
            // Woken to spin, or with a job.
            given = self.given.load(Ordering::Acquire);
        };
        (!queue.stop).then_some(queue)
    }
}

fn panicked(payload: &(dyn Any + Send)) -> Error {
    let message = payload.downcast_ref::<&str>().copied();
    let message = message.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    Error::Run(format!("an operation of the host panicked: {}", message.unwrap_or("no message")))
}

impl<S> Drop for Lane<S> {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.end();
        queue.pending.clear();
        queue.stop = true;
        drop(queue);
        self.shared.to_lane.notify_one();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

mod turn;

#[cfg(test)]
mod tests;
