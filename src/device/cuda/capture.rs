//! Work recorded once and replayed as one: a launch of the whole costs what a launch of one kernel costs.
//!
//! A recording is made in the driver's thread-local mode. In that mode only the recording thread's own calls can invalidate it
//! (they would be mistakes of ours, and fail at once), while other threads and other runtimes in the same context may
//! allocate, load modules and wait for events. In the global mode any such call of any thread would end the recording; in the
//! relaxed mode our own mistakes would pass unnoticed. No mode allows a wait for the whole context; [`super::gate`]
//! prevents such waits.

use std::sync::{Arc, PoisonError, RwLock};
use std::thread::ThreadId;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUresult, CUstreamCaptureMode};

use super::context::{Context, Work};
use super::errors::{describe, device, is_fatal};
use super::gate;
use super::release::{Dead, Release};
use crate::Result;
use crate::device::runtime::Lane;

/// The thread that records the compute lane, if any. Enqueuing holds the read lock, and the begin and end of a
/// recording hold the write lock, so no work of another thread slips into a recording.
pub(super) type Recorder = RwLock<Option<ThreadId>>;

/// Work that can be replayed.
pub(super) struct CudaGraph {
    context: Arc<Context>,
    release: Arc<Release>,
    executable: CUgraphExec,
}

// SAFETY: it is a handle. The driver requires that two threads do not launch one graph at once; the runtime holds a
// lock while it replays.
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
unsafe impl Sync for CudaGraph {}

/// The outcome of a recording.
pub(super) enum Recorded {
    Graph(CudaGraph),
    /// The driver refused or invalidated the recording, so nothing was enqueued; holds the driver's message.
    Refused(String),
}

impl CudaGraph {
    /// Records what `enqueue` enqueues on the compute lane.
    pub fn record(
        context: &Arc<Context>,
        release: &Arc<Release>,
        recorder: &Recorder,
        enqueue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Recorded> {
        let already = || device(&context.name, "the compute lane is being recorded already");
        context.bind()?;
        let _gate = gate::Recording::begin().ok_or_else(already)?;
        let mut recording = {
            let mut recorder_now = recorder.write().unwrap_or_else(PoisonError::into_inner);
            if recorder_now.is_some() {
                return Err(already());
            }
            release.hold();
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: a stream of this context.
            let code = unsafe { sys::cuStreamBeginCapture_v2(context.stream(Lane::Compute), mode) };
            if code != CUresult::CUDA_SUCCESS {
                release.resume();
                return refused(context, code);
            }
            *recorder_now = Some(std::thread::current().id());
            Recording { context, release, recorder, ended: false }
        };
        let enqueued = enqueue();
        let (code, graph) = recording.end();
        let graph = Owned(graph);
        if code != CUresult::CUDA_SUCCESS {
            // The recording was invalidated; an error of `enqueue`, if any, is a consequence.
            return refused(context, code);
        }
        enqueued?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: a whole graph; the handle outlives the call.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph.0, 0) };
        if code != CUresult::CUDA_SUCCESS {
            return refused(context, code);
        }
        let (context, release) = (context.clone(), release.clone());
        Ok(Recorded::Graph(CudaGraph { context, release, executable }))
    }

    pub fn replay(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both are handles of this context.
        let code = unsafe { sys::cuGraphLaunch(self.executable, self.context.stream(Lane::Compute)) };
        self.context.enqueued(Lane::Compute, Work::Replay, code)
    }

    /// Whether it belongs to this device.
    pub fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }
}

/// Work that cannot be recorded can still be enqueued, unless the device is lost.
fn refused(context: &Context, code: CUresult) -> Result<Recorded> {
    if is_fatal(code) {
        context.check("recording a step", code)?;
    }
    Ok(Recorded::Refused(describe(code)))
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        self.release.bury(Dead::Graph(self.executable));
    }
}

/// Ends the recording when dropped, also if the recorded code panics.
struct Recording<'a> {
    context: &'a Context,
    release: &'a Release,
    recorder: &'a Recorder,
    ended: bool,
}

impl Recording<'_> {
    fn end(&mut self) -> (CUresult, CUgraph) {
        self.ended = true;
        let mut recorder = self.recorder.write().unwrap_or_else(PoisonError::into_inner);
        let mut graph = std::ptr::null_mut();
        // SAFETY: a stream of this context that is being recorded, by this thread; the handle outlives the call.
        let code = unsafe { sys::cuStreamEndCapture(self.context.stream(Lane::Compute), &mut graph) };
        *recorder = None;
        self.release.resume();
        (code, graph)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // The caller is told the earlier error.
            drop(Owned(self.end().1));
        }
    }
}

/// A graph that is destroyed with its owner; the executable graph is a copy.
struct Owned(CUgraph);

impl Drop for Owned {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the end of a recording, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}
