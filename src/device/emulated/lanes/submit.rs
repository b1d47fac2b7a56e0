//! Enqueueing. All checks happen here, before a lane sees the work.

use std::sync::Arc;
use std::thread::ThreadId;

use super::state::{Enqueued, LaneStep, State};
use super::{Core, lock, name};
use crate::device::emulated::op::{Op, Span};
use crate::device::emulated::pinned::HostBytes;
use crate::device::runtime::Lane;
use crate::{Error, Result};

impl Core {
    /// Enqueues work.
    pub fn enqueue(&self, lane: Lane, op: Op) -> Result<()> {
        let failed = |problem: String| Error::Device { what: op.describe(), problem };
        let (reads, writes) = op.touches();
        // The arena stays locked until the work is in the queue, so that a later `free` waits for the work.
        let arena = lock(&self.arena);
        let mut state = lock(&self.state);
        state.report(lane)?;
        let mut keep = Vec::new();
        for span in reads.iter().chain(writes.iter()).filter(|s| s.len > 0) {
            match if arena.holds(span.ptr) { None } else { state.pinned(span) } {
                Some(memory) => keep.push(memory),
                None => arena.check(span.ptr, span.len).map_err(failed)?,
            }
        }
        if let Some((thread, ops)) = &mut state.capture {
            let here = *thread == std::thread::current().id();
            if here && lane == Lane::Compute {
                if matches!(op, Op::Uses { .. }) {
                    // A replay touches other pages, which are declared then.
                    return Ok(());
                }
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
        state.order.enter(lane, seq, &reads, &writes).map_err(|race| {
            let at = format!("on the {}, touches {:#x}, which", name(lane), race.at);
            let does = if race.wrote { "writes" } else { "reads" };
            failed(match race.with {
                Some(with) => format!("{at} work on the {} {does}; no event orders the two", name(with)),
                None => format!("{at} the host {does} in place; nobody has waited for it"),
            })
        })?;
        if matches!(op, Op::Uses { .. }) {
            // Declaring takes no time, and does not count as an operation for the plan of faults.
            self.push(&mut state, lane, LaneStep::Work(op), false, false, keep);
            return Ok(());
        }
        let copy = op.copied().is_some();
        let faults = &mut state.faults;
        faults.operations += 1;
        faults.copies += copy as u64;
        let lose = faults.plan.lost_at == Some(faults.operations);
        let endless = copy && faults.plan.endless_copy == Some(faults.copies);
        self.enter_time(lane, &op);
        self.push(&mut state, lane, LaneStep::Work(op), lose, endless, keep);
        drop((state, arena));
        self.let_some_act();
        Ok(())
    }

    /// Checks an access of the host to memory.
    pub fn host_access(&self, reads: &[Span], writes: &[Span]) -> Result<()> {
        let mut state = lock(&self.state);
        if !self.options.strict_order {
            let done = Lane::ALL.map(|l| state.lanes[l as usize].completed);
            state.order.seen(&done);
        }
        state.order.host(reads, writes).map_err(|race| Error::Device {
            what: "the host".into(),
            problem: format!(
                "touches {:#x}, which work on the {} {}; nobody has waited for it",
                race.at,
                race.with.map_or("host", name),
                if race.wrote { "writes" } else { "reads" }
            ),
        })
    }

    /// Begins an in-place use of memory by the host, which ends with [`Core::host_used`].
    pub fn host_use(&self, reads: Vec<Span>, writes: Vec<Span>) -> u64 {
        lock(&self.state).order.uses(reads, writes)
    }

    /// Ends a [`Core::host_use`].
    pub fn host_used(&self, id: u64) {
        lock(&self.state).order.used(id);
    }

    pub(super) fn push(
        &self,
        state: &mut State,
        lane: Lane,
        step: LaneStep,
        lose: bool,
        endless: bool,
        keep: Vec<Arc<HostBytes>>,
    ) {
        let l = &mut state.lanes[lane as usize];
        l.enqueued += 1;
        l.queue.push_back(Enqueued { seq: l.enqueued, step, lose, endless, _keep: keep });
        // Waking is a system call even if no thread waits.
        if self.turns.is_none() {
            self.work[lane as usize].notify_one();
        }
    }

    /// Returns an error if the plan of faults refuses a launch of `kernel`.
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

    /// Records the work that `enqueue` enqueues.
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
        /// Ends the recording when dropped, also if `enqueue` panics.
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
}
