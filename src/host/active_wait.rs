//! Waiting by spinning between pieces of work that follow each other at short intervals, for a bounded time: what OpenMP calls the
//! active wait policy.
//!
//! ```text
//! device   ─████──────────████────    the issuing thread and the workers spin while the device or the other of them works
//! host     ──────██████████───────    as long as a step lasts: waking a thread takes longer (20 to 60 µs) than what it is
//! step     │─────── active ──────│     woken for, and a step of two sides hands over once or twice a layer
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Whether to stay awake; the deadline is for a step that hangs.
#[derive(Debug)]
pub(super) struct Deadline {
    base: Instant,
    /// Nanoseconds since `base`; 0: nobody waits so.
    until: AtomicU64,
}

impl Default for Deadline {
    fn default() -> Deadline {
        Deadline { base: Instant::now(), until: AtomicU64::new(0) }
    }
}

impl Deadline {
    pub fn is_on(&self) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        until > 0 && (self.base.elapsed().as_nanos() as u64) < until
    }
}

/// A switch that several threads look at while they are idle: a pool's workers ([`Pool::active_wait`](super::Pool::active_wait)), and who gives
/// them work.
#[derive(Clone)]
pub struct ActiveWait {
    deadline: Arc<Deadline>,
    wake: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl ActiveWait {
    /// Of threads other than a pool's.
    pub fn alone() -> ActiveWait {
        ActiveWait { deadline: Arc::default(), wake: None }
    }

    /// With the function that wakes the sleeping ones.
    pub(super) fn new(deadline: Arc<Deadline>, wake: Arc<dyn Fn() + Send + Sync>) -> ActiveWait {
        ActiveWait { deadline, wake: Some(wake) }
    }

    /// From now on nobody sleeps, until [`ActiveWait::end`] or for `most` at the longest.
    pub fn begin(&self, most: Duration) {
        let until = (self.deadline.base.elapsed() + most).as_nanos() as u64;
        self.deadline.until.store(until.max(1), Ordering::SeqCst);
        if let Some(wake) = &self.wake {
            wake();
        }
    }

    /// From now on idle threads sleep, each after its usual time.
    pub fn end(&self) {
        self.deadline.until.store(0, Ordering::Relaxed);
    }

    /// Whether idle threads spin.
    pub fn is_on(&self) -> bool {
        self.deadline.is_on()
    }
}

impl std::fmt::Debug for ActiveWait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ActiveWait({})", if self.is_on() { "on" } else { "off" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_when_told_and_by_itself() {
        let active_wait = ActiveWait::alone();
        assert!(!active_wait.is_on());
        active_wait.begin(Duration::from_secs(60));
        assert!(active_wait.clone().is_on());
        active_wait.end();
        assert!(!active_wait.is_on());
        active_wait.begin(Duration::from_millis(1));
        std::thread::sleep(Duration::from_millis(2));
        assert!(!active_wait.is_on(), "a step that hangs lets its threads sleep");
    }
}
