//! Points in lanes: set by one, waited for by another or by the host.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::state::{Problem, State, Step};
use super::{Core, lock};
use crate::device::emulated::order::Clock;
use crate::device::runtime::Lane;
use crate::{Error, Result};

/// A point in a lane.
pub(in crate::device::emulated) struct Mark {
    pub device: Weak<Core>,
    pub(super) lane: Lane,
    clock: Clock,
    /// Set when the lane has come to it.
    pub(super) done: OnceLock<std::result::Result<(), Problem>>,
    /// When that was, for those that keep it.
    pub(super) passed: Option<OnceLock<Instant>>,
}

impl Core {
    pub fn record(self: &Arc<Core>, lane: Lane, timed: bool) -> Result<Arc<Mark>> {
        let mut state = lock(&self.state);
        state.report(lane)?;
        state.not_capturing()?;
        let seq = state.lanes[lane as usize].enqueued + 1;
        let clock = state.order.mark(lane, seq);
        let passed = timed.then(OnceLock::new);
        let mark =
            Arc::new(Mark { device: Arc::downgrade(self), lane, clock, done: OnceLock::new(), passed });
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
        self.synchronize_until(mark, None).map(|_| ())
    }

    /// Whether it is done by the deadline.
    pub fn synchronize_until(&self, mark: &Mark, deadline: Option<Instant>) -> Result<bool> {
        let state = lock(&self.state);
        state.not_capturing()?;
        let mut state = self.wait_while(state, deadline, |_| mark.done.get().is_none());
        Core::outcome(&mut state, mark)
    }

    /// The time from one mark to another.
    pub fn elapsed(&self, from: &Mark, to: &Mark) -> Result<Duration> {
        let failed = |problem: &str| Error::Device {
            what: "emulated accelerator".into(),
            problem: format!("the time between two events that {problem}"),
        };
        if !(self.is_done(from)? && self.is_done(to)?) {
            return Err(failed("are not both done"));
        }
        let passed = |mark: &Mark| mark.passed.as_ref().and_then(OnceLock::get).copied();
        match (passed(from), passed(to)) {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(from)),
            _ => Err(failed("do not both keep it")),
        }
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
