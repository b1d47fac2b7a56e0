//! The accelerator contract on a GPU.

use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

use cudarc::driver::sys;

use super::capture::CudaGraph;
use super::context::{Context, Work, lane_name};
use super::errors::device;
use super::events::{CudaEvent, Spare};
use super::memory::Memory;
use super::modules::Modules;
use super::pinned::{Caching, CudaPinned};
use super::release::Release;
use super::staging::Staging;
use super::{CudaOptions, driver, tensor_map};
use crate::Result;
use crate::device::runtime::{DevPtr, DeviceInfo, Event, Graph, Lane, Launch, Pinned, Runtime};

/// A GPU.
pub struct CudaRuntime {
    info: DeviceInfo,
    context: Arc<Context>,
    memory: Memory,
    release: Arc<Release>,
    spare: Arc<Spare>,
    staging: Staging,
    modules: Modules,
    /// The thread that records the compute lane, if one does.
    recording: Mutex<Option<ThreadId>>,
    /// Held while recorded work is launched.
    replaying: Mutex<()>,
}

impl CudaRuntime {
    pub(super) fn open(options: &CudaOptions) -> Result<CudaRuntime> {
        let driver = driver::find()?;
        let handle = driver.device(options.ordinal)?;
        let listed = driver::listed(handle)?;
        let name = format!("cuda:{} ({})", options.ordinal, listed.name);
        let sm = options.pretend_sm.map_or(listed.sm, |sm| sm.min(listed.sm));
        let context = Arc::new(Context::new(handle, name)?);
        let modules = Modules::choose(context.clone(), sm, listed.sm, driver.version)?;
        let release = Arc::new(Release::new(context.clone()));
        let spare = Arc::new(Spare::new(context.clone()));
        Ok(CudaRuntime {
            info: DeviceInfo {
                name: listed.name,
                sm,
                multiprocessors: listed.multiprocessors,
                memory_total: listed.memory,
                shared_per_block: listed.shared_per_block,
                driver: driver.version,
            },
            memory: Memory::new(context.clone(), release.clone(), options.memory),
            staging: Staging::new(context.clone(), release.clone(), spare.clone()),
            release,
            spare,
            modules,
            context,
            recording: Mutex::new(None),
            replaying: Mutex::new(()),
        })
    }

    /// Whether `lane` takes work of this thread now. `recordable` work may be part of a recording.
    fn may_enqueue(&self, lane: Lane, what: &str, recordable: bool) -> Result<()> {
        let recording = *self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(thread) = recording else { return Ok(()) };
        let here = thread == std::thread::current().id();
        match (here, lane) {
            (true, Lane::Compute) if recordable => Ok(()),
            (true, _) => Err(device(what, format!("cannot be recorded on the {}", lane_name(lane)))),
            (false, Lane::Compute) => Err(device(what, "another thread records the compute lane")),
            (false, _) => Ok(()),
        }
    }

    fn event<'a>(&self, event: &'a Event) -> &'a CudaEvent {
        let event = event.0.downcast_ref::<CudaEvent>().expect("an event of another runtime");
        assert!(event.is_of(&self.context), "an event of another device");
        event
    }

    fn pinned_range(pinned: &Arc<dyn Pinned>, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= pinned.len(),
            "bytes {range:?} of {} bytes of pinned memory",
            pinned.len()
        );
    }
}

impl Runtime for CudaRuntime {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_free(&self) -> Result<u64> {
        self.memory.free_bytes()
    }

    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        self.memory.alloc(bytes)
    }

    fn free(&self, ptr: DevPtr) {
        self.memory.free(ptr);
    }

    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>> {
        Ok(Arc::new(CudaPinned::new(&self.context, &self.release, bytes, Caching::Cached)?))
    }

    fn upload(&self, lane: Lane, dst: DevPtr, src: &[u8]) -> Result<()> {
        self.may_enqueue(lane, "an upload", false)?;
        self.staging.upload(lane, dst, src)
    }

    fn upload_pinned(
        &self,
        lane: Lane,
        dst: DevPtr,
        src: &Arc<dyn Pinned>,
        range: Range<usize>,
    ) -> Result<()> {
        CudaRuntime::pinned_range(src, &range);
        self.may_enqueue(lane, "an upload", true)?;
        self.context.bind()?;
        // SAFETY: the range was checked, and stays alive: pinned memory is given back only when the device
        // has settled. The caller owns the destination.
        let code = unsafe {
            let from = src.host().add(range.start).cast::<c_void>();
            sys::cuMemcpyHtoDAsync_v2(dst.0, from, range.len(), self.context.stream(lane))
        };
        self.context.enqueued(lane, Work::Copy("an upload"), code)
    }

    fn download_pinned(
        &self,
        lane: Lane,
        src: DevPtr,
        dst: &Arc<dyn Pinned>,
        at: usize,
        len: usize,
    ) -> Result<()> {
        CudaRuntime::pinned_range(dst, &(at..at.saturating_add(len)));
        self.may_enqueue(lane, "a download", true)?;
        self.context.bind()?;
        // SAFETY: as in `upload_pinned`, the other way.
        let code = unsafe {
            let to = dst.host().add(at).cast::<c_void>();
            sys::cuMemcpyDtoHAsync_v2(to, src.0, len, self.context.stream(lane))
        };
        self.context.enqueued(lane, Work::Copy("a download"), code)
    }

    fn download(&self, lane: Lane, src: DevPtr, dst: &mut [u8]) -> Result<()> {
        self.may_enqueue(lane, "a download", false)?;
        self.context.bind()?;
        let stream = self.context.stream(lane);
        // SAFETY: `dst` has that many bytes and is borrowed until the lane has been waited for, below.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src.0, dst.len(), stream) };
        self.context.enqueued(lane, Work::Copy("a download"), code)?;
        // SAFETY: a stream of this context.
        let code = unsafe { sys::cuStreamSynchronize(stream) };
        self.context.check("a download", code)
    }

    fn copy(&self, lane: Lane, dst: DevPtr, src: DevPtr, len: usize) -> Result<()> {
        self.may_enqueue(lane, "a copy", true)?;
        self.context.bind()?;
        // SAFETY: the caller owns both ranges of the device's memory.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(dst.0, src.0, len, self.context.stream(lane)) };
        self.context.enqueued(lane, Work::Copy("a copy"), code)
    }

    fn fill(&self, lane: Lane, dst: DevPtr, value: u8, len: usize) -> Result<()> {
        self.may_enqueue(lane, "a fill", true)?;
        self.context.bind()?;
        // SAFETY: the caller owns the range of the device's memory.
        let code = unsafe { sys::cuMemsetD8Async(dst.0, value, len, self.context.stream(lane)) };
        self.context.enqueued(lane, Work::Copy("a fill"), code)
    }

    fn launch(&self, lane: Lane, launch: &Launch<'_>) -> Result<()> {
        let what = || format!("kernel {}", launch.kernel);
        let Some(kernel) = self.modules.get(launch.kernel) else {
            let sm = format!("{}.{}", self.info.sm / 10, self.info.sm % 10);
            return Err(device(what(), format!("not in this build for compute capability {sm}")));
        };
        assert_eq!(
            launch.params.len(),
            kernel.params as usize,
            "kernel {}: bytes of the parameter struct",
            kernel.name
        );
        if launch.shared > self.info.shared_per_block {
            return Err(device(
                what(),
                format!(
                    "wants {} bytes of shared memory, a block of {} may have {}",
                    launch.shared, self.context.name, self.info.shared_per_block
                ),
            ));
        }
        self.may_enqueue(lane, "a kernel", true)?;
        self.context.bind()?;
        let function = self.modules.function(kernel, launch.shared)?;
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        let stream = self.context.stream(lane);
        let mut params = [launch.params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the function's only parameter has the length of `params` (asserted above), which the driver
        // copies before it returns. What the kernel touches through the addresses in it is its own contract.
        let code = unsafe {
            let (params, none) = (params.as_mut_ptr(), std::ptr::null_mut());
            sys::cuLaunchKernel(function, gx, gy, gz, bx, by, bz, launch.shared, stream, params, none)
        };
        self.context.enqueued(lane, Work::Kernel(kernel.name), code).map_err(|error| match error {
            crate::Error::Device { problem, .. } if !self.context.is_lost() => device(
                &self.context.name,
                format!(
                    "{problem} (grid {:?}, block {:?}, {} bytes of shared memory)",
                    launch.grid, launch.block, launch.shared
                ),
            ),
            error => error,
        })
    }

    fn has_kernel(&self, kernel: &str) -> bool {
        self.modules.get(kernel).is_some()
    }

    fn preload(&self, wanted: &dyn Fn(&str) -> bool, progress: &dyn Fn(usize, usize)) -> Result<()> {
        self.modules.preload(wanted, progress)
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
        if self.info.sm < 90 {
            return Err(tensor_map::unsupported(&self.context, self.info.sm));
        }
        tensor_map::encode(&self.context, base, [rows, cols, stride], [box_rows, box_cols])
    }

    fn record(&self, lane: Lane) -> Result<Event> {
        self.may_enqueue(lane, "an event", false)?;
        Ok(Event(Arc::new(CudaEvent::record(&self.spare, lane)?)))
    }

    fn wait(&self, lane: Lane, event: &Event) -> Result<()> {
        self.may_enqueue(lane, "waiting for an event", false)?;
        self.event(event).wait(lane)
    }

    fn is_done(&self, event: &Event) -> Result<bool> {
        self.event(event).is_done()
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        self.event(event).synchronize()
    }

    fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        {
            let mut recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
            if recording.is_some() {
                return Err(device(&self.context.name, "the compute lane is being recorded already"));
            }
            *recording = Some(std::thread::current().id());
            self.release.hold();
        }
        let _over = Over(self);
        let graph = CudaGraph::record(&self.context, &self.release, enqueue)?;
        Ok(Some(Graph(Arc::new(graph) as Arc<dyn Any + Send + Sync>)))
    }

    fn replay(&self, graph: &Graph) -> Result<()> {
        let graph = graph.0.downcast_ref::<CudaGraph>().expect("recorded work of another runtime");
        assert!(graph.is_of(&self.context), "recorded work of another device");
        self.may_enqueue(Lane::Compute, "recorded work", false)?;
        let _one = self.replaying.lock().unwrap_or_else(PoisonError::into_inner);
        graph.replay()
    }
}

/// The end of a recording, however it ends.
struct Over<'a>(&'a CudaRuntime);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        *self.0.recording.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.0.release.resume();
    }
}
