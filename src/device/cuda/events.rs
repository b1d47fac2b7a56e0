//! Points in lanes. The driver's events are kept for reuse: making one takes longer than recording it.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUevent, CUresult};

use super::context::Context;
use crate::Result;
use crate::device::runtime::Lane;

/// Events that are not in use.
pub(super) struct Spare {
    context: Arc<Context>,
    events: Mutex<Vec<Handle>>,
}

struct Handle(CUevent);

// SAFETY: an event is a handle that the driver lets any thread use.
unsafe impl Send for Handle {}

/// A recorded event.
pub(super) struct CudaEvent {
    spare: Arc<Spare>,
    event: CUevent,
}

// SAFETY: as for `Handle`; it is recorded once, before it is shared.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// After everything enqueued on `lane` so far.
    pub fn record(spare: &Arc<Spare>, lane: Lane) -> Result<CudaEvent> {
        let context = &spare.context;
        context.bind()?;
        let kept = spare.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = match kept {
            Some(Handle(event)) => event,
            None => {
                let mut event = std::ptr::null_mut();
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                // SAFETY: the context is current; the handle outlives the call.
                context.check("an event", unsafe { sys::cuEventCreate(&mut event, flags) })?;
                event
            }
        };
        let this = CudaEvent { spare: spare.clone(), event };
        // SAFETY: both are handles of this context.
        context.check("an event", unsafe { sys::cuEventRecord(event, context.stream(lane)) })?;
        Ok(this)
    }

    /// Later work of `lane` waits for it.
    pub fn wait(&self, lane: Lane) -> Result<()> {
        self.spare.context.bind()?;
        // SAFETY: both are handles of this context.
        let code = unsafe { sys::cuStreamWaitEvent(self.spare.context.stream(lane), self.event, 0) };
        self.spare.context.check("waiting for an event", code)
    }

    pub fn is_done(&self) -> Result<bool> {
        self.spare.context.bind()?;
        // SAFETY: a handle of this context.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => self.spare.context.check("asking for an event", code).map(|()| true),
        }
    }

    pub fn synchronize(&self) -> Result<()> {
        self.spare.context.bind()?;
        // SAFETY: a handle of this context.
        let code = unsafe { sys::cuEventSynchronize(self.event) };
        self.spare.context.check("waiting for an event", code)
    }

    /// Whether it is an event of this device.
    pub fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.spare.context, context)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // Recording it again is allowed while a lane still waits for its earlier point.
        self.spare.events.lock().unwrap_or_else(PoisonError::into_inner).push(Handle(self.event));
    }
}

impl Spare {
    pub fn new(context: Arc<Context>) -> Spare {
        Spare { context, events: Mutex::default() }
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        let all = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.context.bind().is_ok() {
            for Handle(event) in all.drain(..) {
                // SAFETY: an event of this context that nobody uses; destroyed once.
                let _ = unsafe { sys::cuEventDestroy_v2(event) };
            }
        }
    }
}
