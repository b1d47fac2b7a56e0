//! A runtime by another one, without some of its kernels: what a failed self-test leaves in use. It also keeps which kernels
//! were launched, for the self-test itself.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::GRAPHS;
use crate::device::clock::{Clock, Moment};
use crate::device::runtime::{
    DevPtr, DeviceInfo, Event, Graph, HostUse, Lane, Launch, Pinned, Runtime, Slab,
};
use crate::device::turns::Turns;
use crate::{Error, Result};

/// A runtime without some kernels.
pub struct Watch {
    rt: Arc<dyn Runtime>,
    without: BTreeSet<String>,
    notices: Vec<String>,
    /// `None` where nobody asks which kernels are launched.
    launched: Option<Mutex<Launched>>,
}

#[derive(Default)]
struct Launched {
    all: BTreeSet<String>,
    since_begin: BTreeSet<String>,
}

impl Watch {
    /// Keeps which kernels are launched.
    #[cfg(tandem_kernels)]
    pub fn watching(rt: Arc<dyn Runtime>, without: BTreeSet<String>) -> Watch {
        Watch { rt, without, notices: Vec::new(), launched: Some(Mutex::default()) }
    }

    /// Has the kernels of `rt` but those in `without`, and these notices beside its own.
    pub fn without(rt: Arc<dyn Runtime>, without: BTreeSet<String>, notices: Vec<String>) -> Watch {
        Watch { rt, without, notices, launched: None }
    }

    fn with<R>(&self, body: impl FnOnce(&mut Launched) -> R) -> Option<R> {
        self.launched.as_ref().map(|l| body(&mut l.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// From here on [`Watch::launched_since_begin`] counts.
    #[cfg(tandem_kernels)]
    pub fn begin(&self) {
        self.with(|l| l.since_begin.clear());
    }

    #[cfg(tandem_kernels)]
    pub fn launched_since_begin(&self) -> BTreeSet<String> {
        self.with(|l| l.since_begin.clone()).unwrap_or_default()
    }

    /// Every kernel that was launched.
    #[cfg(tandem_kernels)]
    pub fn launched(&self) -> BTreeSet<String> {
        self.with(|l| l.all.clone()).unwrap_or_default()
    }
}

impl Runtime for Watch {
    fn launch(&self, lane: Lane, launch: &Launch<'_>) -> Result<()> {
        if self.without.contains(launch.kernel) {
            return Err(Error::Device {
                what: format!("kernel {}", launch.kernel),
                problem: format!(
                    "failed its self-test on {} and is not used; tandem doctor --gpu says more",
                    self.rt.info().name
                ),
            });
        }
        self.with(|l| {
            l.all.insert(launch.kernel.to_owned());
            l.since_begin.insert(launch.kernel.to_owned())
        });
        self.rt.launch(lane, launch)
    }

    fn has_kernel(&self, kernel: &str) -> bool {
        !self.without.contains(kernel) && self.rt.has_kernel(kernel)
    }

    fn preload(&self, wanted: &dyn Fn(&str) -> bool, progress: &dyn Fn(usize, usize)) -> Result<()> {
        self.rt.preload(&|name| wanted(name) && !self.without.contains(name), progress)
    }

    fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        if self.without.contains(GRAPHS) {
            return Ok(None);
        }
        self.rt.capture(enqueue)
    }

    fn notices(&self) -> Vec<String> {
        self.notices.iter().cloned().chain(self.rt.notices()).collect()
    }

    // Everything else as it is.

    fn info(&self) -> &DeviceInfo {
        self.rt.info()
    }
    fn memory_free(&self) -> Result<u64> {
        self.rt.memory_free()
    }
    fn granule(&self) -> u64 {
        self.rt.granule()
    }
    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        self.rt.alloc(bytes)
    }
    fn free(&self, ptr: DevPtr) {
        self.rt.free(ptr);
    }
    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>> {
        self.rt.pinned(bytes)
    }
    fn slab_touched(&self, bytes: usize, touch: &dyn Fn(*mut u8)) -> Result<Slab> {
        self.rt.slab_touched(bytes, touch)
    }
    fn upload(&self, lane: Lane, dst: DevPtr, src: &[u8]) -> Result<()> {
        self.rt.upload(lane, dst, src)
    }
    fn upload_pinned(
        &self,
        lane: Lane,
        dst: DevPtr,
        src: &Arc<dyn Pinned>,
        range: Range<usize>,
    ) -> Result<()> {
        self.rt.upload_pinned(lane, dst, src, range)
    }
    fn download_pinned(
        &self,
        lane: Lane,
        src: DevPtr,
        dst: &Arc<dyn Pinned>,
        at: usize,
        len: usize,
    ) -> Result<()> {
        self.rt.download_pinned(lane, src, dst, at, len)
    }
    fn download(&self, lane: Lane, src: DevPtr, dst: &mut [u8]) -> Result<()> {
        self.rt.download(lane, src, dst)
    }
    fn copy(&self, lane: Lane, dst: DevPtr, src: DevPtr, len: usize) -> Result<()> {
        self.rt.copy(lane, dst, src, len)
    }
    fn fill(&self, lane: Lane, dst: DevPtr, value: u8, len: usize) -> Result<()> {
        self.rt.fill(lane, dst, value, len)
    }
    fn tensor_map_2d(
        &self,
        base: DevPtr,
        rows: u64,
        cols: u64,
        stride: u64,
        box_rows: u32,
        box_cols: u32,
    ) -> Result<[u8; 128]> {
        self.rt.tensor_map_2d(base, rows, cols, stride, box_rows, box_cols)
    }
    fn record(&self, lane: Lane) -> Result<Event> {
        self.rt.record(lane)
    }
    fn record_timed(&self, lane: Lane) -> Result<Event> {
        self.rt.record_timed(lane)
    }
    fn elapsed(&self, from: &Event, to: &Event) -> Result<Duration> {
        self.rt.elapsed(from, to)
    }
    fn wait(&self, lane: Lane, event: &Event) -> Result<()> {
        self.rt.wait(lane, event)
    }
    fn is_done(&self, event: &Event) -> Result<bool> {
        self.rt.is_done(event)
    }
    fn synchronize(&self, event: &Event) -> Result<()> {
        self.rt.synchronize(event)
    }
    fn spin_until_done(&self, event: &Event) -> Result<()> {
        self.rt.spin_until_done(event)
    }
    fn synchronize_until(&self, event: &Event, deadline: Instant) -> Result<bool> {
        self.rt.synchronize_until(event, deadline)
    }
    fn synchronize_all(&self) -> Result<()> {
        self.rt.synchronize_all()
    }
    fn replay(&self, graph: &Graph) -> Result<()> {
        self.rt.replay(graph)
    }
    fn host_access(&self, reads: &[(*const u8, usize)], writes: &[(*const u8, usize)]) -> Result<()> {
        self.rt.host_access(reads, writes)
    }
    fn host_use(&self, reads: &[(*const u8, usize)], writes: &[(*const u8, usize)]) -> Option<HostUse> {
        self.rt.host_use(reads, writes)
    }
    fn declare(
        &self,
        lane: Lane,
        what: &str,
        reads: &[(DevPtr, usize)],
        writes: &[(DevPtr, usize)],
    ) -> Result<()> {
        self.rt.declare(lane, what, reads, writes)
    }
    fn watches(&self) -> bool {
        self.rt.watches()
    }
    fn host_worked(&self, took: Duration) {
        self.rt.host_worked(took);
    }
    fn host_works(&self) {
        self.rt.host_works();
    }
    fn turns(&self) -> Option<&Arc<Turns>> {
        self.rt.turns()
    }
    fn clock(&self) -> Option<&Arc<Clock>> {
        self.rt.clock()
    }
    fn elapse(&self, lane: Lane, seconds: f64) -> Result<()> {
        self.rt.elapse(lane, seconds)
    }
    fn moment(&self, event: &Event) -> Option<Moment> {
        self.rt.moment(event)
    }
}
