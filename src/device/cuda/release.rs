//! Gives memory and graphs back to the driver after events on the runtime's own lanes, never by waiting for the
//! context.
//!
//! ```text
//! free ──► fence (an event on each lane) ──► passed? ──► nothing recorded in the process? ──► the driver's free
//! ```
//! [`Release::bury`] only records the fence. The driver calls, which may synchronise the context, are made when the
//! program allocates or asks for free memory ([`Release::reap`]), at the end of a recording, and at the end of the
//! runtime.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUdeviceptr, CUgraphExec};

use super::context::Context;
use super::events::{CudaEvent, Spare, Timing};
use super::gate;
use crate::device::runtime::Lane;
use crate::host::Mapping;

/// A resource now referenced only by work in flight.
pub(super) enum Dead {
    /// Device memory: address, bytes.
    Device(CUdeviceptr, u64),
    /// Page-locked host memory that the driver allocated.
    Host(*mut c_void),
    /// Our own mapping, page-locked if `registered`.
    Slab {
        map: Mapping,
        registered: bool,
    },
    Graph(CUgraphExec),
}

// SAFETY: handles and addresses that the driver lets any thread give back.
unsafe impl Send for Dead {}

/// Passed once all work that the lanes held at its creation is done.
struct Fence(Vec<CudaEvent>);

impl Fence {
    fn passed(&self) -> bool {
        // An error means a lost device: nothing runs there any more.
        self.0.iter().all(|event| event.is_done().unwrap_or(true))
    }

    fn wait(&self) {
        for event in &self.0 {
            // As above.
            let _ = event.synchronize();
        }
    }
}

#[derive(Default)]
struct State {
    /// Whether the compute lane is being recorded: a fence there would become part of the recording.
    recording: bool,
    /// Dead resources in the order they died. Those without a fence died during the recording and get one at its end.
    dead: VecDeque<(Dead, Option<Arc<Fence>>)>,
    /// The last fence, and the number of operations enqueued on each lane by then.
    last: Option<([u64; 3], Arc<Fence>)>,
}

pub(super) struct Release {
    context: Arc<Context>,
    spare: Arc<Spare>,
    state: Mutex<State>,
    /// Bytes of device memory that are dead but not given back.
    dead_bytes: AtomicU64,
}

impl Release {
    pub fn new(context: Arc<Context>, spare: Arc<Spare>) -> Release {
        Release { context, spare, state: Mutex::default(), dead_bytes: AtomicU64::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `dead` back after the work enqueued so far. Never waits.
    pub fn bury(&self, dead: Dead) {
        if let Dead::Device(_, bytes) = dead {
            self.dead_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        // The lock is held from the check until the events are recorded, so no recording begins in between
        // ([`Release::hold`]).
        let mut state = self.state();
        let fence = if state.recording { None } else { Some(self.fence(&mut state)) };
        state.dead.push_back((dead, fence));
    }

    /// Bytes of device memory that are dead but not given back.
    pub fn dead_bytes(&self) -> u64 {
        self.dead_bytes.load(Ordering::Relaxed)
    }

    fn fence(&self, state: &mut State) -> Arc<Fence> {
        let work = self.context.work();
        if let Some((then, fence)) = &state.last
            && *then == work
        {
            return fence.clone();
        }
        let record = |lane| CudaEvent::record(&self.spare, lane, Timing::Off);
        let events = Lane::ALL.map(record).into_iter().collect::<crate::Result<Vec<_>>>();
        // If events cannot be recorded (the driver is out of host memory, or the device is lost), wait for the lanes
        // themselves.
        let events = events.unwrap_or_else(|_| {
            self.context.wait_for_lanes();
            Vec::new()
        });
        let fence = Arc::new(Fence(events));
        state.last = Some((work, fence.clone()));
        fence
    }

    /// A recording of the compute lane begins: no fence until [`Release::resume`].
    pub fn hold(&self) {
        self.state().recording = true;
    }

    /// The recording is over.
    pub fn resume(&self) {
        let mut state = self.state();
        state.recording = false;
        if state.dead.iter().any(|(_, fence)| fence.is_none()) {
            let fence = self.fence(&mut state);
            for (_, none) in state.dead.iter_mut().filter(|(_, fence)| fence.is_none()) {
                *none = Some(fence.clone());
            }
        }
    }

    /// Gives back resources whose fence has passed; with `wait`, waits for the remaining fences and gives back
    /// everything. Does nothing while anything is being recorded.
    pub fn reap(&self, wait: bool) {
        loop {
            let mut state = self.state();
            let Some((_, Some(fence))) = state.dead.front() else { return };
            if !fence.passed() {
                let fence = fence.clone();
                drop(state);
                if !wait {
                    return;
                }
                fence.wait();
                continue;
            }
            let Some(_quiet) = gate::try_quiet() else { return };
            if let Some((dead, _)) = state.dead.pop_front() {
                if let Dead::Device(_, bytes) = dead {
                    self.dead_bytes.fetch_sub(bytes, Ordering::Relaxed);
                }
                give_back(&self.context, dead);
            }
        }
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (dead, context) = (std::mem::take(&mut state.dead), self.context.clone());
        state.last = None;
        if !dead.is_empty() {
            gate::quietly(move || {
                context.wait_for_lanes();
                dead.into_iter().for_each(|(dead, _)| give_back(&context, dead));
            });
        }
    }
}

fn give_back(context: &Context, dead: Dead) {
    // On a lost device the driver refuses every call. It has already reclaimed everything except host memory, which
    // stays allocated until the process ends.
    if context.bind().is_err() {
        if let Dead::Slab { map, .. } = dead {
            std::mem::forget(map);
        }
        return;
    }
    // SAFETY: made once, given back once (it was moved here), and the work that used it is done.
    let code = unsafe {
        match dead {
            Dead::Device(address, _) => sys::cuMemFree_v2(address),
            Dead::Host(address) => sys::cuMemFreeHost(address),
            Dead::Graph(executable) => sys::cuGraphExecDestroy(executable),
            Dead::Slab { map, registered } => {
                let code = match registered {
                    true => sys::cuMemHostUnregister(map.base().cast()),
                    false => sys::CUresult::CUDA_SUCCESS,
                };
                if code != sys::CUresult::CUDA_SUCCESS {
                    // The driver may still use it.
                    std::mem::forget(map);
                }
                code
            }
        }
    };
    // A fatal error is remembered; nothing can be done about any other.
    let _ = context.check("giving back", code);
}
