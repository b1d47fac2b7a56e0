//! The word between the host's lane and the issuing thread: whether a parked cohort's attention is done.
//!
//! ```text
//! issuing thread   park ───────► look … look ─► release        discard: before it has begun
//!                    │            ▲ acquire
//! host's lane        └─► begin ─► complete | fail  (release)
//! ```
//! The issuing thread sees everything that the lane wrote before [`SyncWord::complete`] once [`SyncWord::look`] has returned
//! ready. Epochs count the cohorts that the word has served, so that a late answer about an earlier cohort does not
//! apply to the present one. The word of each parked cohort, its layer and its buffers are a line of the per-layer sync
//! table (APEX §4).
//!
//! Model-checked by `loom/`, which compiles this file with its own atomics.

use super::atomics::{AtomicU32, Ordering};

/// The state of a cohort's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncState {
    /// It has not ended.
    Waiting,
    /// It is done: its results can be read.
    Ready,
    /// It has failed.
    Failed,
}

/// Not in use.
const FREE: u32 = 0;
/// Given to the host's lane.
const PARKED: u32 = 1;
/// The lane has begun.
const BEGUN: u32 = 2;
/// The lane is done.
const READY: u32 = 3;
/// The lane has failed.
const FAILED: u32 = 4;
/// Number of bits of the state; the rest of a word is the epoch.
const BITS: u32 = 3;

fn word(epoch: u32, state: u32) -> u32 {
    epoch << BITS | state
}

/// See the [module](self).
#[derive(Debug)]
pub struct SyncWord(AtomicU32);

impl Default for SyncWord {
    fn default() -> SyncWord {
        SyncWord(AtomicU32::new(word(0, FREE)))
    }
}

impl SyncWord {
    /// Called by the issuing thread before it gives the lane work. Returns the epoch that identifies the work.
    ///
    /// # Panics
    /// If earlier work has not been released.
    pub fn park(&self) -> u32 {
        let now = self.0.load(Ordering::Relaxed);
        assert!(now == word(now >> BITS, FREE), "a cohort is parked where another is");
        let epoch = (now >> BITS).wrapping_add(1) & (u32::MAX >> BITS);
        self.0.store(word(epoch, PARKED), Ordering::Release);
        epoch
    }

    /// Called by the lane to begin the work, unless it has been discarded.
    pub fn begin(&self, epoch: u32) -> bool {
        let (from, to) = (word(epoch, PARKED), word(epoch, BEGUN));
        self.0.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Called by the lane: whether it has begun the work of this epoch.
    pub fn has_begun(&self, epoch: u32) -> bool {
        self.0.load(Ordering::Relaxed) == word(epoch, BEGUN)
    }

    /// Called by the lane after it has written the results of work that it has begun.
    pub fn complete(&self, epoch: u32) {
        self.0.store(word(epoch, READY), Ordering::Release);
    }

    /// Called by the lane after work that it has begun has failed.
    pub fn fail(&self, epoch: u32) {
        self.0.store(word(epoch, FAILED), Ordering::Release);
    }

    /// Called by the issuing thread: the state of the work. Never waits.
    pub fn look(&self, epoch: u32) -> SyncState {
        let now = self.0.load(Ordering::Acquire);
        match now {
            _ if now == word(epoch, READY) => SyncState::Ready,
            _ if now == word(epoch, FAILED) => SyncState::Failed,
            _ => SyncState::Waiting,
        }
    }

    /// Called by the issuing thread to give up work that the lane has not begun; it then never begins. Returns false if
    /// the lane has begun or ended the work; it may then be in use until [`SyncWord::look`] reports its end.
    pub fn discard(&self, epoch: u32) -> bool {
        let (from, to) = (word(epoch, PARKED), word(epoch, FREE));
        self.0.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Called by the issuing thread when it no longer needs the results of ended work.
    pub fn release(&self, epoch: u32) {
        debug_assert!(self.look(epoch) != SyncState::Waiting, "work in flight is released");
        self.0.store(word(epoch, FREE), Ordering::Release);
    }
}
