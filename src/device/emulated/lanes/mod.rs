//! The lanes, each a thread with an in-order queue; the events between them; failures, and which call reports them.
//!
//! An error of asynchronous work (a kernel that fails its checks) makes its lane skip all later work until the error is
//! reported: by the next call on the lane, or by a call that synchronises with an event after the failure. Lanes that
//! wait for such an event fail with it. A lost device stays lost: every call returns the same error, and nothing waits
//! any more.
//!
//! Host calls: [`memory`] allocates and frees, [`submit`] enqueues work, [`events`] waits for points in lanes,
//! [`timing`] estimates the duration of work in emulated time. [`serve`] is a lane's own thread, [`turn`] a lane
//! without one. [`state`] is shared by all of these, under one lock.

mod events;
mod memory;
mod serve;
mod state;
mod submit;
mod timing;
mod turn;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub(super) use self::state::Mark;
use self::state::{Faults, Problem, State};
pub(super) use self::turn::InTurn;
use super::arena::Arena;
use super::options::{EmulatedOptions, FaultPlan};
use super::random::Random;
use crate::Result;
use crate::device::clock::Clock;
use crate::device::runtime::{DeviceInfo, Lane};
use crate::device::turns::Turns;

/// State shared by the host's calls and the lanes' threads.
pub(super) struct Core {
    pub info: DeviceInfo,
    pub options: EmulatedOptions,
    /// Keeps emulated time.
    pub clock: Option<Arc<Clock>>,
    /// The actors that run while a call waits, if lanes have no threads.
    pub turns: Option<Arc<Turns>>,
    arena: Mutex<Arena>,
    state: Mutex<State>,
    /// Random delays of the host's jobs, if work is delayed at random.
    host_random: Mutex<Option<Random>>,
    /// For each lane: signals that there is work.
    work: [Condvar; 3],
    /// Signals that work was done, or that the lanes have ended.
    progress: Condvar,
    /// Signals that the lanes have ended: the device is lost, or its last handle was dropped.
    over: Condvar,
}

fn name(lane: Lane) -> &'static str {
    match lane {
        Lane::Compute => "compute lane",
        Lane::HostToDevice => "host-to-device lane",
        Lane::DeviceToHost => "device-to-host lane",
    }
}

/// Locks and ignores poison: the state is consistent whenever a lock is released, and user code runs outside.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    pub fn new(info: DeviceInfo, options: EmulatedOptions, clock: Option<Arc<Clock>>) -> Result<Core> {
        let arena = Mutex::new(Arena::new(options.memory)?);
        let faults = Faults { plan: options.faults.clone(), ..Faults::default() };
        let state = Mutex::new(State { faults, ..State::default() });
        let work = std::array::from_fn(|_| Condvar::new());
        let (progress, over) = (Condvar::new(), Condvar::new());
        // The lanes have the seeds before this one.
        let host = options.jitter.map(|seed| Random::new(seed.wrapping_mul(3).wrapping_add(3)));
        let host_random = Mutex::new(host);
        let turns = options.turns.map(Turns::new);
        Ok(Core { info, options, clock, turns, arena, state, host_random, work, progress, over })
    }

    /// Replaces the plan of faults and restarts its counters.
    pub fn set_faults(&self, plan: FaultPlan) {
        lock(&self.state).faults = Faults { plan, ..Faults::default() };
    }

    pub fn alive(&self) -> Result<()> {
        lock(&self.state).alive()
    }

    /// Waits until `pending` is over, the deadline has passed, or the device is lost, possibly by the watchdog's
    /// decision.
    fn wait_while<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        deadline: Option<Instant>,
        pending: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        if let Some(turns) = &self.turns {
            return self.take_turns(turns, state, pending);
        }
        while state.lost.is_none() && pending(&state) {
            let limit = self.options.watchdog;
            let mut patience = limit;
            if let Some(deadline) = deadline {
                patience = patience.min(deadline.saturating_duration_since(Instant::now()));
                if patience.is_zero() {
                    break;
                }
            }
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

    /// Marks the device as lost and ends all waits.
    fn lose(&self, state: &mut State, problem: Problem) {
        state.lost.get_or_insert(problem);
        self.over.notify_all();
        self.progress.notify_all();
        self.work.iter().for_each(Condvar::notify_all);
    }

    /// Ends the lanes' threads after their current work.
    pub fn shut_down(&self) {
        lock(&self.state).shutdown = true;
        self.over.notify_all();
        self.progress.notify_all();
        self.work.iter().for_each(Condvar::notify_all);
    }
}
