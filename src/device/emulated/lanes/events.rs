//! Points in lanes: one lane reaches them; other lanes and the host wait for them.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::state::{LaneStep, Mark, State};
use super::{Core, lock};
use crate::device::clock::counts;
use crate::device::runtime::Lane;
use crate::{Error, Result};

impl Core {
    pub fn record(self: &Arc<Core>, lane: Lane, timed: bool) -> Result<Arc<Mark>> {
        let mut state = lock(&self.state);
        state.report(lane)?;
        state.not_capturing()?;
        let seq = state.lanes[lane as usize].enqueued + 1;
        let clock = state.order.mark(lane, seq);
        let passed = timed.then(OnceLock::new);
        let moment = self.clock.as_ref().map(|c| c.record(lane));
        let (device, done) = (Arc::downgrade(self), OnceLock::new());
        let mark = Arc::new(Mark { device, lane, clock, done, passed, moment });
        self.push(&mut state, lane, LaneStep::Signal(mark.clone()), false, false, vec![]);
        drop(state);
        self.let_some_act();
        Ok(mark)
    }

    pub fn wait(&self, lane: Lane, mark: &Arc<Mark>) -> Result<()> {
        let mut state = lock(&self.state);
        state.report(lane)?;
        state.not_capturing()?;
        state.order.wait(lane, &mark.clock);
        if let Some((clock, moment)) = self.clock.as_ref().zip(mark.moment.as_ref()) {
            clock.wait(lane, moment);
        }
        state.faults.waits += 1;
        let (waits, plan) = (state.faults.waits, &state.faults.plan);
        if !plan.forget_waits.is_some_and(|n| waits.is_multiple_of(n)) {
            self.push(&mut state, lane, LaneStep::Wait(mark.clone()), false, false, vec![]);
        }
        drop(state);
        self.let_some_act();
        Ok(())
    }

    /// Whether the lane has reached `mark`; the mark's error if the lane failed before it. In emulated time, tells the
    /// control thread whether the lane would have reached it by now, which may require waiting for it.
    pub fn is_done(&self, mark: &Mark) -> Result<bool> {
        match self.clock.as_ref().zip(mark.moment.as_ref()).filter(|_| counts()) {
            None => Core::outcome(&mut lock(&self.state), mark),
            Some((clock, moment)) if clock.is_past(moment) => self.synchronize_until(mark, None),
            Some(_) => lock(&self.state).alive().map(|()| false),
        }
    }

    pub fn synchronize(&self, mark: &Mark) -> Result<()> {
        self.synchronize_until(mark, None).map(|_| ())
    }

    /// Waits for `mark` until the deadline. Returns whether it was reached.
    pub fn synchronize_until(&self, mark: &Mark, deadline: Option<Instant>) -> Result<bool> {
        let state = lock(&self.state);
        state.not_capturing()?;
        let mut state = self.wait_while(state, deadline, |_| mark.done.get().is_none());
        let done = Core::outcome(&mut state, mark)?;
        drop(state);
        if let (true, Some(clock), Some(moment)) = (done, &self.clock, &mark.moment) {
            clock.reach(moment);
        }
        Ok(done)
    }

    /// The time from one mark to another.
    pub fn elapsed(&self, from: &Mark, to: &Mark) -> Result<Duration> {
        let failed = |problem: &str| Error::Device {
            what: "emulated accelerator".into(),
            problem: format!("the time between two events that {problem}"),
        };
        let done = {
            let mut state = lock(&self.state);
            Core::outcome(&mut state, from)? && Core::outcome(&mut state, to)?
        };
        if !done {
            return Err(failed("are not both done"));
        }
        if let (Some(from), Some(to), true) =
            (&from.moment, &to.moment, from.passed.is_some() && to.passed.is_some())
        {
            let (Some((_, from)), Some((_, to))) = (from.span(), to.span()) else {
                return Err(failed("nobody has waited for"));
            };
            return Ok(Duration::from_secs_f64((to - from).max(0.0)));
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
