//! Records when operations ran: the host's by the clock of the computing thread, the device's by events on its lanes.

use std::time::{Duration, Instant};

use super::device::lane;
use super::lane::Ran;
use crate::Result;
use crate::device::{Event, Lane, Runtime};

use crate::program::{Op, Unit};
use crate::timeline::{Timeline, Traced};

/// A step's operations of the device, whose times are known once it is done.
struct Pending {
    op: usize,
    traced: Traced,
    from: Event,
    to: Event,
}

/// See the [module](self).
pub(super) struct Trace {
    began: Instant,
    /// The beginning in emulated time, if the device keeps it.
    emulated: Option<f64>,
    step: u32,
    /// The common point of the device's and the host's clocks: an event on an idle lane, and when it was recorded.
    zero: Option<(Event, Duration)>,
    pending: Vec<Pending>,
    /// Spans of the step, with their places in the program.
    spans: Vec<(usize, Traced)>,
    pub timeline: Timeline,
}

impl Trace {
    pub fn new(emulated: Option<f64>) -> Trace {
        Trace {
            began: Instant::now(),
            emulated,
            step: 0,
            zero: None,
            pending: Vec::new(),
            spans: Vec::new(),
            timeline: Timeline::default(),
        }
    }

    /// Begins a step; the device, if there is one, must be idle.
    pub fn begin_step(&mut self, runtime: Option<&dyn Runtime>) -> Result<()> {
        if let Some(runtime) = runtime {
            let zero = runtime.record_timed(Lane::Compute)?;
            let since = match (self.emulated, runtime.clock()) {
                (Some(began), Some(clock)) => Duration::from_secs_f64((clock.now() - began).max(0.0)),
                _ => self.began.elapsed(),
            };
            self.zero = Some((zero, since));
        }
        Ok(())
    }

    fn traced(&self, op: &Op, unit: Unit, cohort: Option<u8>) -> Traced {
        let (name, layer, rows) = (op.kind.name(), op.layer, op.rows.end - op.rows.start);
        let (step, sub_batch) = (self.step, op.sub_batch);
        Traced { name, unit, layer, rows, sub_batch, cohort, step, start: 0.0, end: 0.0 }
    }

    /// Records the check of a cohort: whether it joins or stays parked.
    pub fn looked(&mut self, at: usize, op: &Op, joins: bool, runtime: &dyn Runtime) -> Result<()> {
        let mut traced = self.traced(op, op.unit, Some(op.sub_batch));
        traced.name = if joins { "join" } else { "parked" };
        let now = runtime.record_timed(lane(op.unit))?;
        self.pending.push(Pending { op: at, traced, from: now.clone(), to: now });
        Ok(())
    }

    /// Records that the operation at `at`, of `cohort` if any, has been enqueued after `from`.
    pub fn enqueued(
        &mut self,
        at: usize,
        op: &Op,
        cohort: Option<u8>,
        from: Event,
        runtime: &dyn Runtime,
    ) -> Result<()> {
        let traced = self.traced(op, op.unit, cohort);
        self.pending.push(Pending { op: at, traced, from, to: runtime.record_timed(lane(op.unit))? });
        Ok(())
    }

    /// Records that the host computed `op`, or its part of a transfer of rows to or from the device.
    pub fn ran(&mut self, op: &Op, cohort: Option<u8>, ran: &Ran) {
        let mut traced = self.traced(op, Unit::Host, cohort);
        let since = |t: Instant| t.saturating_duration_since(self.began).as_secs_f64();
        (traced.start, traced.end) = match (self.emulated, ran.emulated) {
            // A cohort's attention may have begun before the timeline.
            (Some(began), Some((from, to))) => ((from - began).max(0.0), (to - began).max(0.0)),
            _ => (since(ran.from), since(ran.to)),
        };
        self.spans.push((ran.op, traced));
    }

    /// Ends the step, whose events must be done.
    pub fn end_step(&mut self, runtime: Option<&dyn Runtime>) -> Result<()> {
        if let (Some((zero, at)), Some(runtime)) = (self.zero.take(), runtime) {
            for Pending { op, mut traced, from, to } in self.pending.drain(..) {
                let since = |event: &Event| {
                    Ok::<_, crate::Error>((at + runtime.elapsed(&zero, event)?).as_secs_f64())
                };
                (traced.start, traced.end) = (since(&from)?, since(&to)?);
                self.spans.push((op, traced));
            }
        }
        // Sorted by order of issue; the two sides of a transfer by the order in which they ran.
        self.spans.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.start.total_cmp(&b.1.start)));
        self.timeline.spans.extend(self.spans.drain(..).map(|(_, traced)| traced));
        self.step += 1;
        Ok(())
    }

    /// Discards a step that failed.
    pub fn give_up(&mut self) {
        self.zero = None;
        self.pending.clear();
        self.spans.clear();
    }
}
