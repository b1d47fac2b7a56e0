//! Measures the cost of giving the host's lane a job, for `tandem profile`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{HostJob, Started};
use crate::device::Runtime;
use crate::host::{Pool, unpin_current_thread};
use crate::{Error, Result};

/// Seconds from giving the lane an empty job to its start, and until the waiting thread sees its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaneHandOver {
    /// Until its start.
    pub started_s: f64,
    /// Until its end is seen.
    pub seen_s: f64,
}

/// What the two threads do before a job is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobPause {
    /// Nothing: the job follows another at once.
    None,
    /// Both sleep for so long.
    Asleep(Duration),
    /// So much of a step goes by: the issuing thread spins, as it does for an event of the device, and the lane waits actively.
    InStep(Duration),
}

/// Measures `times` jobs, each after such a pause, on a lane beside `runtime`'s. As in an engine on a machine with a core for each, the lane's
/// thread is pinned, and the thread that issues keeps to other cores.
///
/// # Errors
/// If the system refuses to start a thread, or the device has failed.
pub fn hand_overs(runtime: &Arc<dyn Runtime>, times: usize, pause: JobPause) -> Result<Vec<LaneHandOver>> {
    let measure = || {
        unpin_current_thread();
        measure(runtime, times, pause)
    };
    let failed =
        |e| Error::Run(format!("measuring the host's lane: the system refuses to start a thread: {e}"));
    // A thread of its own, since the current one may be another pool's.
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, measure).map_err(failed)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn measure(runtime: &Arc<dyn Runtime>, times: usize, pause: JobPause) -> Result<Vec<LaneHandOver>> {
    let (started, pool) = Started::new(|| Pool::pinned(Some(1)))?;
    let mut lane = started.serve((), runtime.clone(), Some(pool.active_wait()));
    // From here on this thread keeps off the lane's core.
    lane.wait_actively(Duration::ZERO);
    let mut found = Vec::with_capacity(times);
    for _ in 0..times {
        match pause {
            JobPause::None => {}
            JobPause::Asleep(pause) => std::thread::sleep(pause),
            JobPause::InStep(pause) => {
                lane.wait_actively(Duration::from_secs(1) + pause);
                let since = Instant::now();
                while since.elapsed() < pause {
                    std::hint::spin_loop();
                }
            }
        }
        let began = Arc::new(AtomicU64::new(0));
        let (told, posted) = (began.clone(), Instant::now());
        let work = move |_: &mut ()| {
            told.store(posted.elapsed().as_nanos() as u64, Ordering::Relaxed);
            Ok(())
        };
        let job = lane.give(HostJob {
            op: 0,
            events: vec![],
            after: vec![],
            seconds: 0.0,
            attends: false,
            detached: None,
            program: None,
            work: Box::new(work),
        });
        lane.wait(job)?;
        let seen_s = posted.elapsed().as_secs_f64();
        lane.wait_passively();
        found.push(LaneHandOver { started_s: 1e-9 * began.load(Ordering::Relaxed) as f64, seen_s });
    }
    lane.finish()?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulated::{EmulatedOptions, EmulatedRuntime};

    #[test]
    fn a_job_starts_before_its_end_is_seen() {
        let runtime: Arc<dyn Runtime> = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
        let pause = Duration::from_millis(2);
        for idle in [JobPause::None, JobPause::Asleep(pause), JobPause::InStep(pause)] {
            let found = hand_overs(&runtime, 5, idle).unwrap();
            assert_eq!(found.len(), 5);
            let mut seen: Vec<f64> = found.iter().map(|h| 1e6 * h.seen_s).collect();
            seen.sort_by(f64::total_cmp);
            println!("{idle:?}: seen after {:.1} us in the median", seen[2]);
            assert!(found.iter().all(|h| h.started_s > 0.0 && h.started_s <= h.seen_s), "{found:?}");
        }
    }
}
