//! Work recorded once and replayed as one: a launch of the whole costs what a launch of one kernel costs.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode};

use super::context::{Context, Work};
use super::release::{Dead, Release};
use crate::Result;
use crate::device::runtime::Lane;

/// Work that can be replayed.
pub(super) struct CudaGraph {
    context: Arc<Context>,
    release: Arc<Release>,
    executable: CUgraphExec,
}

// SAFETY: a handle. The driver asks that two threads do not launch one graph at once; the runtime replays
// with a lock held.
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    /// Records what `enqueue` enqueues on the compute lane.
    pub fn record(
        context: &Arc<Context>,
        release: &Arc<Release>,
        enqueue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<CudaGraph> {
        context.bind()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of this context.
        let code = unsafe { sys::cuStreamBeginCapture_v2(context.stream(Lane::Compute), mode) };
        context.check("recording a step", code)?;
        let mut recording = Recording { context, ended: false };
        enqueue()?;
        let graph = Owned(recording.end()?);
        let mut executable = std::ptr::null_mut();
        // SAFETY: a whole graph; the handle outlives the call.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph.0, 0) };
        context.check("recording a step", code)?;
        Ok(CudaGraph { context: context.clone(), release: release.clone(), executable })
    }

    pub fn replay(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both are handles of this context.
        let code = unsafe { sys::cuGraphLaunch(self.executable, self.context.stream(Lane::Compute)) };
        self.context.enqueued(Lane::Compute, Work::Replay, code)
    }

    /// Whether it is of this device.
    pub fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        self.release.bury(Dead::Graph(self.executable));
    }
}

/// Ends the recording, also when what is recorded fails or panics.
struct Recording<'a> {
    context: &'a Context,
    ended: bool,
}

impl Recording<'_> {
    fn end(&mut self) -> Result<CUgraph> {
        self.ended = true;
        self.context.bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: a stream of this context that is being recorded.
        let code = unsafe { sys::cuStreamEndCapture(self.context.stream(Lane::Compute), &mut graph) };
        self.context.check("recording a step", code)?;
        Ok(graph)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // What failed before is what the caller hears of.
            let _ = self.end().map(Owned);
        }
    }
}

/// A graph that is destroyed with its owner; what can be launched is a copy.
struct Owned(CUgraph);

impl Drop for Owned {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the end of a recording, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}
