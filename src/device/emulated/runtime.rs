//! The runtime contract over the emulated lanes and memory.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::lanes::{Core, InTurn, Mark};
use super::op::{HostOp, LayerPageMoves, Op, Span};
use super::options::{EmulatedOptions, FaultPlan};
use super::program::{self, OwnedLaunch};
use crate::device::clock::{Clock, Moment};
use crate::device::runtime::{
    DevPtr, DeviceInfo, Event, Graph, HostUse, Lane, Launch, Pinned, Runtime, Slab,
};
use crate::device::turns::{Actor, Turns};
use crate::{Error, Result};

/// Most threads of a block on any device, then most bytes of a kernel's parameters.
const MAX_THREADS: u128 = 1024;
const MAX_PARAMS: usize = 4096;

/// An accelerator made of CPU threads. Dropping it abandons work that has not begun.
pub struct EmulatedRuntime {
    core: Arc<Core>,
    threads: Vec<JoinHandle<()>>,
    /// The lanes, where they have no threads.
    in_turn: Vec<Arc<dyn Actor>>,
    notices: Mutex<Vec<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Most shared memory of a block, by compute capability (CUDA programming guide, table of technical specifications).
fn shared_per_block(sm: u32) -> Option<u32> {
    Some(match sm {
        75 => 64 << 10,
        80 => 163 << 10,
        86 | 89 => 99 << 10,
        90 => 227 << 10,
        _ => return None,
    })
}

impl EmulatedRuntime {
    /// Creates the accelerator and starts its lanes.
    ///
    /// # Errors
    /// If the compute capability is not emulated, the memory exceeds the address space, or a thread cannot be started.
    pub fn new(options: EmulatedOptions) -> Result<EmulatedRuntime> {
        EmulatedRuntime::start(options, None)
    }

    /// Creates the accelerator in emulated time: copies take as long as over the link of the clock's machine, and
    /// issuing costs the control thread time. The time of computation is declared ([`EmulatedRuntime::elapse`]).
    ///
    /// # Errors
    /// As [`EmulatedRuntime::new`].
    pub fn timed(options: EmulatedOptions, clock: Arc<Clock>) -> Result<EmulatedRuntime> {
        EmulatedRuntime::start(options, Some(clock))
    }

    fn start(options: EmulatedOptions, clock: Option<Arc<Clock>>) -> Result<EmulatedRuntime> {
        let Some(shared_per_block) = shared_per_block(options.sm) else {
            return Err(Error::usage(format!(
                "emulated accelerator: compute capability {} is not one of 75, 80, 86, 89, 90",
                options.sm
            )));
        };
        let info = DeviceInfo {
            name: format!("emulated (sm_{})", options.sm),
            sm: options.sm,
            multiprocessors: options.multiprocessors.max(1),
            memory_total: options.memory,
            shared_per_block,
            l2_bytes: 0,
            memory_bw: 0,
            clock_khz: 0,
            driver: 0,
        };
        let core = Arc::new(Core::new(info, options, clock)?);
        let mut runtime =
            EmulatedRuntime { core, threads: Vec::new(), in_turn: Vec::new(), notices: Mutex::default() };
        if let Some(turns) = &runtime.core.turns {
            for lane in Lane::ALL {
                let actor: Arc<dyn Actor> = Arc::new(InTurn::new(&runtime.core, lane));
                turns.add(Arc::downgrade(&actor));
                runtime.in_turn.push(actor);
            }
            return Ok(runtime);
        }
        for lane in Lane::ALL {
            let core = runtime.core.clone();
            let thread = std::thread::Builder::new()
                .name(format!("emulated-{lane:?}"))
                .spawn(move || {
                    // Its parent may be pinned with a pool.
                    crate::host::unpin_current_thread();
                    core.serve(lane)
                })
                .map_err(|e| Error::Device {
                    what: "emulated accelerator".into(),
                    problem: format!("the system refuses to start a thread: {e}"),
                })?;
            runtime.threads.push(thread);
        }
        Ok(runtime)
    }

    /// The options it was created with.
    pub fn options(&self) -> &EmulatedOptions {
        &self.core.options
    }

    /// Replaces the plan of faults and restarts its counters.
    pub fn set_faults(&self, plan: FaultPlan) {
        self.core.set_faults(plan);
    }

    /// Enqueues an operation that runs on the host; `body` receives the bytes of `reads` and of `writes`, in order.
    /// Spans may lie in pinned memory too.
    ///
    /// # Errors
    /// As for a launch, and if a span in `writes` overlaps another of its spans.
    pub fn operation(
        &self,
        lane: Lane,
        name: &str,
        reads: &[Span],
        writes: &[Span],
        body: impl Fn(&[&[u8]], &mut [&mut [u8]]) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        let name = Cow::Owned(name.to_owned());
        let (reads, writes) = (reads.to_vec(), writes.to_vec());
        self.enqueue(lane, HostOp { name, reads, writes, body: Box::new(body) })
    }

    /// Enqueues an operation that runs on the host.
    pub(super) fn enqueue(&self, lane: Lane, op: HostOp) -> Result<()> {
        let HostOp { name, reads, writes, .. } = &op;
        let failed = |problem: String| Error::Device { what: format!("operation {name}"), problem };
        for (i, w) in writes.iter().enumerate() {
            if let Some(other) = reads.iter().chain(&writes[i + 1..]).find(|s| s.overlaps(w)) {
                return Err(failed(format!(
                    "{} bytes at {:#x} to write overlap {} bytes at {:#x}",
                    w.len, w.ptr.0, other.len, other.ptr.0
                )));
            }
        }
        self.core.may_launch(name)?;
        self.core.enqueue(lane, Op::Host(op))
    }

    /// Whether an address lies in pinned host memory.
    pub(in crate::device) fn is_host(&self, ptr: DevPtr) -> bool {
        self.core.is_host(ptr)
    }

    /// Enqueues a move of pages.
    pub(super) fn move_pages(&self, lane: Lane, pages: LayerPageMoves) -> Result<()> {
        self.core.may_launch(if pages.to_host { "gather_pages" } else { "scatter_pages" })?;
        self.core.enqueue(lane, Op::Pages(pages))
    }

    /// The mark in an event of this runtime.
    fn mark(&self, event: &Event) -> Result<Arc<Mark>> {
        let mark = event.0.clone().downcast::<Mark>().ok();
        mark.filter(|m| std::ptr::eq(m.device.as_ptr(), Arc::as_ptr(&self.core))).ok_or_else(|| {
            Error::Device {
                what: "emulated accelerator".into(),
                problem: "the event is of another accelerator".into(),
            }
        })
    }
}

impl Drop for EmulatedRuntime {
    fn drop(&mut self) {
        self.core.shut_down();
        for thread in self.threads.drain(..) {
            // The last owner may be an operation on a lane's own thread.
            if thread.thread().id() != std::thread::current().id() {
                thread.join().ok();
            }
        }
    }
}

/// Host addresses as spans.
fn host_spans(all: &[(*const u8, usize)]) -> Vec<Span> {
    all.iter().map(|&(at, len)| Span::new(DevPtr(at as u64), len)).collect()
}

/// An in-place use by the host that ends when this is dropped.
struct InUse {
    core: Arc<Core>,
    id: u64,
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.core.host_used(self.id);
    }
}

/// Checks that `at..at + len` lies in the pinned memory.
fn pinned_range(pinned: &Arc<dyn Pinned>, at: usize, len: usize) -> Result<()> {
    if at.checked_add(len).is_none_or(|end| end > pinned.len()) {
        return Err(Error::Device {
            what: "emulated accelerator".into(),
            problem: format!("{len} bytes from byte {at} of {} bytes of pinned memory", pinned.len()),
        });
    }
    Ok(())
}

impl Runtime for EmulatedRuntime {
    fn info(&self) -> &DeviceInfo {
        &self.core.info
    }

    fn memory_free(&self) -> Result<u64> {
        self.core.memory_left()
    }

    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        self.core.alloc(bytes)
    }

    fn free(&self, ptr: DevPtr) {
        self.core.free(ptr);
    }

    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>> {
        Ok(self.core.pinned(bytes)?)
    }

    fn granule(&self) -> u64 {
        1
    }

    fn slab_touched(&self, bytes: usize, _touch: &dyn Fn(*mut u8)) -> Result<Slab> {
        match self.core.pinned(bytes) {
            Ok(memory) => Ok(Slab::new(memory, None)),
            Err(Error::Capacity(why)) => {
                let memory = self.core.pageable(bytes)?;
                let why = format!("{bytes} bytes of host memory stay pageable, copies are slower: {why}");
                lock(&self.notices).push(why.clone());
                Ok(Slab::new(memory, Some(why)))
            }
            Err(error) => Err(error),
        }
    }

    fn upload(&self, lane: Lane, dst: DevPtr, src: &[u8]) -> Result<()> {
        self.core.enqueue(lane, Op::Upload { dst, data: src.into() })
    }

    fn upload_pinned(
        &self,
        lane: Lane,
        dst: DevPtr,
        src: &Arc<dyn Pinned>,
        range: Range<usize>,
    ) -> Result<()> {
        let (at, len) = (range.start, range.len());
        pinned_range(src, at, len)?;
        self.core.enqueue(lane, Op::FromPinned { dst, src: src.clone(), at, len })
    }

    fn download_pinned(
        &self,
        lane: Lane,
        src: DevPtr,
        dst: &Arc<dyn Pinned>,
        at: usize,
        len: usize,
    ) -> Result<()> {
        pinned_range(dst, at, len)?;
        self.core.enqueue(lane, Op::ToPinned { src, dst: dst.clone(), at, len })
    }

    fn download(&self, lane: Lane, src: DevPtr, dst: &mut [u8]) -> Result<()> {
        let to = Arc::new(Mutex::new(Vec::new()));
        self.core.enqueue(lane, Op::ToHost { src, len: dst.len(), to: to.clone() })?;
        self.core.synchronize(&*self.core.record(lane, false)?)?;
        dst.copy_from_slice(&to.lock().unwrap_or_else(|e| e.into_inner()));
        Ok(())
    }

    fn copy(&self, lane: Lane, dst: DevPtr, src: DevPtr, len: usize) -> Result<()> {
        self.core.enqueue(lane, Op::Copy { dst, src, len })
    }

    fn fill(&self, lane: Lane, dst: DevPtr, value: u8, len: usize) -> Result<()> {
        self.core.enqueue(lane, Op::Fill { dst, value, len })
    }

    fn launch(&self, lane: Lane, launch: &Launch<'_>) -> Result<()> {
        let refused = |problem: String| Error::Device { what: format!("kernel {}", launch.kernel), problem };
        self.core.alive()?;
        if !self.has_kernel(launch.kernel) {
            return Err(refused(format!("there is none of that name for sm_{}", self.core.info.sm)));
        }
        let threads: u128 = launch.block.iter().map(|&n| n as u128).product();
        if launch.grid.contains(&0) || threads == 0 || threads > MAX_THREADS {
            return Err(refused(format!(
                "a grid of {:?} blocks of {:?} threads cannot be launched",
                launch.grid, launch.block
            )));
        }
        if launch.shared > self.core.info.shared_per_block {
            return Err(refused(format!(
                "{} bytes of shared memory asked for, a block may have {}",
                launch.shared, self.core.info.shared_per_block
            )));
        }
        if launch.params.len() > MAX_PARAMS {
            return Err(refused(format!(
                "{} bytes of parameters, at most {MAX_PARAMS}",
                launch.params.len()
            )));
        }
        self.core.may_launch(launch.kernel)?;
        let owned = OwnedLaunch {
            kernel: launch.kernel.into(),
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            params: launch.params.into(),
        };
        self.core.enqueue(lane, Op::Kernel(Arc::new(owned)))
    }

    fn has_kernel(&self, kernel: &str) -> bool {
        program::has_kernel(kernel, self.core.info.sm)
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
        if self.core.info.sm < 90 {
            return Err(Error::Unsupported(format!("{}: no tensor maps below sm_90", self.core.info.name)));
        }
        program::tensor_map_2d(base, rows, cols, stride, box_rows, box_cols)
    }

    fn record(&self, lane: Lane) -> Result<Event> {
        Ok(Event(self.core.record(lane, false)?))
    }

    fn record_timed(&self, lane: Lane) -> Result<Event> {
        Ok(Event(self.core.record(lane, true)?))
    }

    fn elapsed(&self, from: &Event, to: &Event) -> Result<Duration> {
        self.core.elapsed(&*self.mark(from)?, &*self.mark(to)?)
    }

    fn wait(&self, lane: Lane, event: &Event) -> Result<()> {
        self.core.wait(lane, &self.mark(event)?)
    }

    fn is_done(&self, event: &Event) -> Result<bool> {
        self.core.is_done(&*self.mark(event)?)
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        self.core.synchronize(&*self.mark(event)?)
    }

    fn synchronize_until(&self, event: &Event, deadline: Instant) -> Result<bool> {
        self.core.synchronize_until(&*self.mark(event)?, Some(deadline))
    }

    fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        let ops: Arc<[Op]> = self.core.capture(enqueue)?.into();
        Ok(Some(Graph(Arc::new(ops))))
    }

    fn replay(&self, graph: &Graph) -> Result<()> {
        let Some(ops) = graph.0.downcast_ref::<Arc<[Op]>>() else {
            return Err(Error::Device {
                what: "emulated accelerator".into(),
                problem: "the recorded work is of another accelerator".into(),
            });
        };
        self.core.enqueue(Lane::Compute, Op::Graph(ops.clone()))
    }

    fn host_access(&self, reads: &[(*const u8, usize)], writes: &[(*const u8, usize)]) -> Result<()> {
        self.core.host_access(&host_spans(reads), &host_spans(writes))
    }

    fn host_use(&self, reads: &[(*const u8, usize)], writes: &[(*const u8, usize)]) -> Option<HostUse> {
        let id = self.core.host_use(host_spans(reads), host_spans(writes));
        Some(HostUse(Box::new(InUse { core: self.core.clone(), id })))
    }

    fn declare(
        &self,
        lane: Lane,
        what: &str,
        reads: &[(DevPtr, usize)],
        writes: &[(DevPtr, usize)],
    ) -> Result<()> {
        let spans = |all: &[(DevPtr, usize)]| -> Arc<[Span]> {
            all.iter().map(|&(p, len)| Span::new(p, len)).collect()
        };
        self.core.enqueue(lane, Op::Uses { what: what.into(), reads: spans(reads), writes: spans(writes) })
    }

    fn watches(&self) -> bool {
        true
    }

    fn host_worked(&self, took: Duration) {
        self.core.host_worked(took);
    }

    fn host_works(&self) {
        self.core.host_works();
    }

    fn turns(&self) -> Option<&Arc<Turns>> {
        self.core.turns.as_ref()
    }

    fn clock(&self) -> Option<&Arc<Clock>> {
        self.core.clock.as_ref()
    }

    fn elapse(&self, lane: Lane, seconds: f64) -> Result<()> {
        match self.core.clock {
            Some(_) => self.core.enqueue(lane, Op::Elapse(seconds)),
            None => Ok(()),
        }
    }

    fn moment(&self, event: &Event) -> Option<Moment> {
        self.mark(event).ok()?.moment.clone()
    }

    fn notices(&self) -> Vec<String> {
        lock(&self.notices).clone()
    }
}
