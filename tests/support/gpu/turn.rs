//! A GPU that one test at a time uses: tests of a program run beside each other, share one runtime, and record its compute
//! lane, which is one thread's alone; and what they measure of its memory others must not change meanwhile.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tandem::Result;
use tandem::device::{DevPtr, DeviceInfo, Event, Graph, Lane, Launch, Pinned, Runtime, Slab};

static TAKEN: Mutex<bool> = Mutex::new(false);
static FREE: Condvar = Condvar::new();

thread_local! {
    /// This thread's turn: whoever asks again during it gets the same.
    static MINE: RefCell<Weak<Turn>> = RefCell::default();
}

/// The runtime, until the last user of this value (and of what it allocated) is gone.
pub struct Turn(Arc<dyn Runtime>);

impl Turn {
    /// Waits until no other thread has one.
    pub fn take(runtime: impl FnOnce() -> Option<Arc<dyn Runtime>>) -> Option<Arc<dyn Runtime>> {
        if let Some(turn) = MINE.with_borrow(Weak::upgrade) {
            return Some(turn);
        }
        let runtime = runtime()?;
        let taken = FREE.wait_while(TAKEN.lock().unwrap_or_else(PoisonError::into_inner), |taken| *taken);
        *taken.unwrap_or_else(PoisonError::into_inner) = true;
        let turn = Arc::new(Turn(runtime));
        MINE.set(Arc::downgrade(&turn));
        Some(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) = false;
        FREE.notify_one();
    }
}

/// All of it is the runtime's own.
impl Runtime for Turn {
    fn info(&self) -> &DeviceInfo {
        self.0.info()
    }
    fn memory_free(&self) -> Result<u64> {
        self.0.memory_free()
    }
    fn granule(&self) -> u64 {
        self.0.granule()
    }
    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        self.0.alloc(bytes)
    }
    fn free(&self, ptr: DevPtr) {
        self.0.free(ptr)
    }
    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>> {
        self.0.pinned(bytes)
    }
    fn slab_touched(&self, bytes: usize, touch: &dyn Fn(*mut u8)) -> Result<Slab> {
        self.0.slab_touched(bytes, touch)
    }
    fn upload(&self, lane: Lane, dst: DevPtr, src: &[u8]) -> Result<()> {
        self.0.upload(lane, dst, src)
    }
    fn upload_pinned(
        &self,
        lane: Lane,
        dst: DevPtr,
        src: &Arc<dyn Pinned>,
        range: Range<usize>,
    ) -> Result<()> {
        self.0.upload_pinned(lane, dst, src, range)
    }
    fn download_pinned(
        &self,
        lane: Lane,
        src: DevPtr,
        dst: &Arc<dyn Pinned>,
        at: usize,
        len: usize,
    ) -> Result<()> {
        self.0.download_pinned(lane, src, dst, at, len)
    }
    fn download(&self, lane: Lane, src: DevPtr, dst: &mut [u8]) -> Result<()> {
        self.0.download(lane, src, dst)
    }
    fn copy(&self, lane: Lane, dst: DevPtr, src: DevPtr, len: usize) -> Result<()> {
        self.0.copy(lane, dst, src, len)
    }
    fn fill(&self, lane: Lane, dst: DevPtr, value: u8, len: usize) -> Result<()> {
        self.0.fill(lane, dst, value, len)
    }
    fn launch(&self, lane: Lane, launch: &Launch<'_>) -> Result<()> {
        self.0.launch(lane, launch)
    }
    fn has_kernel(&self, kernel: &str) -> bool {
        self.0.has_kernel(kernel)
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
        self.0.tensor_map_2d(base, rows, cols, stride, box_rows, box_cols)
    }
    fn record(&self, lane: Lane) -> Result<Event> {
        self.0.record(lane)
    }
    fn record_timed(&self, lane: Lane) -> Result<Event> {
        self.0.record_timed(lane)
    }
    fn elapsed(&self, from: &Event, to: &Event) -> Result<Duration> {
        self.0.elapsed(from, to)
    }
    fn wait(&self, lane: Lane, event: &Event) -> Result<()> {
        self.0.wait(lane, event)
    }
    fn is_done(&self, event: &Event) -> Result<bool> {
        self.0.is_done(event)
    }
    fn synchronize(&self, event: &Event) -> Result<()> {
        self.0.synchronize(event)
    }
    fn spin_until_done(&self, event: &Event) -> Result<()> {
        self.0.spin_until_done(event)
    }
    fn synchronize_until(&self, event: &Event, deadline: Instant) -> Result<bool> {
        self.0.synchronize_until(event, deadline)
    }
    fn synchronize_all(&self) -> Result<()> {
        self.0.synchronize_all()
    }
    fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        self.0.capture(enqueue)
    }
    fn replay(&self, graph: &Graph) -> Result<()> {
        self.0.replay(graph)
    }
    fn notices(&self) -> Vec<String> {
        self.0.notices()
    }
}
