//! Waiting by spinning between pieces of work that follow each other at short intervals, for a bounded time: what OpenMP calls the
//! active wait policy.
//!
//! ```text
//! device   ─████──────────████────    the issuing thread and the workers spin while the device or the other of them works
//! host     ──────██████████───────    as long as a step lasts: waking a thread takes longer (20 to 60 µs) than what it is
//! step     │─────── active ──────│     woken for, and a step of two sides hands over once or twice a layer
//! ```
//! The issuing thread keeps to the cores that the workers leave. The system puts who is woken beside who wakes it, and a worker that is
//! pinned to the issuing thread's core would wait until that one sleeps.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use core_affinity::CoreId;

use super::cpu::{Thread, confine_current_thread};

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

/// Cores for who gives work to a pool's pinned threads, and the thread that keeps to them.
#[derive(Debug)]
struct Beside {
    cores: Vec<CoreId>,
    thread: Mutex<Option<Thread>>,
}

impl Beside {
    /// Confines the current thread, and lets go of the one before.
    fn keep(&self) {
        if self.cores.is_empty() {
            return;
        }
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_some_and(Thread::is_current) {
            return;
        }
        confine_current_thread(&self.cores);
        if let Some(before) = thread.replace(Thread::current()) {
            before.unpin();
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            thread.unpin();
        }
    }
}

/// A switch that several threads look at while they are idle: a pool's workers ([`Pool::active_wait`](super::Pool::active_wait)), and who gives
/// them work.
#[derive(Clone)]
pub struct ActiveWait {
    deadline: Arc<Deadline>,
    wake: Arc<dyn Fn() + Send + Sync>,
    beside: Arc<Beside>,
}

impl ActiveWait {
    /// With the function that wakes the sleeping ones, and the cores that they leave to who gives them work.
    pub(super) fn new(
        deadline: Arc<Deadline>,
        wake: Arc<dyn Fn() + Send + Sync>,
        beside: Vec<CoreId>,
    ) -> ActiveWait {
        let beside = Beside { cores: beside, thread: Mutex::default() };
        ActiveWait { deadline, wake, beside: Arc::new(beside) }
    }

    /// From now on nobody sleeps, until [`ActiveWait::end`] or for `most` at the longest. The current thread keeps to the cores beside a
    /// pinned pool's until another one calls this, or the last copy of this is dropped.
    pub fn begin(&self, most: Duration) {
        self.beside.keep();
        let until = (self.deadline.base.elapsed() + most).as_nanos() as u64;
        self.deadline.until.store(until.max(1), Ordering::SeqCst);
        (self.wake)();
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
    use crate::host::Pool;

    #[test]
    fn it_ends_when_told_and_by_itself() {
        let active_wait = Pool::new(1).active_wait();
        assert!(!active_wait.is_on());
        active_wait.begin(Duration::from_secs(60));
        assert!(active_wait.clone().is_on());
        active_wait.end();
        assert!(!active_wait.is_on());
        active_wait.begin(Duration::from_millis(1));
        std::thread::sleep(Duration::from_millis(2));
        assert!(!active_wait.is_on(), "a step that hangs lets its threads sleep");
    }

    #[test]
    fn who_gives_work_keeps_off_the_pools_cores() {
        let all = crate::host::cpu::cores();
        let mine = || core_affinity::get_core_ids().map_or(0, |cores| cores.len());
        if crate::host::allowed_cores() < 2 || all.len() < 2 {
            println!("skipped: one core only");
            return;
        }
        let within = |f: &(dyn Fn() + Sync)| std::thread::scope(|s| s.spawn(f).join().unwrap());
        within(&|| {
            crate::host::unpin_current_thread();
            // Another thread leads the pool, as the host's lane does.
            let pool = std::thread::spawn(|| Pool::pinned(Some(1))).join().unwrap();
            let active_wait = pool.active_wait();
            active_wait.begin(Duration::from_secs(1));
            assert_eq!(mine(), all.len() - 1);
            assert!(!core_affinity::get_core_ids().unwrap().contains(&all[0]));
            within(&|| {
                active_wait.begin(Duration::from_secs(1));
                assert_eq!(mine(), all.len() - 1);
            });
            assert_eq!(mine(), all.len(), "another one gives work now");
            active_wait.begin(Duration::from_secs(1));
            drop((pool, active_wait));
            assert_eq!(mine(), all.len(), "no pool is left");

            let pool = std::thread::spawn(|| Pool::pinned(None)).join().unwrap();
            pool.active_wait().begin(Duration::from_secs(1));
            assert_eq!(mine(), all.len(), "no core is left");
        });
    }
}
