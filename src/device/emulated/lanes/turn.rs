//! Lanes without threads: each does one piece of work when its turn comes.

use std::sync::{Arc, MutexGuard, Weak};

use super::state::{LaneStep, Problem, State};
use super::{Core, lock};
use crate::device::runtime::Lane;
use crate::device::turns::{Actor, Turns};

/// A lane that acts in turn.
pub(in crate::device::emulated) struct InTurn {
    core: Weak<Core>,
    lane: Lane,
}

impl InTurn {
    pub fn new(core: &Arc<Core>, lane: Lane) -> InTurn {
        InTurn { core: Arc::downgrade(core), lane }
    }
}

impl Actor for InTurn {
    fn act(&self, _: &mut dyn FnMut(usize) -> usize) -> bool {
        self.core.upgrade().is_some_and(|core| core.act(self.lane))
    }
}

impl Core {
    /// Does a lane's first piece of work. Returns false if there is none, or if it has to wait.
    fn act(&self, lane: Lane) -> bool {
        let l = lane as usize;
        let mut state = lock(&self.state);
        if state.over() {
            drop(self.clear(state, l));
            return false;
        }
        let Some(job) = state.lanes[l].queue.front() else { return false };
        let waits = match &job.step {
            LaneStep::Wait(mark) => mark.done.get().is_none(),
            LaneStep::Work(_) => job.endless && state.lanes[l].trouble.is_none(),
            LaneStep::Signal(_) => false,
        };
        if waits {
            return false;
        }
        let job = state.lanes[l].queue.pop_front().expect("looked at");
        state = self.pass(l, state, &job, None);
        state.lanes[l].completed = job.seq;
        // Work is dropped outside the lock, since closures may own anything.
        drop(state);
        drop(job);
        true
    }

    /// Discards the work that a lane will never do.
    pub(super) fn clear<'a>(&'a self, mut state: MutexGuard<'a, State>, l: usize) -> MutexGuard<'a, State> {
        let rest = std::mem::take(&mut state.lanes[l].queue);
        state.lanes[l].completed = state.lanes[l].enqueued;
        // Dropped outside the lock, for the same reason.
        drop(state);
        drop(rest);
        lock(&self.state)
    }

    /// Lets one actor act, if lanes have no threads of their own.
    pub(super) fn let_some_act(&self) {
        if let Some(turns) = &self.turns {
            turns.some();
        }
    }

    /// Lets others act until `pending` is over. If none can act, the device is declared lost, as the watchdog does
    /// where lanes have threads.
    pub(super) fn take_turns<'a>(
        &'a self,
        turns: &Turns,
        mut state: MutexGuard<'a, State>,
        pending: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        while state.lost.is_none() && pending(&state) {
            drop(state);
            let acted = turns.one();
            state = lock(&self.state);
            if !acted && state.lost.is_none() && pending(&state) {
                let endless = state.lanes.iter().filter_map(|l| l.queue.front()).find(|job| job.endless);
                let problem = match endless.map(|job| &job.step) {
                    Some(LaneStep::Work(op)) => {
                        Problem::new(op.describe(), "never ends; the emulated accelerator is taken for lost")
                    }
                    _ => Problem::new("emulated accelerator", "deadlock: its work waits for itself"),
                };
                self.lose(&mut state, problem);
            }
        }
        state
    }
}
