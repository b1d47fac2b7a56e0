//! Measures how long each unit works, by this computer's clock: jobs of the host's lane, and stretches of the device's
//! lanes.
//!
//! ```text
//! lane    │ op op op │ wait for another lane │ op op │ (the issuing thread waits for the host) │ op …
//! events  ●──────────●                       ●───────●                                         ●──
//! ```
//! A stretch lasts from the point where a lane has what it waited for to the point where it waits again, and is
//! measured by two events. So a decode step on the device alone is one stretch. Within a stretch, time that the device
//! waits for launches counts as work, and so does the latency of a copy; copies of logits and of a step's lists do not
//! count.

use super::device::lane;
use crate::Result;
use crate::device::{Event, Lane, Runtime};
use crate::program::{PerUnit, Unit};

/// See the [module](self).
#[derive(Default)]
pub(super) struct Busy {
    /// The beginning of each lane's unfinished stretch.
    open: [Option<Event>; Lane::ALL.len()],
    /// The step's finished stretches.
    stretches: Vec<(Lane, Event, Event)>,
    /// Seconds of the steps so far.
    seconds: PerUnit<f64>,
}

impl Busy {
    /// Called before an operation of the device's `unit` is enqueued, after everything that it waits for.
    pub fn begin(&mut self, unit: Unit, runtime: &dyn Runtime) -> Result<()> {
        let open = &mut self.open[lane(unit) as usize];
        if open.is_none() {
            *open = Some(runtime.record_timed(lane(unit))?);
        }
        Ok(())
    }

    /// Ends the stretch of a lane of the device, which waits from here on.
    pub fn pause(&mut self, on: Lane, runtime: &dyn Runtime) -> Result<()> {
        if let Some(from) = self.open[on as usize].take() {
            self.stretches.push((on, from, runtime.record_timed(on)?));
        }
        Ok(())
    }

    /// Ends the stretches of all lanes of the device: nothing is enqueued for a while.
    pub fn pause_all(&mut self, runtime: &dyn Runtime) -> Result<()> {
        Lane::ALL.iter().try_for_each(|&on| self.pause(on, runtime))
    }

    /// Counts work of the host.
    pub fn host(&mut self, seconds: f64) {
        self.seconds[Unit::Host] += seconds;
    }

    /// Ends the step, whose events must be done.
    pub fn end_step(&mut self, runtime: Option<&dyn Runtime>) -> Result<()> {
        let Some(runtime) = runtime else { return Ok(()) };
        for (on, from, to) in self.stretches.drain(..) {
            self.seconds[unit_of(on)] += runtime.elapsed(&from, &to)?.as_secs_f64();
        }
        Ok(())
    }

    /// Discards the device's work of a step that failed.
    pub fn give_up(&mut self) {
        self.open = Default::default();
        self.stretches.clear();
    }

    /// Seconds that each unit has worked.
    pub fn seconds(&self) -> PerUnit<f64> {
        self.seconds
    }
}

/// The unit that works on a lane of the device.
fn unit_of(lane: Lane) -> Unit {
    match lane {
        Lane::Compute => Unit::Gpu,
        Lane::HostToDevice => Unit::H2d,
        Lane::DeviceToHost => Unit::D2h,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Buffer;
    use crate::device::emulated::{EmulatedOptions, EmulatedRuntime, Speed};
    use std::sync::Arc;

    /// Two copies of 20 ms with a wait between count 40 ms, whatever the wait takes; a step that failed counts nothing.
    #[test]
    fn waits_between_stretches_do_not_count() {
        let speed = Speed { host_to_device: Some(2e-4), ..Speed::default() };
        let options = EmulatedOptions { speed, ..Default::default() };
        let runtime: Arc<dyn Runtime> = Arc::new(EmulatedRuntime::new(options).unwrap());
        let buffer = Buffer::new(&runtime, 4096).unwrap();
        let mut busy = Busy::default();
        let copy = |busy: &mut Busy| {
            busy.begin(Unit::H2d, &*runtime).unwrap();
            runtime.upload(Lane::HostToDevice, buffer.ptr(), &[1; 4096]).unwrap();
        };
        copy(&mut busy);
        busy.pause_all(&*runtime).unwrap();
        runtime.synchronize_all().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
        copy(&mut busy);
        busy.pause(Lane::HostToDevice, &*runtime).unwrap();
        runtime.synchronize_all().unwrap();
        busy.end_step(Some(&*runtime)).unwrap();
        let [gpu, h2d, d2h, host] = Unit::ALL.map(|unit| busy.seconds()[unit]);
        assert_eq!((gpu, d2h, host), (0.0, 0.0, 0.0));
        assert!((0.04..0.1).contains(&h2d), "{h2d}");
        copy(&mut busy);
        busy.give_up();
        busy.host(0.5);
        busy.end_step(Some(&*runtime)).unwrap();
        assert_eq!(busy.seconds(), PerUnit::from([0.0, h2d, 0.0, 0.5]));
    }
}
