//! The word between the host's lane and the issuing thread: whether a parked cohort's attention is done.
//!
//! ```text
//! issuing thread   park ───────► look … look ─► release        discard: before it has begun
//!                    │            ▲ acquire
//! host's lane        └─► begin ─► complete | fail  (release)
//! ```
//! What the lane wrote before [`Word::complete`] the issuing thread sees after [`Word::look`] has said so. Epochs count the
//! cohorts that the word has been used for: a late answer about an earlier one is none about the present one. The word of
//! each parked cohort, its layer and its buffers are a line of the per-layer sync table (APEX §4).
//!
//! Model-checked by `loom/`, which compiles this file with its own atomics.

use super::atomics::{AtomicU32, Ordering};

/// What is known of a cohort's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
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
/// Bits of the above; the rest of a word is the epoch.
const BITS: u32 = 3;

fn word(epoch: u32, state: u32) -> u32 {
    epoch << BITS | state
}

/// See the [module](self).
#[derive(Debug)]
pub struct Word(AtomicU32);

impl Default for Word {
    fn default() -> Word {
        Word(AtomicU32::new(word(0, FREE)))
    }
}

impl Word {
    /// The issuing thread is about to give the lane work: returns the epoch that both call it by.
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

    /// The lane takes up the work, unless it has been discarded.
    pub fn begin(&self, epoch: u32) -> bool {
        let (from, to) = (word(epoch, PARKED), word(epoch, BEGUN));
        self.0.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Whether the lane is at work of this epoch: what it asks itself.
    pub fn has_begun(&self, epoch: u32) -> bool {
        self.0.load(Ordering::Relaxed) == word(epoch, BEGUN)
    }

    /// The lane has written the results of work that it has begun.
    pub fn complete(&self, epoch: u32) {
        self.0.store(word(epoch, READY), Ordering::Release);
    }

    /// The lane has failed at work that it has begun.
    pub fn fail(&self, epoch: u32) {
        self.0.store(word(epoch, FAILED), Ordering::Release);
    }

    /// What the issuing thread finds: never waits.
    pub fn look(&self, epoch: u32) -> Look {
        let now = self.0.load(Ordering::Acquire);
        match now {
            _ if now == word(epoch, READY) => Look::Ready,
            _ if now == word(epoch, FAILED) => Look::Failed,
            _ => Look::Waiting,
        }
    }

    /// The issuing thread gives up work that the lane has not begun; then it never will. Otherwise says no: the lane is at it,
    /// or has ended, and will be until [`Word::look`] says so.
    pub fn discard(&self, epoch: u32) -> bool {
        let (from, to) = (word(epoch, PARKED), word(epoch, FREE));
        self.0.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// The issuing thread needs the results no more; the work has ended.
    pub fn release(&self, epoch: u32) {
        debug_assert!(self.look(epoch) != Look::Waiting, "work in flight is released");
        self.0.store(word(epoch, FREE), Ordering::Release);
    }
}
