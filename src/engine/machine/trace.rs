//! When operations ran: the host's by the clock, the device's by events on its lanes.

use std::time::{Duration, Instant};

use super::device::lane;
use crate::Result;
use crate::device::runtime::{Event, Lane, Runtime};
use crate::engine::timeline::{Timeline, Traced};
use crate::program::{Op, Unit};

/// A step's operations of the device, whose times are known once it is done.
struct Pending {
    traced: Traced,
    from: Event,
    to: Event,
}

/// See the [module](self).
pub(super) struct Trace {
    began: Instant,
    step: u32,
    /// Where the device's clock meets the host's: an event on an idle lane, and when it was recorded.
    zero: Option<(Event, Duration)>,
    pending: Vec<Pending>,
    pub timeline: Timeline,
}

/// An operation that has begun.
pub(super) enum Begun {
    /// On the host, then.
    Host(Duration),
    /// On the device, behind this event.
    Device(Event),
}

impl Trace {
    pub fn new() -> Trace {
        Trace {
            began: Instant::now(),
            step: 0,
            zero: None,
            pending: Vec::new(),
            timeline: Timeline::default(),
        }
    }

    /// The device is idle, and a step begins.
    pub fn begin_step(&mut self, runtime: &dyn Runtime) -> Result<()> {
        self.zero = Some((runtime.record_timed(Lane::Compute)?, self.began.elapsed()));
        Ok(())
    }

    pub fn begin(&self, op: &Op, runtime: &dyn Runtime) -> Result<Begun> {
        match op.unit {
            Unit::Host => Ok(Begun::Host(self.began.elapsed())),
            unit => Ok(Begun::Device(runtime.record_timed(lane(unit))?)),
        }
    }

    pub fn end(&mut self, op: &Op, begun: Begun, runtime: &dyn Runtime) -> Result<()> {
        let mut traced = Traced {
            name: op.kind.name(),
            unit: op.unit,
            layer: op.layer,
            rows: op.rows.end - op.rows.start,
            step: self.step,
            start: 0.0,
            end: 0.0,
        };
        match begun {
            Begun::Host(start) => {
                (traced.start, traced.end) = (start.as_secs_f64(), self.began.elapsed().as_secs_f64());
                self.timeline.spans.push(traced);
            }
            Begun::Device(from) => {
                self.pending.push(Pending { traced, from, to: runtime.record_timed(lane(op.unit))? });
            }
        }
        Ok(())
    }

    /// The step is done, and so are its events.
    pub fn end_step(&mut self, runtime: &dyn Runtime) -> Result<()> {
        if let Some((zero, at)) = self.zero.take() {
            for Pending { mut traced, from, to } in self.pending.drain(..) {
                let since = |event: &Event| {
                    Ok::<_, crate::Error>((at + runtime.elapsed(&zero, event)?).as_secs_f64())
                };
                (traced.start, traced.end) = (since(&from)?, since(&to)?);
                self.timeline.spans.push(traced);
            }
        }
        self.pending.clear();
        self.step += 1;
        Ok(())
    }
}
