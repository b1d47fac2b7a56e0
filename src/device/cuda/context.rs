//! A device in use: its context, its lanes, what was enqueued last on each, and whether it is lost.

use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUresult, CUstream};

use super::errors::{describe, device, is_fatal};
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
    handle: CUdevice,
    context: CUcontext,
    streams: [CUstream; 3],
    last: [Mutex<Work>; 3],
    lost: OnceLock<String>,
}

// SAFETY: contexts and streams are handles that the driver lets any thread use; the rest is synchronised.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn new(handle: CUdevice, name: String) -> Result<Context> {
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
        // The drop of this value releases the context, also if a stream cannot be made.
        let mut this = Context {
            name,
            handle,
            context,
            streams: [std::ptr::null_mut(); 3],
            last: std::array::from_fn(|_| Mutex::new(Work::Nothing)),
            lost: OnceLock::new(),
        };
        this.bind()?;
        for lane in Lane::ALL {
            let mut stream = std::ptr::null_mut();
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the context is current; the handle outlives the call.
            this.check("a lane", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
            this.streams[lane as usize] = stream;
        }
        Ok(this)
    }

    /// Makes the calling thread's calls go to this device. Every use of the driver begins with it.
    ///
    /// # Errors
    /// The device is lost.
    pub fn bind(&self) -> Result<()> {
        if let Some(problem) = self.lost.get() {
            return Err(device(&self.name, problem));
        }
        // SAFETY: the context is retained as long as `self` lives.
        self.check("the device", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    pub fn stream(&self, lane: Lane) -> CUstream {
        self.streams[lane as usize]
    }

    /// Remembers what a lane was given, and whether the driver took it.
    pub fn enqueued(&self, lane: Lane, work: Work, code: CUresult) -> Result<()> {
        if code == CUresult::CUDA_SUCCESS {
            *self.last[lane as usize].lock().unwrap_or_else(PoisonError::into_inner) = work;
            return Ok(());
        }
        if is_fatal(code) {
            return Err(self.lose(code));
        }
        Err(device(&self.name, format!("{work} was refused on the {}: {}", lane_name(lane), describe(code))))
    }

    /// The outcome of a call that is not work of a lane.
    pub fn check(&self, what: &str, code: CUresult) -> Result<()> {
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            code if is_fatal(code) => Err(self.lose(code)),
            code => Err(device(&self.name, format!("{what}: {}", describe(code)))),
        }
    }

    /// Nothing more can be done on the device. The first cause is what every later call is told.
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

    /// Whether nothing can be done on the device any more.
    pub fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Blocks until nothing is in flight. Errors are left to the next call.
    pub fn settle(&self) {
        if self.bind().is_ok() {
            // SAFETY: this device's context is current.
            let code = unsafe { sys::cuCtxSynchronize() };
            // Remembered if fatal.
            let _ = self.check("waiting for the device", code);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.settle();
        // Codes of a lost device are of no use to anybody here.
        if self.bind().is_ok() {
            for stream in self.streams.into_iter().filter(|s| !s.is_null()) {
                // SAFETY: made in `new`, destroyed once, idle.
                let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
            }
        }
        // SAFETY: retained once in `new`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
    }
}

/// While it lives, this thread's calls that allocate or synchronise are allowed although a lane is being
/// recorded: modules may be loaded while a step is recorded for the first time.
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
