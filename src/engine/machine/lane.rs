//! The host's lane: a thread that takes jobs from one queue while the thread that issues them goes on.
//!
//! A job waits for events of the device and for earlier jobs. Of the jobs that are ready the oldest runs, alone: it has the
//! state to itself, and all workers of the pool that belongs to it. If none is ready, the lane waits for what the oldest one
//! waits for.
//!
//! The first job that fails ends the step: what was queued is dropped, whoever waits for a job is told, and the lane is idle
//! again. A panic of a job is such a failure.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::clock::{self, Moment};
use crate::device::runtime::{Event, Runtime};
use crate::{Error, Result};

/// How long either thread spins for the other before it sleeps: as long as waking up takes.
const SPIN: Duration = Duration::from_micros(30);

/// How long the lane sleeps for an event before it looks at the queue again: another job may be ready first.
const NAP: Duration = Duration::from_micros(200);

/// A job, by its number since the step began.
pub(super) type Ticket = usize;

/// When a job ran, and the operation that it was of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ran {
    pub op: usize,
    pub from: Instant,
    pub to: Instant,
    /// From when to when in emulated time, if the device keeps that.
    pub emulated: Option<(f64, f64)>,
}

/// What a job does to the state.
pub(super) type Work<S> = Box<dyn FnOnce(&mut S) -> Result<()> + Send>;

/// One piece of the host's work.
pub(super) struct Job<S> {
    /// Of which operation, by its place in the program.
    pub op: usize,
    /// Events of the device that come first.
    pub events: Vec<Event>,
    /// Jobs that come first.
    pub after: Vec<Ticket>,
    /// What it takes in emulated time.
    pub seconds: f64,
    pub work: Work<S>,
}

struct Queue<S> {
    pending: VecDeque<(Ticket, Job<S>)>,
    /// By ticket: done, or dropped.
    done: Vec<bool>,
    running: bool,
    /// Nothing more runs in this step.
    ended: bool,
    error: Option<Error>,
    ran: Vec<(Ticket, Ran)>,
    stop: bool,
}

struct Shared<S> {
    runtime: Arc<dyn Runtime>,
    state: Mutex<S>,
    queue: Mutex<Queue<S>>,
    /// Jobs given to the lane since it began, and changes of the queue by the lane: what the threads spin on.
    given: AtomicUsize,
    changes: AtomicUsize,
    to_lane: Condvar,
    from_lane: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lane whose thread has been started, and made what it begins with.
pub(super) struct Started<S> {
    thread: JoinHandle<()>,
    hand_over: mpsc::Sender<Arc<Shared<S>>>,
}

/// See the [module](self). `S` is what jobs work on.
pub(super) struct Lane<S> {
    shared: Arc<Shared<S>>,
    thread: Option<JoinHandle<()>>,
    issued: usize,
    /// When the step's jobs run, in emulated time.
    moments: Vec<Moment>,
}

impl<S: Send + 'static> Started<S> {
    /// Starts the thread, which makes something first: a pool, whose leader it will be, so that it is the thread that is
    /// pinned with the workers.
    ///
    /// # Errors
    /// The system refuses to start a thread.
    pub fn new<P: Send + 'static>(make: impl FnOnce() -> P + Send + 'static) -> Result<(Started<S>, P)> {
        let (made, take_made) = mpsc::channel();
        let (hand_over, shared) = mpsc::channel::<Arc<Shared<S>>>();
        let body = move || {
            clock::uncounted();
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

    /// Begins to take jobs, which wait for events of `runtime`.
    pub fn serve(self, state: S, runtime: Arc<dyn Runtime>) -> Lane<S> {
        let queue = Queue {
            pending: VecDeque::new(),
            done: Vec::new(),
            running: false,
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
        });
        // The thread waits for it, or has ended in a panic that `finish` would report as a job that never ran.
        self.hand_over.send(shared.clone()).expect("the lane's thread waits for its state");
        Lane { shared, thread: Some(self.thread), issued: 0, moments: Vec::new() }
    }
}

impl<S: Send + 'static> Lane<S> {
    /// The state, between steps.
    pub fn state(&self) -> MutexGuard<'_, S> {
        lock(&self.shared.state)
    }

    /// Gives the lane a job. In a step that has failed it is dropped.
    pub fn give(&mut self, job: Job<S>) -> Ticket {
        let ticket = self.issued;
        self.issued += 1;
        self.enter_time(&job);
        let mut queue = lock(&self.shared.queue);
        let ended = queue.ended;
        queue.done.push(ended);
        if !ended {
            queue.pending.push_back((ticket, job));
            self.shared.given.fetch_add(1, Ordering::Release);
            drop(queue);
            self.shared.to_lane.notify_one();
        }
        ticket
    }

    /// The job's place in emulated time.
    fn enter_time(&mut self, job: &Job<S>) {
        let runtime = &self.shared.runtime;
        let Some(clock) = runtime.clock() else { return };
        let events = job.events.iter().filter_map(|e| runtime.moment(e));
        let after = events.chain(job.after.iter().map(|&t| self.moments[t].clone())).collect();
        self.moments.push(clock.host(job.seconds, after));
    }

    /// This thread has waited for jobs: its emulated time goes on to their end.
    fn reach(&self, jobs: impl IntoIterator<Item = Ticket>) {
        if let Some(clock) = self.shared.runtime.clock() {
            jobs.into_iter().for_each(|t| clock.reach(&self.moments[t]));
        }
    }

    /// Whether every job given is done.
    pub fn is_idle(&self) -> bool {
        let queue = lock(&self.shared.queue);
        queue.pending.is_empty() && !queue.running
    }

    /// Waits until a job is done.
    ///
    /// # Errors
    /// The step has failed: the error of the first job that did, once.
    pub fn wait(&self, ticket: Ticket) -> Result<()> {
        let mut queue = self.wait_while(|q| !q.ended && !q.done[ticket]);
        match queue.ended {
            false => {
                self.reach([ticket]);
                Ok(())
            }
            true => Err(queue.failure()),
        }
    }

    /// Waits until all jobs given are done.
    ///
    /// # Errors
    /// As [`Lane::wait`].
    pub fn wait_all(&self) -> Result<()> {
        let mut queue = self.wait_while(|q| q.running || !q.pending.is_empty());
        match queue.ended {
            false => {
                self.reach(0..self.issued);
                Ok(())
            }
            true => Err(queue.failure()),
        }
    }

    /// Drops what is queued.
    pub fn cancel(&self) {
        let mut queue = lock(&self.shared.queue);
        queue.end();
        drop(queue);
        self.shared.to_lane.notify_one();
    }

    /// Waits until the lane is idle; the next job is the first of another step. Returns when the jobs ran.
    ///
    /// # Errors
    /// A job has failed, and nobody was told yet.
    pub fn finish(&mut self) -> Result<Vec<Ran>> {
        let mut queue = self.wait_while(|q| q.running || !q.pending.is_empty());
        let (error, ran) = (queue.error.take(), std::mem::take(&mut queue.ran));
        queue.done.clear();
        queue.ended = false;
        drop(queue);
        self.reach(0..self.issued);
        let emulated = |ticket: Ticket| self.moments.get(ticket).and_then(Moment::span);
        let ran = ran.into_iter().map(|(ticket, r)| Ran { emulated: emulated(ticket), ..r }).collect();
        self.issued = 0;
        self.moments.clear();
        error.map_or(Ok(ran), Err)
    }

    fn wait_while(&self, mut not_yet: impl FnMut(&Queue<S>) -> bool) -> MutexGuard<'_, Queue<S>> {
        let shared = &*self.shared;
        let since = Instant::now();
        loop {
            let seen = shared.changes.load(Ordering::Acquire);
            let queue = lock(&shared.queue);
            if !not_yet(&queue) {
                return queue;
            }
            if since.elapsed() > SPIN {
                return shared
                    .from_lane
                    .wait_while(queue, |q| not_yet(q))
                    .unwrap_or_else(PoisonError::into_inner);
            }
            drop(queue);
            while shared.changes.load(Ordering::Acquire) == seen && since.elapsed() <= SPIN {
                std::hint::spin_loop();
            }
        }
    }
}

impl<S> Queue<S> {
    /// Why the step has ended: told once.
    fn failure(&mut self) -> Error {
        self.error.take().unwrap_or_else(|| Error::Run("the step has failed already".into()))
    }

    /// Nothing more of this step runs.
    fn end(&mut self) {
        self.ended = true;
        for (ticket, _) in self.pending.drain(..) {
            self.done[ticket] = true;
        }
    }

    /// The place of the oldest job that is ready. Otherwise the event that the oldest of all waits for.
    fn ready(&self, runtime: &dyn Runtime) -> Result<std::result::Result<usize, Event>> {
        let mut oldest = None;
        for (at, (_, job)) in self.pending.iter().enumerate() {
            if !job.after.iter().all(|&t| self.done[t]) {
                continue;
            }
            let mut missing = None;
            for event in &job.events {
                if !runtime.is_done(event)? {
                    missing = Some(event);
                    break;
                }
            }
            match missing {
                None => return Ok(Ok(at)),
                Some(event) => {
                    oldest.get_or_insert(event);
                }
            }
        }
        // Jobs wait for earlier ones only, so the oldest waits for an event.
        Ok(Err(oldest.expect("a job that waits for no other").clone()))
    }
}

impl<S> Shared<S> {
    /// Runs jobs until the lane is dropped.
    fn serve(&self) {
        while let Some((ticket, job)) = self.next() {
            let from = Instant::now();
            let result = {
                let mut state = lock(&self.state);
                let work = job.work;
                catch_unwind(AssertUnwindSafe(|| work(&mut state))).unwrap_or_else(|p| Err(panicked(&*p)))
            };
            let mut queue = lock(&self.queue);
            queue.ran.push((ticket, Ran { op: job.op, from, to: Instant::now(), emulated: None }));
            queue.running = false;
            queue.done[ticket] = true;
            if let Err(error) = result {
                queue.error.get_or_insert(error);
                queue.end();
            }
            self.changed(queue);
        }
    }

    fn changed(&self, queue: MutexGuard<'_, Queue<S>>) {
        self.changes.fetch_add(1, Ordering::Release);
        drop(queue);
        self.from_lane.notify_all();
    }

    /// The next job to run; `None` when the lane is to end.
    fn next(&self) -> Option<(Ticket, Job<S>)> {
        loop {
            let mut queue = self.wait_for_jobs()?;
            let event = match queue.ready(&*self.runtime) {
                Ok(Ok(at)) => {
                    queue.running = true;
                    return queue.pending.remove(at);
                }
                Ok(Err(event)) => event,
                Err(error) => {
                    queue.error.get_or_insert(error);
                    queue.end();
                    self.changed(queue);
                    continue;
                }
            };
            drop(queue);
            let (since, given) = (Instant::now(), self.given.load(Ordering::Acquire));
            let new_job = || self.given.load(Ordering::Acquire) != given;
            let mut done = self.runtime.is_done(&event);
            while matches!(done, Ok(false)) && since.elapsed() < SPIN && !new_job() {
                std::hint::spin_loop();
                done = self.runtime.is_done(&event);
            }
            if matches!(done, Ok(false)) && !new_job() {
                done = self.runtime.synchronize_until(&event, Instant::now() + NAP);
            }
            if let Err(error) = done {
                let mut queue = lock(&self.queue);
                queue.error.get_or_insert(error);
                queue.end();
                self.changed(queue);
            }
        }
    }

    /// Waits for jobs; `None` when the lane is to end.
    fn wait_for_jobs(&self) -> Option<MutexGuard<'_, Queue<S>>> {
        let (since, given) = (Instant::now(), self.given.load(Ordering::Acquire));
        let queue = lock(&self.queue);
        let idle = |q: &mut Queue<S>| q.pending.is_empty() && !q.stop;
        let queue = if queue.pending.is_empty() && !queue.stop {
            drop(queue);
            while self.given.load(Ordering::Acquire) == given && since.elapsed() < SPIN {
                std::hint::spin_loop();
            }
            self.to_lane.wait_while(lock(&self.queue), idle).unwrap_or_else(PoisonError::into_inner)
        } else {
            queue
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
        queue.stop = true;
        drop(queue);
        self.shared.to_lane.notify_one();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulated::{EmulatedOptions, EmulatedRuntime, Speed};
    use crate::device::runtime::{Buffer, Lane as DeviceLane};

    fn runtime() -> Arc<dyn Runtime> {
        // A copy of 4 KB takes 200 ms.
        let speed = Speed { host_to_device: Some(2e-5), ..Speed::default() };
        Arc::new(EmulatedRuntime::new(EmulatedOptions { speed, ..Default::default() }).unwrap())
    }

    fn lane(runtime: &Arc<dyn Runtime>) -> Lane<Vec<usize>> {
        let (started, ()) = Started::new(|| ()).unwrap();
        started.serve(Vec::new(), runtime.clone())
    }

    fn note(op: usize, events: Vec<Event>, after: Vec<Ticket>) -> Job<Vec<usize>> {
        let work = move |seen: &mut Vec<usize>| {
            seen.push(op);
            Ok(())
        };
        Job { op, events, after, seconds: 0.0, work: Box::new(work) }
    }

    #[test]
    fn the_oldest_job_that_is_ready_runs_first() {
        let runtime = runtime();
        let buffer = Buffer::new(&runtime, 4096).unwrap();
        let mut lane = lane(&runtime);
        runtime.upload(DeviceLane::HostToDevice, buffer.ptr(), &[1; 4096]).unwrap();
        let copied = runtime.record(DeviceLane::HostToDevice).unwrap();
        // The first waits for the copy, the second for the first, the others for nothing or for each other.
        let first = lane.give(note(0, vec![copied.clone()], vec![]));
        let second = lane.give(note(1, vec![], vec![first]));
        let third = lane.give(note(2, vec![], vec![]));
        let fourth = lane.give(note(3, vec![], vec![third]));
        lane.wait(fourth).unwrap();
        assert_eq!(*lane.state(), [2, 3]);
        assert!(!lane.is_idle() && !runtime.is_done(&copied).unwrap(), "the copy takes longer");
        lane.wait(second).unwrap();
        assert!(lane.is_idle());
        let ran: Vec<usize> = lane.finish().unwrap().iter().map(|r| r.op).collect();
        assert_eq!((ran, &*lane.state()), (vec![2, 3, 0, 1], &vec![2, 3, 0, 1]));
    }

    #[test]
    fn a_job_that_fails_or_panics_ends_the_step_and_not_the_lane() {
        let runtime = runtime();
        let mut lane = lane(&runtime);
        for panics in [false, true, false, true] {
            let fails = move |_: &mut Vec<usize>| match panics {
                true => panic!("row {} of nothing", 7),
                false => Err(Error::Run("no luck".into())),
            };
            let ok = lane.give(note(0, vec![], vec![]));
            let bad = lane.give(Job {
                op: 1,
                events: vec![],
                after: vec![ok],
                seconds: 0.0,
                work: Box::new(fails),
            });
            let dropped = lane.give(note(2, vec![], vec![bad]));
            let error = lane.wait(dropped).unwrap_err().to_string();
            assert!(error.contains(if panics { "panicked: row 7 of nothing" } else { "no luck" }), "{error}");
            let late = lane.give(note(3, vec![], vec![]));
            lane.wait(late).expect_err("the step is over");
            lane.finish().expect("somebody was told");
            assert_eq!(std::mem::take(&mut *lane.state()), [0]);
        }
        // Nobody waits for the job: told at the end.
        lane.give(Job {
            op: 0,
            events: vec![],
            after: vec![],
            seconds: 0.0,
            work: Box::new(|_| Err(Error::Run("late".into()))),
        });
        assert!(lane.finish().unwrap_err().to_string().contains("late"));
        let job = lane.give(note(5, vec![], vec![]));
        lane.wait(job).unwrap();
        lane.finish().unwrap();
        assert_eq!(*lane.state(), [5]);
    }

    #[test]
    fn what_is_cancelled_does_not_run() {
        let runtime = runtime();
        let buffer = Buffer::new(&runtime, 4096).unwrap();
        let mut lane = lane(&runtime);
        runtime.upload(DeviceLane::HostToDevice, buffer.ptr(), &[1; 4096]).unwrap();
        let copied = runtime.record(DeviceLane::HostToDevice).unwrap();
        lane.give(note(0, vec![copied], vec![]));
        lane.cancel();
        assert!(lane.finish().unwrap().is_empty() && lane.state().is_empty());
        drop(lane);
        runtime.synchronize_all().unwrap();
    }

    #[test]
    fn an_event_of_a_lost_device_fails_the_step() {
        use crate::device::emulated::FaultPlan;
        let emulated = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
        let runtime: Arc<dyn Runtime> = emulated.clone();
        let buffer = Buffer::new(&runtime, 4096).unwrap();
        let mut lane = lane(&runtime);
        emulated.set_faults(FaultPlan { lost_at: Some(1), ..Default::default() });
        runtime.upload(DeviceLane::HostToDevice, buffer.ptr(), &[1; 4096]).unwrap();
        if let Ok(copied) = runtime.record(DeviceLane::HostToDevice) {
            let job = lane.give(note(0, vec![copied], vec![]));
            let error = lane.wait(job).unwrap_err();
            assert!(matches!(error, Error::Device { .. }), "{error}");
        }
        lane.finish().ok();
        let job = lane.give(note(1, vec![], vec![]));
        lane.wait(job).unwrap();
        assert_eq!(*lane.state(), [1]);
    }

    #[test]
    fn many_steps_of_short_jobs() {
        let runtime = runtime();
        let mut lane = lane(&runtime);
        for step in 0..500 {
            let jobs: Vec<Ticket> = (0..7)
                .map(|op| lane.give(note(op, vec![], op.checked_sub(1).into_iter().collect())))
                .collect();
            lane.wait(jobs[step % 7]).unwrap();
            if step % 100 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(lane.finish().unwrap().len(), 7);
        }
        assert_eq!(lane.state().len(), 3500);
    }
}
