//! The runtime of an accelerator: its own memory, in-order asynchronous lanes, events, launches.
//!
//! Addresses are opaque ([`DevPtr`]): the host never reads through them. Work is enqueued on a [`Lane`];
//! work of one lane runs in order, different lanes run concurrently, and [`Event`]s order them. Errors of asynchronous
//! work surface at the next call, so a call that enqueues may report an error of earlier work.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::clock::{Clock, Moment};
pub use super::lane::Lane;
use super::turns::Turns;
use crate::Result;

/// An address in an accelerator's memory. Arithmetic on it is plain; the host cannot dereference it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct DevPtr(pub u64);

impl DevPtr {
    /// No memory: an optional operand that is absent.
    pub const NULL: DevPtr = DevPtr(0);

    /// The address `bytes` further on.
    #[allow(clippy::should_implement_trait)] // bytes, not addresses, are added
    pub fn add(self, bytes: usize) -> DevPtr {
        DevPtr(self.0 + bytes as u64)
    }

    /// Whether it is [`DevPtr::NULL`].
    pub fn is_null(self) -> bool {
        self.0 == 0
    }
}

/// A point in a lane: everything enqueued on it before.
#[derive(Clone)]
pub struct Event(pub Arc<dyn Any + Send + Sync>);

/// Recorded work of the compute lane that can be run again as one.
#[derive(Clone)]
pub struct Graph(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

/// The description of an accelerator.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceInfo {
    /// Its driver's name for it.
    pub name: String,
    /// Compute capability, 10 * major + minor: 75 (T4), 80, 86, 89, 90 (H100, H200)...
    pub sm: u32,
    /// Number of streaming multiprocessors, by which grids are sized.
    pub multiprocessors: u32,
    /// Total bytes of its memory.
    pub memory_total: u64,
    /// Most shared memory of one block, in bytes.
    pub shared_per_block: u32,
    /// Level-two cache in bytes, which should hold data that one kernel writes and the next one reads. 0 if not known.
    pub l2_bytes: u32,
    /// Rate at which its memory is read at its highest clock, in bytes/s. 0 if not known.
    pub memory_bw: u64,
    /// Highest clock of its multiprocessors, in kHz. 0 if not known.
    pub clock_khz: u32,
    /// Driver version, for messages (`13000` = 13.0); 0 if it has none.
    pub driver: u32,
}

impl DeviceInfo {
    /// Which part of a GPU the device is, if its owner has divided the GPU: `1g.10gb` (MIG). Its memory and multiprocessors are those
    /// of the part.
    pub fn slice(&self) -> Option<&str> {
        slice(&self.name)
    }
}

/// The part of a GPU that a device of this name is: `1g.10gb` of `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
pub fn slice(name: &str) -> Option<&str> {
    let (_, profile) = name.split_once(" MIG ")?;
    profile.split_whitespace().next()
}

/// One launch of a kernel: CUDA's own shape.
#[derive(Debug, Clone)]
pub struct Launch<'a> {
    /// Name of the kernel, as in `cuda/`.
    pub kernel: &'a str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared: u32,
    /// The kernel's one parameter: a struct of `cuda/include/abi.h`, as bytes.
    pub params: &'a [u8],
}

/// Host memory that the accelerator can copy from and to at full speed, and that it can read and write
/// in place (mapped). Cacheable on the host.
pub trait Pinned: Send + Sync {
    /// Its address on the host.
    fn host(&self) -> *mut u8;
    /// Its address on the accelerator; NULL if not accessible there (only in a [`Slab`]).
    fn device(&self) -> DevPtr;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One allocation of host memory of exact size, page-locked once and shared by several ranges: [`Runtime::slab`].
#[derive(Clone)]
pub struct Slab {
    memory: Arc<dyn Pinned>,
    pageable: Option<Arc<str>>,
}

impl Slab {
    /// A slab of `memory`; `pageable` is the reason if it is not page-locked.
    pub fn new(memory: Arc<dyn Pinned>, pageable: Option<String>) -> Slab {
        Slab { memory, pageable: pageable.map(Arc::from) }
    }

    /// The whole memory.
    pub fn memory(&self) -> &Arc<dyn Pinned> {
        &self.memory
    }

    /// A range of the slab as pinned memory. The slab lives as long as any of its ranges.
    ///
    /// # Panics
    /// If the range does not lie in the slab.
    pub fn range(&self, range: Range<usize>) -> Arc<dyn Pinned> {
        assert!(
            range.start <= range.end && range.end <= self.memory.len(),
            "bytes {range:?} of a slab of {}",
            self.memory.len()
        );
        Arc::new(Part { slab: self.memory.clone(), at: range.start, len: range.len() })
    }

    /// The reason if the slab is not page-locked. Copies are then slower and may block the caller, and the accelerator
    /// cannot access the memory ([`Pinned::device`] is NULL).
    pub fn pageable(&self) -> Option<&str> {
        self.pageable.as_deref()
    }
}

/// A range of a [`Slab`].
struct Part {
    slab: Arc<dyn Pinned>,
    at: usize,
    len: usize,
}

impl Pinned for Part {
    fn host(&self) -> *mut u8 {
        // The range was asserted when this part was created. An empty range at the end points one past the end.
        self.slab.host().wrapping_add(self.at)
    }
    fn device(&self) -> DevPtr {
        let base = self.slab.device();
        if base.is_null() { base } else { base.add(self.at) }
    }
    fn len(&self) -> usize {
        self.len
    }
}

/// The low-level interface of an accelerator: memory, lanes, launches. All methods may be called from any thread.
pub trait Runtime: Send + Sync {
    /// The device's description.
    fn info(&self) -> &DeviceInfo;

    /// Free bytes of its memory (under the cap, if one was set). Waits for the work in flight on freed memory.
    fn memory_free(&self) -> Result<u64>;

    /// Bytes of the pieces in which larger allocations take memory: 1 where they take what they ask for. Those of at most half a
    /// piece share pieces.
    fn granule(&self) -> u64;

    /// Allocates `bytes` > 0 of memory, aligned to 256. Its contents are undefined.
    ///
    /// # Errors
    /// [`crate::Error::Capacity`] if it does not fit.
    fn alloc(&self, bytes: usize) -> Result<DevPtr>;

    /// Frees memory after the work enqueued so far. Never waits, neither for a lane nor for the context.
    fn free(&self, ptr: DevPtr);

    /// Allocates pinned, mapped, cacheable host memory, zeroed.
    ///
    /// # Errors
    /// [`crate::Error::Capacity`] if the host refuses to lock that much; [`crate::Error::Unsupported`] if the
    /// accelerator cannot read and write host memory in place.
    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>>;

    /// Allocates exactly `bytes` of host memory, zeroed, aligned to pages and page-locked in one registration, to be
    /// divided into ranges. It is mapped if the accelerator supports that. If the host refuses to lock that much, it is
    /// pageable, with the reason in [`Slab::pageable`] and [`Runtime::notices`].
    ///
    /// `touch` is given its address before it is locked, while it has no pages yet, and may touch it by the threads that will read it,
    /// so that the pages (huge ones, if the system has them) lie on their memory nodes: locking puts all of them on the caller's.
    /// Accelerators that lock nothing leave that out.
    ///
    /// # Errors
    /// [`crate::Error::Capacity`] if the host does not even have pageable memory.
    fn slab_touched(&self, bytes: usize, touch: &dyn Fn(*mut u8)) -> Result<Slab>;

    /// [`Runtime::slab_touched`] by nobody.
    ///
    /// # Errors
    /// As [`Runtime::slab_touched`].
    fn slab(&self, bytes: usize) -> Result<Slab> {
        self.slab_touched(bytes, &|_| ())
    }

    /// Enqueues a copy of `src` (staged: it may be reused at once).
    fn upload(&self, lane: Lane, dst: DevPtr, src: &[u8]) -> Result<()>;

    /// Enqueues a copy of a range of pinned memory, without staging. The caller must not touch the range until an event
    /// after the copy is done.
    fn upload_pinned(
        &self,
        lane: Lane,
        dst: DevPtr,
        src: &Arc<dyn Pinned>,
        range: Range<usize>,
    ) -> Result<()>;

    /// Enqueues a copy to pinned memory, from byte `at` on. The caller must not touch it until an event after the copy
    /// is done.
    fn download_pinned(
        &self,
        lane: Lane,
        src: DevPtr,
        dst: &Arc<dyn Pinned>,
        at: usize,
        len: usize,
    ) -> Result<()>;

    /// Copies to `dst` after everything enqueued on `lane`, and waits for it.
    fn download(&self, lane: Lane, src: DevPtr, dst: &mut [u8]) -> Result<()>;

    /// Enqueues a copy within the device's memory.
    fn copy(&self, lane: Lane, dst: DevPtr, src: DevPtr, len: usize) -> Result<()>;

    /// Enqueues setting `len` bytes to `value`.
    fn fill(&self, lane: Lane, dst: DevPtr, value: u8, len: usize) -> Result<()>;

    /// Enqueues a kernel.
    fn launch(&self, lane: Lane, launch: &Launch<'_>) -> Result<()>;

    /// Whether this runtime has a kernel of that name (embedded for a target that the device can run).
    fn has_kernel(&self, kernel: &str) -> bool;

    /// Loads the kernels whose names `wanted` accepts, so that no launch has to wait for them; other work may be
    /// enqueued meanwhile. `progress` is called with the number of modules loaded and their total. Does nothing where
    /// kernels need no loading.
    ///
    /// # Errors
    /// If the device cannot load a kernel.
    fn preload(&self, wanted: &dyn Fn(&str) -> bool, progress: &dyn Fn(usize, usize)) -> Result<()> {
        let _ = (wanted, progress);
        Ok(())
    }

    /// The 128-byte descriptor of a row-major matrix of 2-byte elements in device memory,
    /// `[rows][stride]` of which `cols` count, for bulk tensor copies of boxes `[box_rows][box_cols]` with
    /// a 128-byte swizzle (so `box_cols` <= 64), zero-filled outside. Returns an error if the device has no such copies
    /// (below 90).
    fn tensor_map_2d(
        &self,
        base: DevPtr,
        rows: u64,
        cols: u64,
        stride: u64,
        box_rows: u32,
        box_cols: u32,
    ) -> Result<[u8; 128]>;

    /// Records an event after everything enqueued on `lane` so far.
    fn record(&self, lane: Lane) -> Result<Event>;

    /// As [`Runtime::record`]; the event also keeps the time at which the lane reaches it, for [`Runtime::elapsed`].
    fn record_timed(&self, lane: Lane) -> Result<Event>;

    /// The device's time between two timed events, of one lane or two; zero if `to` was reached first.
    ///
    /// # Errors
    /// If one of the events is not done, or keeps no time.
    fn elapsed(&self, from: &Event, to: &Event) -> Result<Duration>;

    /// Makes later work of `lane` wait for `event`.
    fn wait(&self, lane: Lane, event: &Event) -> Result<()>;

    /// Whether everything before `event` is done.
    fn is_done(&self, event: &Event) -> Result<bool>;

    /// Sleeps until everything before `event` is done.
    fn synchronize(&self, event: &Event) -> Result<()>;

    /// As [`Runtime::synchronize`], but spins first: where host and device alternate, waking up would cost more than
    /// the wait.
    fn spin_until_done(&self, event: &Event) -> Result<()> {
        self.synchronize(event)
    }

    /// Waits until everything before `event` is done or `deadline` has passed. Returns whether it is done.
    fn synchronize_until(&self, event: &Event, deadline: Instant) -> Result<bool>;

    /// Blocks until everything enqueued is done.
    fn synchronize_all(&self) -> Result<()> {
        for lane in Lane::ALL {
            self.synchronize(&self.record(lane)?)?;
        }
        Ok(())
    }

    /// Runs `enqueue`, which enqueues on [`Lane::Compute`] only, but records the work instead of running it. Returns
    /// `None` if the device cannot record or its driver refuses (then nothing has been enqueued, and
    /// [`Runtime::notices`] says why). A kernel's first launch compiles and loads it, which a recording does not allow:
    /// run the same work once before.
    fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>>;

    /// Enqueues recorded work on the compute lane.
    fn replay(&self, graph: &Graph) -> Result<()>;

    /// Announces that the host is about to read and write these bytes of pinned memory in place (host addresses and
    /// lengths). An emulated accelerator returns an error if work in flight that touches them has not been waited for.
    ///
    /// # Errors
    /// If there is such work; the error names it.
    fn host_access(&self, reads: &[(*const u8, usize)], writes: &[(*const u8, usize)]) -> Result<()> {
        let _ = (reads, writes);
        Ok(())
    }

    /// Announces that the host reads and writes these bytes of pinned memory in place until the returned value is
    /// dropped. The host's work may not have begun yet; drop the value once it is known to be done. Meanwhile an
    /// emulated accelerator refuses work that touches the bytes, because nothing orders the two.
    fn host_use(&self, reads: &[(*const u8, usize)], writes: &[(*const u8, usize)]) -> Option<HostUse> {
        let _ = (reads, writes);
        None
    }

    /// Declares that the next work on `lane` reads and writes these bytes in addition to those that its call names:
    /// pages of a list in device memory. Declarations are not recorded. As with copies, an emulated accelerator returns
    /// an error if work on another lane touches the bytes and no event orders the two.
    ///
    /// # Errors
    /// If there is such work (the error names it), if the memory is not allocated, or if the device has failed.
    fn declare(
        &self,
        lane: Lane,
        what: &str,
        reads: &[(DevPtr, usize)],
        writes: &[(DevPtr, usize)],
    ) -> Result<()> {
        let _ = (lane, what, reads, writes);
        Ok(())
    }

    /// Whether [`Runtime::host_access`], [`Runtime::host_use`] and [`Runtime::declare`] are worth a call.
    fn watches(&self) -> bool {
        false
    }

    /// Announces that the host has finished a job of this duration beside the device, before its end is visible to
    /// others. An emulated accelerator with a slow host delays the end accordingly.
    fn host_worked(&self, took: Duration) {
        let _ = took;
    }

    /// Announces that the host is about to do a job beside the device. An emulated accelerator panics here if its plan
    /// of faults says so, as the job itself might.
    fn host_works(&self) {}

    /// The actors that take turns while a thread waits, if the accelerator has no threads. Used by one thread at a
    /// time.
    fn turns(&self) -> Option<&Arc<Turns>> {
        None
    }

    /// The clock of emulated time, if this accelerator has one. Events then keep its time, not that of this computer.
    fn clock(&self) -> Option<&Arc<Clock>> {
        None
    }

    /// Occupies `lane` for this many seconds of emulated time, in addition to the real work. A recording includes it.
    /// Without a clock nothing happens.
    ///
    /// # Errors
    /// If the device has failed.
    fn elapse(&self, lane: Lane, seconds: f64) -> Result<()> {
        let _ = (lane, seconds);
        Ok(())
    }

    /// When `event` is reached in emulated time, for operations of the host that wait for it. `None` without a clock.
    fn moment(&self, event: &Event) -> Option<Moment> {
        let _ = event;
        None
    }

    /// Sentences for the user about slower paths taken, each with a remedy.
    fn notices(&self) -> Vec<String> {
        Vec::new()
    }
}

/// An in-place use of bytes by the host, which ends when this is dropped: see [`Runtime::host_use`].
pub struct HostUse(#[allow(dead_code)] pub(super) Box<dyn Send + Sync>);

/// Memory that frees itself.
pub struct Buffer {
    runtime: Arc<dyn Runtime>,
    ptr: DevPtr,
    len: usize,
}

impl Buffer {
    /// Allocates `bytes` (at least one) of undefined contents.
    ///
    /// # Errors
    /// As [`Runtime::alloc`].
    pub fn new(runtime: &Arc<dyn Runtime>, bytes: usize) -> Result<Buffer> {
        let len = bytes.max(1);
        Ok(Buffer { runtime: runtime.clone(), ptr: runtime.alloc(len)?, len })
    }

    /// Allocates a buffer and enqueues the copy of `data` to it on `lane`.
    ///
    /// # Errors
    /// As [`Runtime::alloc`] and [`Runtime::upload`].
    pub fn from_bytes(runtime: &Arc<dyn Runtime>, lane: Lane, data: &[u8]) -> Result<Buffer> {
        let buffer = Buffer::new(runtime, data.len())?;
        runtime.upload(lane, buffer.ptr, data)?;
        Ok(buffer)
    }

    /// The address of its first byte.
    pub fn ptr(&self) -> DevPtr {
        self.ptr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: see [`Buffer::new`].
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.runtime.free(self.ptr);
    }
}

/// A parameter struct of `cuda/include/abi.h`: `repr(C)`, plain data.
///
/// # Safety
/// Every byte that a kernel reads is initialised, and the layout is that of the C struct of the same name.
pub unsafe trait Params: Copy + 'static {
    /// Its bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: `Self` is a plain C struct by the trait's contract; padding is never read by kernels,
        // and the values come from `Default` (zeroed) or bindgen constructors.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast::<u8>(), size_of::<Self>()) }
    }
}
