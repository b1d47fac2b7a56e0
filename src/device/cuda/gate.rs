//! Keeps calls that may synchronise a whole context apart from recordings, among all runtimes of the process.
//!
//! Freeing memory, unloading a module and destroying a graph may make the driver wait for everything in the context.
//! While any stream of the context is being recorded, such a call fails and invalidates the recording, whichever thread
//! makes it; and two runtimes on one device share its primary context. So these calls are made only while nothing is
//! being recorded ([`try_quiet`], [`quietly`]), and a recording begins only when none of them is running
//! ([`Recording::begin`]).

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

type Work = Box<dyn FnOnce() + Send>;

struct Gate {
    /// Recordings in progress.
    recording: usize,
    /// Threads that are making context-wide calls.
    quiet: usize,
    /// Work postponed until the last recording ends.
    later: Vec<Work>,
}

static GATE: Mutex<Gate> = Mutex::new(Gate { recording: 0, quiet: 0, later: Vec::new() });
/// Signals that `quiet` became 0.
static OPEN: Condvar = Condvar::new();

thread_local! {
    static RECORDING_HERE: Cell<bool> = const { Cell::new(false) };
}

fn gate() -> MutexGuard<'static, Gate> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A recording in progress on the thread that began it. The end of the last one runs the postponed work.
pub(super) struct Recording {
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Recording {
    /// Waits for context-wide calls to end, then begins a recording. `None` if this thread is already recording.
    pub fn begin() -> Option<Recording> {
        if RECORDING_HERE.replace(true) {
            return None;
        }
        let open = OPEN.wait_while(gate(), |g| g.quiet > 0);
        open.unwrap_or_else(PoisonError::into_inner).recording += 1;
        Some(Recording { _not_send: std::marker::PhantomData })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDING_HERE.set(false);
        let mut gate = gate();
        gate.recording -= 1;
        if gate.recording == 0 && !gate.later.is_empty() {
            let later = std::mem::take(&mut gate.later);
            let _quiet = Quiet::enter(gate);
            later.into_iter().for_each(|work| work());
        }
    }
}

/// Whether the calling thread is recording.
pub(super) fn recording_here() -> bool {
    RECORDING_HERE.get()
}

/// While this guard lives, no recording begins.
pub(super) struct Quiet(());

impl Quiet {
    fn enter(mut gate: MutexGuard<'_, Gate>) -> Quiet {
        gate.quiet += 1;
        Quiet(())
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let mut gate = gate();
        gate.quiet -= 1;
        if gate.quiet == 0 {
            OPEN.notify_all();
        }
    }
}

/// Permission for context-wide calls, unless something is being recorded. Never waits.
pub(super) fn try_quiet() -> Option<Quiet> {
    let gate = gate();
    (gate.recording == 0).then(|| Quiet::enter(gate))
}

/// Runs `work`, which makes context-wide calls: now, or at the end of the last recording in progress. Never waits,
/// because values may be dropped inside a recording, or by a thread that a recording waits for.
pub(super) fn quietly(work: impl FnOnce() + Send + 'static) {
    let mut gate = gate();
    if gate.recording > 0 {
        gate.later.push(Box::new(work));
        return;
    }
    let _quiet = Quiet::enter(gate);
    work();
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    /// A single test, because the gate is shared by the whole process.
    #[test]
    fn context_wide_calls_and_recordings_exclude_each_other() {
        let ran = Arc::new(AtomicU32::new(0));
        let count = |ran: &Arc<AtomicU32>| {
            let ran = ran.clone();
            move || {
                // Destructors nest: the context's runs within that of its last user.
                quietly({
                    let ran = ran.clone();
                    move || {
                        ran.fetch_add(1, SeqCst);
                    }
                });
            }
        };
        quietly(count(&ran));
        assert_eq!(ran.load(SeqCst), 1, "at once while nothing is recorded");

        let recording = Recording::begin().expect("the first of this thread");
        assert!(Recording::begin().is_none() && recording_here());
        assert!(try_quiet().is_none());
        quietly(count(&ran));
        // A second recording, on another thread, ends first.
        std::thread::scope(|s| {
            s.spawn(|| {
                let _other = Recording::begin().expect("the first of its thread");
                quietly(count(&ran));
            });
        });
        assert_eq!(ran.load(SeqCst), 1, "nothing while one of two recordings goes on");
        drop(recording);
        assert!(!recording_here());
        assert_eq!(ran.load(SeqCst), 3);

        // A recording waits for a call in progress.
        let quiet = try_quiet().expect("nothing is recorded");
        let (began, begins) = channel();
        let thread = std::thread::spawn(move || {
            let _recording = Recording::begin();
            began.send(()).expect("the test waits");
        });
        assert!(begins.recv_timeout(Duration::from_millis(30)).is_err(), "a recording began in between");
        drop(quiet);
        begins.recv().expect("it begins now");
        thread.join().expect("no panic");
    }
}
