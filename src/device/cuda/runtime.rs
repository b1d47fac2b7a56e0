//! The accelerator contract on a GPU.

use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, RwLockReadGuard};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::capture::{CudaGraph, Recorded, Recorder};
use super::context::{Context, Relaxed, Work, lane_name};
use super::errors::device;
use super::events::{CudaEvent, Spare, Timing};
use super::landing::Landing;
use super::memory::{GRANULE, Memory};
use super::modules::Modules;
use super::pinned::{Caching, CudaPinned};
use super::release::Release;
use super::slab::CudaSlab;
use super::staging::StagingRing;
use super::{CudaOptions, driver, gate, tensor_map};
use crate::device::runtime::{DevPtr, DeviceInfo, Event, Graph, Lane, Launch, Pinned, Runtime, Slab};
use crate::{Error, Result};

/// A GPU.
pub struct CudaRuntime {
    info: DeviceInfo,
    pub(super) context: Arc<Context>,
    memory: Memory,
    release: Arc<Release>,
    spare: Arc<Spare>,
    staging: StagingRing,
    landing: Landing,
    pub(super) modules: Modules,
    recorder: Recorder,
    /// Held while recorded work is launched.
    replaying: Mutex<()>,
    /// Whether the device reads and writes host memory in place.
    maps_host_memory: bool,
    notices: Mutex<Vec<String>>,
}

/// Permission to enqueue: while the guard lives, no recording of the compute lane begins or ends.
type Turn<'a> = RwLockReadGuard<'a, Option<ThreadId>>;

impl CudaRuntime {
    pub(super) fn open(options: &CudaOptions) -> Result<CudaRuntime> {
        let driver = driver::find_driver()?;
        let handle = driver.device(options.ordinal)?;
        let listed = driver::listed(handle)?;
        let name = format!("cuda:{} ({})", options.ordinal, listed.name);
        let sm = options.pretend_sm.map_or(listed.sm, |sm| sm.min(listed.sm));
        // Another runtime may be recording in the same context.
        let _relaxed = Relaxed::enter();
        let context = Arc::new(Context::new(handle, name)?);
        let modules = Modules::choose(context.clone(), sm, listed.sm, driver.version)?;
        let spare = Arc::new(Spare::new(context.clone()));
        let release = Arc::new(Release::new(context.clone(), spare.clone()));
        Ok(CudaRuntime {
            info: DeviceInfo {
                name: listed.name,
                sm,
                multiprocessors: listed.multiprocessors,
                memory_total: listed.memory,
                shared_per_block: listed.shared_per_block,
                l2_bytes: listed.l2,
                memory_bw: listed.memory_bw,
                clock_khz: listed.clock_khz,
                driver: driver.version,
            },
            memory: Memory::new(context.clone(), release.clone(), options.memory),
            staging: StagingRing::new(context.clone(), release.clone(), spare.clone()),
            landing: Landing::new(context.clone(), release.clone(), spare.clone()),
            release,
            spare,
            modules,
            context,
            recorder: Recorder::default(),
            replaying: Mutex::new(()),
            maps_host_memory: listed.maps_host_memory,
            notices: Mutex::default(),
        })
    }

    /// Reports once a way in which the device deviates from the expected.
    fn notice(&self, sentence: String) {
        let mut notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        if !notices.contains(&sentence) {
            notices.push(sentence);
        }
    }

    /// Returns permission to enqueue, or an error if `lane` accepts no work from this thread now. `recordable` work may
    /// be part of a recording.
    fn enter(&self, lane: Lane, what: &str, recordable: bool) -> Result<Turn<'_>> {
        let turn = self.recorder.read().unwrap_or_else(PoisonError::into_inner);
        let Some(thread) = *turn else { return Ok(turn) };
        let here = thread == std::thread::current().id();
        match (here, lane) {
            (true, Lane::Compute) if recordable => Ok(turn),
            (true, _) => Err(device(what, format!("cannot be recorded on the {}", lane_name(lane)))),
            (false, Lane::Compute) => Err(device(what, "another thread records the compute lane")),
            (false, _) => Ok(turn),
        }
    }

    /// Returns an error if this thread is recording: it could wait for the work that it records.
    fn may_wait(&self) -> Result<()> {
        if gate::recording_here() {
            return Err(device("waiting for an event", "not while this thread records the compute lane"));
        }
        Ok(())
    }

    fn event<'a>(&self, event: &'a Event) -> &'a CudaEvent {
        let event = event.0.downcast_ref::<CudaEvent>().expect("an event of another runtime");
        assert!(event.is_of(&self.context), "an event of another device");
        event
    }

    /// Checks that `at..at + len` lies in the pinned memory.
    fn pinned_range(pinned: &Arc<dyn Pinned>, at: usize, len: usize) -> Result<()> {
        if at.checked_add(len).is_none_or(|end| end > pinned.len()) {
            let problem = format!("{len} bytes from byte {at} of {} bytes of pinned memory", pinned.len());
            return Err(device("a copy", problem));
        }
        Ok(())
    }
}

impl Runtime for CudaRuntime {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_free(&self) -> Result<u64> {
        self.memory.free_bytes()
    }

    fn granule(&self) -> u64 {
        GRANULE
    }

    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        self.memory.alloc(bytes)
    }

    fn free(&self, ptr: DevPtr) {
        self.memory.free(ptr);
    }

    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>> {
        if !self.maps_host_memory {
            return Err(Error::Unsupported(format!(
                "{}: the device cannot read and write host memory in place (no mapped memory), which exchanging rows with \
                 the CPU needs (publish, collect); run all of the model on the GPU, or on the CPU with `device` cpu",
                self.context.name
            )));
        }
        Ok(Arc::new(CudaPinned::new(&self.context, &self.release, bytes, Caching::Cached, true)?))
    }

    fn slab_touched(&self, bytes: usize, touch: &dyn Fn(*mut u8)) -> Result<Slab> {
        let mapped = self.maps_host_memory;
        let (slab, pageable) = CudaSlab::new(&self.context, &self.release, bytes, mapped, touch)?;
        if let Some(why) = &pageable {
            self.notice(why.clone());
        }
        Ok(Slab::new(Arc::new(slab), pageable))
    }

    fn upload(&self, lane: Lane, dst: DevPtr, src: &[u8]) -> Result<()> {
        let _turn = self.enter(lane, "an upload", false)?;
        self.staging.upload(lane, dst, src)
    }

    fn upload_pinned(
        &self,
        lane: Lane,
        dst: DevPtr,
        src: &Arc<dyn Pinned>,
        range: Range<usize>,
    ) -> Result<()> {
        CudaRuntime::pinned_range(src, range.start, range.len())?;
        let _turn = self.enter(lane, "an upload", true)?;
        self.context.bind()?;
        // SAFETY: the range was checked, and stays alive: pinned memory is given back after the work in flight. The
        // caller owns the destination.
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
        CudaRuntime::pinned_range(dst, at, len)?;
        let _turn = self.enter(lane, "a download", true)?;
        self.context.bind()?;
        // SAFETY: as in `upload_pinned`, in the other direction.
        let code = unsafe {
            let to = dst.host().add(at).cast::<c_void>();
            sys::cuMemcpyDtoHAsync_v2(to, src.0, len, self.context.stream(lane))
        };
        self.context.enqueued(lane, Work::Copy("a download"), code)
    }

    fn download(&self, lane: Lane, src: DevPtr, dst: &mut [u8]) -> Result<()> {
        self.landing.download(lane, src, dst, || self.enter(lane, "a download", false))
    }

    fn copy(&self, lane: Lane, dst: DevPtr, src: DevPtr, len: usize) -> Result<()> {
        let _turn = self.enter(lane, "a copy", true)?;
        self.context.bind()?;
        // SAFETY: the caller owns both ranges of the device's memory.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(dst.0, src.0, len, self.context.stream(lane)) };
        self.context.enqueued(lane, Work::Copy("a copy"), code)
    }

    fn fill(&self, lane: Lane, dst: DevPtr, value: u8, len: usize) -> Result<()> {
        let _turn = self.enter(lane, "a fill", true)?;
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
        let _turn = self.enter(lane, "a kernel", true)?;
        self.context.bind()?;
        let function = self.modules.function(kernel, launch.shared)?;
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        let stream = self.context.stream(lane);
        let mut params = [launch.params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the function's only parameter has the length of `params` (asserted above), which the driver
        // copies before it returns. The kernel's own contract covers what it touches through the addresses in it.
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
        let _turn = self.enter(lane, "an event", false)?;
        Ok(Event(Arc::new(CudaEvent::record(&self.spare, lane, Timing::Off)?)))
    }

    fn record_timed(&self, lane: Lane) -> Result<Event> {
        let _turn = self.enter(lane, "an event", false)?;
        Ok(Event(Arc::new(CudaEvent::record(&self.spare, lane, Timing::On)?)))
    }

    fn elapsed(&self, from: &Event, to: &Event) -> Result<Duration> {
        let (from, to) = (self.event(from), self.event(to));
        if !(from.is_done()? && to.is_done()?) {
            return Err(device(&self.context.name, "the time between two events that are not both done"));
        }
        let untimed = || device(&self.context.name, "the time between two events that do not both keep it");
        from.elapsed(to)?.ok_or_else(untimed)
    }

    fn wait(&self, lane: Lane, event: &Event) -> Result<()> {
        let _turn = self.enter(lane, "waiting for an event", false)?;
        self.event(event).wait(lane)
    }

    fn is_done(&self, event: &Event) -> Result<bool> {
        self.event(event).is_done()
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        self.may_wait()?;
        self.event(event).synchronize()
    }

    fn spin_until_done(&self, event: &Event) -> Result<()> {
        self.may_wait()?;
        self.event(event).spin()
    }

    fn synchronize_until(&self, event: &Event, deadline: Instant) -> Result<bool> {
        self.may_wait()?;
        self.event(event).synchronize_until(deadline)
    }

    fn synchronize_all(&self) -> Result<()> {
        self.may_wait()?;
        self.context.bind()?;
        for lane in Lane::ALL {
            // A lane that got nothing since somebody waited for it is idle.
            let Some(work) = self.context.not_known_done(lane) else { continue };
            self.spin_until_done(&self.record(lane)?)?;
            self.context.lane_is_done(lane, work);
        }
        Ok(())
    }

    fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        let recorded = CudaGraph::record(&self.context, &self.release, &self.recorder, enqueue)?;
        Ok(match recorded {
            Recorded::Graph(graph) => Some(Graph(Arc::new(graph) as Arc<dyn Any + Send + Sync>)),
            Recorded::Refused(said) => {
                self.notice(format!(
                    "{}: the driver refuses to record a step as a graph: {said}; steps are launched kernel by kernel, \
                     which is slower; updating the driver may help",
                    self.context.name
                ));
                None
            }
        })
    }

    fn replay(&self, graph: &Graph) -> Result<()> {
        let graph = graph.0.downcast_ref::<CudaGraph>().expect("recorded work of another runtime");
        assert!(graph.is_of(&self.context), "recorded work of another device");
        let _turn = self.enter(Lane::Compute, "recorded work", false)?;
        let _one = self.replaying.lock().unwrap_or_else(PoisonError::into_inner);
        graph.replay()
    }

    fn notices(&self) -> Vec<String> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
