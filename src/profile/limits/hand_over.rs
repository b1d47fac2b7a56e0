//! Giving work to the CPU's threads: from a job's posting to its end seen, while they spin, when they sleep, and inside a step.
//!
//! ```text
//! the thread that issues ─ job ─► the host's lane ─ chunks ─► the pool's workers
//!                                  spins 30 µs, sleeps          spin 300 µs, park
//! ```
//! Threads spin for the next job first, since those of a step come within microseconds, and sleep afterwards. During a step of two sides
//! all of them are kept awake ([`ActiveWait`](crate::host::ActiveWait)), however long the device works in between.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::device::Runtime;
use crate::engine::{JobPause, LaneHandOver, hand_overs};
use crate::host::Pool;
use crate::profile::sample::{Effort, Samples, timed};
use crate::{Error, Result};

/// See the [module](self). Seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandOver {
    /// Seconds for a job that follows another at once: workers still spin.
    pub spinning_s: f64,
    /// Seconds for a job that comes when workers sleep.
    pub parked_s: f64,
    /// Seconds for a job that comes a millisecond later inside a step, which keeps them awake.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_step_s: Option<f64>,
    /// The lane that gives jobs to the pool beside a device.
    pub lane: Option<LaneLimits>,
}

/// The host's lane: a job without length. Seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaneLimits {
    /// From posting to start, following another job at once.
    pub start_spinning_s: f64,
    /// To the end seen.
    pub spinning_s: f64,
    /// From posting to start, when the lane sleeps.
    pub start_asleep_s: f64,
    /// To the end seen.
    pub asleep_s: f64,
    /// To the end seen, a millisecond after another inside a step, which keeps the lane awake.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_step_s: Option<f64>,
}

impl LaneLimits {
    fn measure(runtime: &Arc<dyn Runtime>, times: usize) -> Result<LaneLimits> {
        let median = |pause: JobPause, of: fn(&LaneHandOver) -> f64| {
            let found = hand_overs(runtime, times, pause)?;
            Ok::<_, Error>(Samples::new(found.iter().map(of).collect()).median().max(1e-9))
        };
        Ok(LaneLimits {
            start_spinning_s: median(JobPause::None, |h| h.started_s)?,
            spinning_s: median(JobPause::None, |h| h.seen_s)?,
            start_asleep_s: median(JobPause::Asleep(IDLE), |h| h.started_s)?,
            asleep_s: median(JobPause::Asleep(IDLE), |h| h.seen_s)?,
            in_step_s: Some(median(JobPause::InStep(LAYER), |h| h.seen_s)?),
        })
    }
}

/// Longer than workers spin.
const IDLE: Duration = Duration::from_millis(5);

/// About what a layer takes, after which a step's next job comes; longer than workers spin, too. What the cores' caches forget
/// meanwhile is part of a hand-over.
const LAYER: Duration = Duration::from_millis(1);

/// As the issuing thread does until the device's event.
fn spin(time: Duration) {
    let since = Instant::now();
    while since.elapsed() < time {
        std::hint::spin_loop();
    }
}

impl HandOver {
    /// With all threads of `pool`: a chunk each, which waits until every thread has one, as long ones do.
    ///
    /// # Errors
    /// The system refuses to start a thread; a device that failed.
    pub(super) fn measure(
        pool: &Pool,
        runtime: Option<&Arc<dyn Runtime>>,
        effort: Effort,
    ) -> Result<HandOver> {
        let times = match effort {
            Effort::Quick => 8,
            Effort::Full => 64,
        };
        let threads = pool.threads();
        let job = || {
            let arrived = std::sync::atomic::AtomicUsize::new(0);
            timed(|| {
                pool.run(threads, &|_, _| {
                    use std::sync::atomic::Ordering::{Acquire, Release};
                    arrived.fetch_add(1, Release);
                    let mut spins = 0u32;
                    while arrived.load(Acquire) < threads {
                        spins += 1;
                        match spins {
                            // A thread may be off its core.
                            20_000.. => std::thread::yield_now(),
                            _ => std::hint::spin_loop(),
                        }
                    }
                })
            })
        };
        let (mut spinning, mut parked, mut in_step) =
            (Samples::default(), Samples::default(), Samples::default());
        let active_wait = pool.active_wait();
        for _ in 0..times {
            std::thread::sleep(IDLE);
            parked.push(job());
            job();
            spinning.push(job());
            active_wait.begin(10 * IDLE);
            spin(LAYER);
            in_step.push(job());
            active_wait.end();
        }
        Ok(HandOver {
            spinning_s: spinning.median().max(1e-9),
            parked_s: parked.median().max(1e-9),
            in_step_s: Some(in_step.median().max(1e-9)),
            lane: runtime.map(|r| LaneLimits::measure(r, times)).transpose()?,
        })
    }
}
