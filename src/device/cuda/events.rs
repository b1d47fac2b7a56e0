//! Points in lanes. The driver's events are kept for reuse: making one takes longer than recording it.
//!
//! A thread that waits for an event sleeps (`CU_EVENT_BLOCKING_SYNC`) unless it asks to spin: where host and device
//! alternate, waking up would cost more than the wait.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUevent, CUresult};

use super::context::{Context, Relaxed};
use super::errors::device;
use super::gate;
use crate::Result;
use crate::device::runtime::Lane;

/// How long an urgent wait spins before it sleeps. After that time, a wake-up of some 50 µs costs less than half a
/// percent.
const SPIN: Duration = Duration::from_millis(10);
/// How often a wait with a deadline polls after it has spun: the driver has no wait with a time limit.
const LOOK: Duration = Duration::from_micros(100);
/// How long a wait with a deadline spins first: who cannot afford to sleep spins before it asks.
const SPIN_BEFORE_LOOKING: Duration = Duration::from_micros(20);

/// The function is looked up by name: the bindings have only its successor, which drivers have since CUDA 12.8.
type ElapsedTime = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;

/// Whether an event records the time at which it completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timing {
    On,
    Off,
}

/// Events that are not in use.
pub(super) struct Spare {
    context: Arc<Context>,
    timed: Mutex<Vec<Handle>>,
    untimed: Mutex<Vec<Handle>>,
}

struct Handle(CUevent);

// SAFETY: an event is a handle that the driver lets any thread use.
unsafe impl Send for Handle {}

/// A recorded event.
pub(super) struct CudaEvent {
    spare: Arc<Spare>,
    event: CUevent,
    timing: Timing,
}

// SAFETY: as for `Handle`; it is recorded once, before it is shared.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Records an event after everything enqueued on `lane` so far.
    pub fn record(spare: &Arc<Spare>, lane: Lane, timing: Timing) -> Result<CudaEvent> {
        let context = &spare.context;
        context.bind()?;
        let kept = spare.kept(timing).lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = match kept {
            Some(Handle(event)) => event,
            None => {
                let mut event = std::ptr::null_mut();
                let mut flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
                if timing == Timing::Off {
                    flags |= sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                }
                // SAFETY: the context is current; the handle outlives the call.
                context.check("an event", unsafe { sys::cuEventCreate(&mut event, flags) })?;
                event
            }
        };
        let this = CudaEvent { spare: spare.clone(), event, timing };
        // SAFETY: both are handles of this context.
        context.check("an event", unsafe { sys::cuEventRecord(event, context.stream(lane)) })?;
        Ok(this)
    }

    /// Makes later work of `lane` wait for the event.
    pub fn wait(&self, lane: Lane) -> Result<()> {
        self.spare.context.bind()?;
        // SAFETY: both are handles of this context.
        let code = unsafe { sys::cuStreamWaitEvent(self.spare.context.stream(lane), self.event, 0) };
        self.spare.context.check("waiting for an event", code)
    }

    pub fn is_done(&self) -> Result<bool> {
        self.spare.context.bind()?;
        // The event was recorded before any capture in progress, so the query is legal; the driver needs the relaxed
        // mode to allow it.
        let _relaxed = Relaxed::enter();
        // SAFETY: a handle of this context.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => self.spare.context.check("asking for an event", code).map(|()| true),
        }
    }

    /// Sleeps until the event is done.
    pub fn synchronize(&self) -> Result<()> {
        self.spare.context.bind()?;
        let _relaxed = Relaxed::enter();
        // SAFETY: a handle of this context.
        let code = unsafe { sys::cuEventSynchronize(self.event) };
        self.spare.context.check("waiting for an event", code)
    }

    /// Spins until the event is done, and sleeps if that takes long.
    pub fn spin(&self) -> Result<()> {
        let begin = Instant::now();
        while !self.is_done()? {
            if begin.elapsed() > SPIN {
                return self.synchronize();
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Waits until the event is done or the deadline has passed. Returns whether it is done.
    pub fn synchronize_until(&self, deadline: Instant) -> Result<bool> {
        let begin = Instant::now();
        while !self.is_done()? {
            let now = Instant::now();
            if now >= deadline {
                return Ok(false);
            }
            if now - begin < SPIN_BEFORE_LOOKING {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(LOOK.min(deadline - now));
            }
        }
        Ok(true)
    }

    /// The time from this event to `to`; `None` if one of them records no time. Both must be done.
    pub fn elapsed(&self, to: &CudaEvent) -> Result<Option<Duration>> {
        if self.timing == Timing::Off || to.timing == Timing::Off {
            return Ok(None);
        }
        self.spare.context.bind()?;
        let _relaxed = Relaxed::enter();
        let what = "the time between two events";
        let missing =
            || device(&self.spare.context.name, format!("{what}: the driver has no cuEventElapsedTime"));
        let mut milliseconds = 0f32;
        // SAFETY: the driver is loaded; this is its function's signature. Handles of this context; the number outlives the
        // call.
        let code = unsafe {
            let function = sys::culib().get::<ElapsedTime>(b"cuEventElapsedTime").map_err(|_| missing())?;
            function(&mut milliseconds, self.event, to.event)
        };
        self.spare.context.check(what, code)?;
        // Negative if `to` completed first.
        Ok(Some(Duration::from_secs_f64(f64::from(milliseconds).max(0.0) / 1e3)))
    }

    /// Whether the event belongs to this device.
    pub fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.spare.context, context)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // Recording it again is allowed while a lane still waits for its earlier point.
        let kept = self.spare.kept(self.timing);
        kept.lock().unwrap_or_else(PoisonError::into_inner).push(Handle(self.event));
    }
}

impl Spare {
    pub fn new(context: Arc<Context>) -> Spare {
        Spare { context, timed: Mutex::default(), untimed: Mutex::default() }
    }

    fn kept(&self, timing: Timing) -> &Mutex<Vec<Handle>> {
        match timing {
            Timing::On => &self.timed,
            Timing::Off => &self.untimed,
        }
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        let take = |kept: &mut Mutex<Vec<Handle>>| {
            std::mem::take(kept.get_mut().unwrap_or_else(PoisonError::into_inner))
        };
        let (timed, untimed) = (take(&mut self.timed), take(&mut self.untimed));
        let context = self.context.clone();
        gate::quietly(move || {
            if context.bind().is_ok() {
                for Handle(event) in timed.into_iter().chain(untimed) {
                    // SAFETY: an event of this context that is no longer used; destroyed once.
                    let _ = unsafe { sys::cuEventDestroy_v2(event) };
                }
            }
        });
    }
}
