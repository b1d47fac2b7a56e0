//! Giving things back to the driver. That waits for the device, which is not allowed while a lane is being
//! recorded: what dies then is given back when the recording ends.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdeviceptr, CUgraphExec};

use super::context::Context;

/// Something that nobody uses any more, but work in flight.
pub(super) enum Dead {
    Device(CUdeviceptr),
    Host(*mut c_void),
    Graph(CUgraphExec),
}

// SAFETY: handles and addresses that the driver lets any thread give back.
unsafe impl Send for Dead {}

pub(super) struct Release {
    context: Arc<Context>,
    recording: AtomicBool,
    waiting: Mutex<Vec<Dead>>,
}

impl Release {
    pub fn new(context: Arc<Context>) -> Release {
        Release { context, recording: AtomicBool::new(false), waiting: Mutex::default() }
    }

    /// Gives `dead` back when nothing in flight uses it: now, or after the recording.
    pub fn bury(&self, dead: Dead) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.recording.load(Ordering::SeqCst) {
            waiting.push(dead);
        } else {
            drop(waiting);
            self.context.settle();
            self.give_back(dead);
        }
    }

    /// From now on nothing is given back, until [`Release::resume`].
    pub fn hold(&self) {
        let _order = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.recording.store(true, Ordering::SeqCst);
    }

    /// Gives back what waits.
    pub fn resume(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.recording.store(false, Ordering::SeqCst);
        let all = std::mem::take(&mut *waiting);
        drop(waiting);
        if !all.is_empty() {
            self.context.settle();
        }
        all.into_iter().for_each(|dead| self.give_back(dead));
    }

    fn give_back(&self, dead: Dead) {
        // On a lost device the driver refuses everything: it has taken it all back by itself, save the host's
        // memory, which stays until the process ends.
        if self.context.bind().is_err() {
            return;
        }
        // SAFETY: made once, given back once (it was moved here), and the device has settled since.
        let code = unsafe {
            match dead {
                Dead::Device(address) => sys::cuMemFree_v2(address),
                Dead::Host(address) => sys::cuMemFreeHost(address),
                Dead::Graph(executable) => sys::cuGraphExecDestroy(executable),
            }
        };
        // Remembered if fatal; else there is nothing that anybody could do.
        let _ = self.context.check("giving back", code);
    }
}
