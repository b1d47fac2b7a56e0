//! A device in use: its context, its lanes, the last work enqueued on each, and whether it is lost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUresult, CUstream};

use super::errors::{describe, device, is_fatal};
use super::gate;
use crate::device::runtime::Lane;
use crate::{Error, Result};

/// Work on a lane, for messages.
#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    Nothing,
    Kernel(&'static str),
    Copy(&'static str),
    Replay,
}

impl std::fmt::Display for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Work::Nothing => f.write_str("nothing"),
            Work::Kernel(name) => write!(f, "kernel {name}"),
            Work::Copy(what) => f.write_str(what),
            Work::Replay => f.write_str("a recorded step"),
        }
    }
}

pub(super) fn lane_name(lane: Lane) -> &'static str {
    match lane {
        Lane::Compute => "compute lane",
        Lane::HostToDevice => "host-to-device lane",
        Lane::DeviceToHost => "device-to-host lane",
    }
}

/// The device's primary context with a stream for each lane.
pub(super) struct Context {
    /// `cuda:0 (NVIDIA A10)`.
    pub name: String,
    handles: Handles,
    last: [Mutex<Work>; 3],
    /// Number of operations enqueued on each lane.
    work: [AtomicU64; 3],
    /// How much of it is known to be done.
    done: [AtomicU64; 3],
    lost: OnceLock<String>,
}

/// The handles that are released at the end.
#[derive(Clone, Copy)]
struct Handles {
    device: CUdevice,
    context: CUcontext,
    streams: [CUstream; 3],
}

// SAFETY: contexts and streams are handles that the driver lets any thread use.
unsafe impl Send for Handles {}

// SAFETY: contexts and streams are handles that the driver lets any thread use; the rest is synchronised.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn new(handle: CUdevice, name: String) -> Result<Context> {
        // Another runtime may be recording in this context.
        let _relaxed = Relaxed::enter();
        let mut context = std::ptr::null_mut();
        // SAFETY: a device of the driver, which was started; the handle outlives the call.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, handle) };
        match code {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                return Err(Error::Capacity(format!(
                    "{name}: not enough free memory to open the device; another process holds it"
                )));
            }
            code => return Err(device(name, format!("cannot be opened: {}", describe(code)))),
        }
        // Dropping this value releases the context, also if a stream cannot be created.
        let mut this = Context {
            name,
            handles: Handles { device: handle, context, streams: [std::ptr::null_mut(); 3] },
            last: std::array::from_fn(|_| Mutex::new(Work::Nothing)),
            work: Default::default(),
            done: Default::default(),
            lost: OnceLock::new(),
        };
        this.bind()?;
        // The least urgent is every stream's default; both are 0 on a device that knows no priorities.
        let (mut normal, mut urgent) = (0, 0);
        // SAFETY: the context is current; the numbers outlive the call.
        this.check("priorities of lanes", unsafe {
            sys::cuCtxGetStreamPriorityRange(&mut normal, &mut urgent)
        })?;
        for lane in Lane::ALL {
            let mut stream = std::ptr::null_mut();
            // Non-blocking, so that other users of the legacy stream in this process do not synchronise with us.
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            let priority = if lane.is_urgent() { urgent } else { normal };
            // SAFETY: the context is current; the handle outlives the call.
            this.check("a lane", unsafe { sys::cuStreamCreateWithPriority(&mut stream, flags, priority) })?;
            this.handles.streams[lane as usize] = stream;
        }
        Ok(this)
    }

    /// Makes this device's context current on the calling thread. Every use of the driver begins with it.
    ///
    /// # Errors
    /// The device is lost.
    pub fn bind(&self) -> Result<()> {
        if let Some(problem) = self.lost.get() {
            return Err(device(&self.name, problem));
        }
        // SAFETY: the context is retained as long as `self` lives.
        self.check("the device", unsafe { sys::cuCtxSetCurrent(self.handles.context) })
    }

    pub fn stream(&self, lane: Lane) -> CUstream {
        self.handles.streams[lane as usize]
    }

    /// Number of operations enqueued on each lane.
    pub fn work(&self) -> [u64; 3] {
        Lane::ALL.map(|lane| self.work[lane as usize].load(Ordering::Acquire))
    }

    /// How much has been enqueued on a lane, if [`Context::lane_is_done`] has not been told that it is done.
    pub fn not_known_done(&self, lane: Lane) -> Option<u64> {
        let work = self.work[lane as usize].load(Ordering::Acquire);
        (work > self.done[lane as usize].load(Ordering::Acquire)).then_some(work)
    }

    /// As much as `work` of a lane is done.
    pub fn lane_is_done(&self, lane: Lane, work: u64) {
        self.done[lane as usize].fetch_max(work, Ordering::Release);
    }

    /// Remembers the work enqueued on a lane, and turns a refusal by the driver into an error.
    pub fn enqueued(&self, lane: Lane, work: Work, code: CUresult) -> Result<()> {
        if code == CUresult::CUDA_SUCCESS {
            self.work[lane as usize].fetch_add(1, Ordering::Release);
            *self.last[lane as usize].lock().unwrap_or_else(PoisonError::into_inner) = work;
            return Ok(());
        }
        if is_fatal(code) {
            return Err(self.lose(code));
        }
        Err(device(&self.name, format!("{work} was refused on the {}: {}", lane_name(lane), describe(code))))
    }

    /// Checks the result of a call that enqueues no work on a lane.
    pub fn check(&self, what: &str, code: CUresult) -> Result<()> {
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            code if is_fatal(code) => Err(self.lose(code)),
            code => Err(device(&self.name, format!("{what}: {}", describe(code)))),
        }
    }

    /// Marks the device as lost. Every later call reports the first cause.
    fn lose(&self, code: CUresult) -> Error {
        let problem = self.lost.get_or_init(|| {
            let last = Lane::ALL.map(|lane| {
                let work = *self.last[lane as usize].lock().unwrap_or_else(PoisonError::into_inner);
                format!("{work} on the {}", lane_name(lane))
            });
            format!(
                "lost: {}; enqueued last: {}. Start the program again; with CUDA_LAUNCH_BLOCKING=1 the error \
                 names the work that fails",
                describe(code),
                last.join(", ")
            )
        });
        device(&self.name, problem)
    }

    /// Whether the device is lost: no further call can succeed.
    pub fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Blocks until nothing is in flight on the lanes of this runtime. Never waits for the context: another runtime may be
    /// recording in it. The next call reports errors.
    pub fn wait_for_lanes(&self) {
        if self.bind().is_err() {
            return;
        }
        let _relaxed = Relaxed::enter();
        for stream in self.handles.streams.into_iter().filter(|s| !s.is_null()) {
            // SAFETY: a stream of this context.
            let code = unsafe { sys::cuStreamSynchronize(stream) };
            // A fatal error is remembered.
            let _ = self.check("waiting for the device", code);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.wait_for_lanes();
        // Error codes are ignored: nobody could act on them during drop.
        let (handles, usable) = (self.handles, self.bind().is_ok());
        gate::quietly(move || {
            let handles: Handles = handles;
            if usable {
                // SAFETY: the context is retained until the last line.
                let _ = unsafe { sys::cuCtxSetCurrent(handles.context) };
                for stream in handles.streams.into_iter().filter(|s| !s.is_null()) {
                    // SAFETY: made in `new`, destroyed once, idle.
                    let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
                }
            }
            // SAFETY: retained once in `new`.
            let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(handles.device) };
        });
    }
}

/// While this guard lives, the thread may allocate, load, query and synchronise even though a lane is being recorded,
/// by this thread or, in any mode, by another one.
pub(super) struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    pub fn enter() -> Relaxed {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps a thread-local setting of the driver with `mode`.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        Relaxed(mode)
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `enter`; restores what was there.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}
