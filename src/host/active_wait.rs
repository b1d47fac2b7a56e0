//! Keeping threads awake between pieces of work that follow each other at short intervals, for a bounded time.
//!
//! ```text
//! device   ─████──────────████────    the issuing thread and the workers spin while the device or the other of them works
//! host     ──────██████████───────    as long as a step lasts: waking a thread takes longer (20 to 60 µs) than what it is
//! step     │──────── warm ──────│     woken for, and a step of two sides hands over once or twice a layer
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Whether to stay awake; the deadline is for a step that hangs.
#[derive(Debug)]
pub(super) struct Clock {
    base: Instant,
    /// Nanoseconds since `base`; 0: not warm.
    until: AtomicU64,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock { base: Instant::now(), until: AtomicU64::new(0) }
    }
}

impl Clock {
    pub fn is_on(&self) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        until > 0 && (self.base.elapsed().as_nanos() as u64) < until
    }
}

/// A switch that several threads look at while they are idle: a pool's workers ([`Pool::warmth`](super::Pool::warmth)), and who gives
/// them work.
#[derive(Clone)]
pub struct Warmth {
    clock: Arc<Clock>,
    wake: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl Warmth {
    /// Of threads other than a pool's.
    pub fn alone() -> Warmth {
        Warmth { clock: Arc::default(), wake: None }
    }

    /// With the function that wakes the sleeping ones.
    pub(super) fn new(clock: Arc<Clock>, wake: Arc<dyn Fn() + Send + Sync>) -> Warmth {
        Warmth { clock, wake: Some(wake) }
    }

    /// From now on nobody sleeps, until [`Warmth::end`] or for `most` at the longest.
    pub fn begin(&self, most: Duration) {
        let until = (self.clock.base.elapsed() + most).as_nanos() as u64;
        self.clock.until.store(until.max(1), Ordering::SeqCst);
        if let Some(wake) = &self.wake {
            wake();
        }
    }

    /// From now on idle threads sleep, each after its usual time.
    pub fn end(&self) {
        self.clock.until.store(0, Ordering::Relaxed);
    }

    /// Whether idle threads spin.
    pub fn is_on(&self) -> bool {
        self.clock.is_on()
    }
}

impl std::fmt::Debug for Warmth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Warmth({})", if self.is_on() { "on" } else { "off" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_when_told_and_by_itself() {
        let warmth = Warmth::alone();
        assert!(!warmth.is_on());
        warmth.begin(Duration::from_secs(60));
        assert!(warmth.clone().is_on());
        warmth.end();
        assert!(!warmth.is_on());
        warmth.begin(Duration::from_millis(1));
        std::thread::sleep(Duration::from_millis(2));
        assert!(!warmth.is_on(), "a step that hangs lets its threads sleep");
    }
}
