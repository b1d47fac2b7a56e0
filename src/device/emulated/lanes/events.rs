//! Points in lanes: set by one, waited for by another or by the host.

use std::sync::{Arc, OnceLock, Weak};

use super::state::{Problem, State, Step};
use super::{Core, lock};
use crate::Result;
use crate::device::emulated::order::Clock;
use crate::device::runtime::Lane;

/// A point in a lane.
pub(in crate::device::emulated) struct Mark {
    pub device: Weak<Core>,
    pub(super) lane: Lane,
    clock: Clock,
    /// Set when the lane has come to it.
    pub(super) done: OnceLock<std::result::Result<(), Problem>>,
}

impl Core {
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
}
