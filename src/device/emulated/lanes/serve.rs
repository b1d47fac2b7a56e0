//! The thread of a lane: takes work in order and does it as late and as slowly as the options say.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::state::{Enqueued, LaneStep, Problem, State, Trouble};
use super::{Core, lock};
use crate::device::emulated::op::{CopyDirection, Hooks, Op};
use crate::device::emulated::program::{self, OwnedLaunch};
use crate::device::emulated::random::Random;
use crate::device::runtime::Lane;

/// The longest delay that jitter puts before a piece of work.
const JITTER: Duration = Duration::from_micros(400);

impl Core {
    /// The thread of a lane.
    pub fn serve(&self, lane: Lane) {
        let l = lane as usize;
        let mut random =
            self.options.jitter.map(|seed| Random::new(seed.wrapping_mul(3).wrapping_add(l as u64)));
        let mut state = lock(&self.state);
        loop {
            if state.over() {
                state = self.clear(state, l);
                self.progress.notify_all();
                if state.shutdown {
                    return;
                }
            }
            let Some(job) = state.lanes[l].queue.pop_front() else {
                if !state.shutdown {
                    state = self.work[l].wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                continue;
            };
            if let LaneStep::Wait(mark) = &job.step {
                while mark.done.get().is_none() && !state.over() {
                    state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
            state = self.pass(l, state, &job, random.as_mut());
            state.lanes[l].completed = job.seq;
            drop(state);
            drop(job);
            self.progress.notify_all();
            state = lock(&self.state);
        }
    }

    /// Completes the lane's first job, which is ready.
    pub(super) fn pass<'a>(
        &'a self,
        l: usize,
        mut state: MutexGuard<'a, State>,
        job: &Enqueued,
        random: Option<&mut Random>,
    ) -> MutexGuard<'a, State> {
        let trouble = state.lanes[l].trouble_of(job.seq);
        match &job.step {
            LaneStep::Signal(mark) => {
                if let Some(passed) = &mark.passed {
                    passed.get_or_init(Instant::now);
                }
                let set = mark.done.set(trouble.map_or(Ok(()), Err));
                assert!(set.is_ok(), "a mark is enqueued once");
            }
            LaneStep::Wait(mark) => {
                if let (Some(Err(problem)), None) = (mark.done.get(), trouble) {
                    state.lanes[l].trouble = Some(Trouble { problem: problem.clone(), through: None });
                }
            }
            LaneStep::Work(_) if trouble.is_some() => {}
            LaneStep::Work(op) if job.lose => {
                let why = format!("lost at {} (a fault was injected)", op.describe());
                self.lose(&mut state, Problem::new("emulated accelerator", why));
            }
            LaneStep::Work(op) => {
                if self.turns.is_none() {
                    state.lanes[l].running = Some((Instant::now(), op.describe()));
                }
                drop(state);
                let outcome = self.run(op, job.endless, random);
                state = lock(&self.state);
                state.lanes[l].running = None;
                if let Err(problem) = outcome {
                    state.lanes[l].trouble = Some(Trouble { problem, through: None });
                }
            }
        }
        state
    }

    /// Does one piece of work, as late and as slowly as the options say.
    fn run(&self, op: &Op, endless: bool, random: Option<&mut Random>) -> std::result::Result<(), Problem> {
        if matches!(op, Op::Uses { .. }) {
            return Ok(());
        }
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
            Some((CopyDirection::ToDevice, bytes)) => seconds(bytes, speed.host_to_device),
            Some((CopyDirection::ToHost, bytes)) => seconds(bytes, speed.device_to_host),
            _ => Duration::ZERO,
        };
        // A copy's bytes may arrive at any time between its beginning and its end.
        let mut late = false;
        if let Some(random) = random {
            self.pause(jitter(random));
            late = random.below(2) == 0;
        }
        if late {
            self.pause(transfer);
        }
        let begin = Instant::now();
        let checks = &self.options.checks;
        let kernel = |launch: &OwnedLaunch| program::launch(launch, checks);
        let hooks = Hooks { kernel: &kernel, marks: checks.races };
        // SAFETY: `enqueue` found every span allocated, and `free` waits for the work enqueued before it;
        // the job keeps pinned memory alive. `order` refused work whose bytes another lane's unordered work touches,
        // and events are waited for before this runs, so nothing else uses the bytes now.
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

    /// Marks the beginning of a job of the host; panics if the plan of faults says so.
    pub fn host_works(&self) {
        let faults = &mut lock(&self.state).faults;
        faults.host_jobs += 1;
        let panics = faults.plan.panic_host == Some(faults.host_jobs);
        assert!(!panics, "a fault was injected");
    }

    /// Marks the end of a job of the host that took `took`, and delays it as the options say.
    pub fn host_worked(&self, took: Duration) {
        let slower = (self.options.speed.host_factor - 1.0).max(0.0);
        let late = lock(&self.host_random).as_mut().map_or(Duration::ZERO, jitter);
        self.pause(late + took.mul_f64(slower));
    }

    /// Sleeps, unless the lanes have ended.
    fn pause(&self, time: Duration) {
        if !time.is_zero() {
            let state = lock(&self.state);
            let wait = self.over.wait_timeout_while(state, time, |s| !s.over());
            drop(wait.unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// A random delay, zero in half of the cases.
fn jitter(random: &mut Random) -> Duration {
    if random.below(2) == 0 { JITTER.mul_f64(random.unit()) } else { Duration::ZERO }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
