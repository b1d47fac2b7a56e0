//! Uploads ordinary memory through a ring of page-locked memory, so that the source can be reused at once and the copy
//! is truly asynchronous.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::context::{Context, Work};
use super::events::{CudaEvent, Spare, Timing};
use super::pinned::{Caching, CudaPinned};
use super::release::Release;
use super::ring::Ring;
use crate::Result;
use crate::device::runtime::{DevPtr, Lane, Pinned};

/// Bytes of the ring. A bus of 25 GB/s carries them in 1.3 ms, longer than the host takes to fill them.
const RING: usize = 32 << 20;
/// Bytes of the largest single copy: the host fills the next part while the bus carries this one.
const PART: usize = 4 << 20;
/// How many earlier parts an upload asks about: two, so that their number falls.
const PASSED: usize = 2;

/// The ring of page-locked memory, allocated on first use: not every program uploads much.
pub(super) struct StagingRing {
    context: Arc<Context>,
    release: Arc<Release>,
    spare: Arc<Spare>,
    state: Mutex<Option<State>>,
}

struct State {
    memory: CudaPinned,
    ring: Ring<CudaEvent>,
}

impl StagingRing {
    pub fn new(context: Arc<Context>, release: Arc<Release>, spare: Arc<Spare>) -> StagingRing {
        StagingRing { context, release, spare, state: Mutex::new(None) }
    }

    /// Enqueues a copy of `src`, which may be reused when this returns.
    pub fn upload(&self, lane: Lane, dst: DevPtr, src: &[u8]) -> Result<()> {
        let mut guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = match &mut *guard {
            Some(state) => state,
            none => none.insert(State {
                memory: CudaPinned::new(&self.context, &self.release, RING, Caching::WriteCombined, false)?,
                ring: Ring::new(RING),
            }),
        };
        self.context.bind()?;
        // Small uploads would otherwise keep an event each until the ring comes round.
        state.ring.forget(PASSED, CudaEvent::is_done)?;
        for (i, part) in src.chunks(PART).enumerate() {
            let at = state.ring.place(part.len(), |done: CudaEvent| done.synchronize())?;
            // SAFETY: `at..at + part.len()` lies in the ring, and no copy in flight reads it any more.
            let from = unsafe {
                let to = state.memory.host().add(at);
                std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len());
                to
            };
            let to = dst.add(i * PART).0;
            // SAFETY: the source stays as it is until the event below; the caller owns the destination.
            let code =
                unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), part.len(), self.context.stream(lane)) };
            self.context.enqueued(lane, Work::Copy("an upload"), code)?;
            state.ring.take(part.len(), CudaEvent::record(&self.spare, lane, Timing::Off)?);
        }
        Ok(())
    }
}
