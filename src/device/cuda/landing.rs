//! Downloads to ordinary memory through page-locked memory, so that we control the wait. A direct copy to pageable
//! memory returns when it is done, and the driver decides whether to spin or to sleep.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::context::{Context, Work};
use super::events::{CudaEvent, Spare, Timing};
use super::pinned::{Caching, CudaPinned};
use super::release::Release;
use crate::Result;
use crate::device::runtime::{DevPtr, Lane, Pinned};

/// Bytes of the largest single copy: while the bus carries one part, the host copies the previous one.
const PART: usize = 2 << 20;

/// Two parts, allocated on first use.
pub(super) struct Landing {
    context: Arc<Context>,
    release: Arc<Release>,
    spare: Arc<Spare>,
    memory: Mutex<Option<CudaPinned>>,
}

impl Landing {
    pub fn new(context: Arc<Context>, release: Arc<Release>, spare: Arc<Spare>) -> Landing {
        Landing { context, release, spare, memory: Mutex::new(None) }
    }

    /// Copies to `dst` after everything enqueued on `lane`. `enter` is called before each copy is enqueued; its guard
    /// is held until the event after the copy is recorded, but not while waiting.
    pub fn download<T>(
        &self,
        lane: Lane,
        src: DevPtr,
        dst: &mut [u8],
        enter: impl Fn() -> Result<T>,
    ) -> Result<()> {
        let mut guard = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = match &mut *guard {
            Some(memory) => memory,
            none => {
                let caching = Caching::Cached;
                none.insert(CudaPinned::new(&self.context, &self.release, 2 * PART, caching, false)?)
            }
        };
        let part = |i: usize| {
            // SAFETY: two parts were allocated.
            unsafe { memory.host().add(i % 2 * PART) }
        };
        let (len, n) = (dst.len(), dst.len().div_ceil(PART));
        let bytes = |i: usize| i * PART..len.min((i + 1) * PART);
        let start = |i: usize| -> Result<CudaEvent> {
            let _turn = enter()?;
            self.context.bind()?;
            let (from, to, stream) = (src.add(i * PART).0, part(i), self.context.stream(lane));
            // SAFETY: the part is as long; what it held before was copied out, and its memory is given back behind the
            // work in flight. The caller owns the source.
            let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes(i).len(), stream) };
            self.context.enqueued(lane, Work::Copy("a download"), code)?;
            CudaEvent::record(&self.spare, lane, Timing::Off)
        };
        let mut copy = if n > 0 { Some(start(0)?) } else { None };
        for i in 0..n {
            let next = if i + 1 < n { Some(start(i + 1)) } else { None };
            if let Some(copy) = copy.take() {
                // The host has nothing to do before it has the data.
                copy.spin()?;
            }
            let to = &mut dst[bytes(i)];
            // SAFETY: the copy into this part is done, and the next one goes to the other part; both sides have as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(part(i), to.as_mut_ptr(), to.len()) };
            copy = next.transpose()?;
        }
        Ok(())
    }
}
