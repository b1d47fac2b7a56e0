//! The link between host and device, each way: pinned, pageable, and pinned while the CPU reads memory with all its
//! threads, which is what attention on the host does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use super::device_time::device_time;
use crate::Result;
use crate::device::{Buffer, Lane, Pinned, Runtime};
use crate::host::Pool;
use crate::profile::bandwidth::ReadProbe;
use crate::profile::sample::{Effort, Samples, sample, timed};

/// One way over the link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkLimits {
    /// Seconds of a transfer of four bytes.
    pub latency_s: f64,
    /// Bytes per second from or to pinned memory, latency aside.
    pub pinned_bw: f64,
    /// Bytes per second from or to memory that is not pinned, by the host's clock.
    pub pageable_bw: f64,
    /// As `pinned_bw`, while the CPU reads memory with all its threads.
    pub busy_bw: f64,
}

const FEW: usize = 4;

/// [to the device, to the host].
///
/// # Errors
/// No memory for the probes; a device that failed.
pub(super) fn measure(runtime: &Arc<dyn Runtime>, pool: &Pool, effort: Effort) -> Result<[LinkLimits; 2]> {
    let wanted = match effort {
        Effort::Quick => 8 << 20,
        Effort::Full => 64 << 20,
    };
    let bytes = wanted.min(runtime.memory_free()? / 4).max(1 << 16) as usize;
    let (there, here) = (Buffer::new(runtime, bytes)?, runtime.pinned(bytes)?);
    runtime.fill(Lane::Compute, there.ptr(), 0, bytes)?;
    runtime.synchronize_all()?;
    let pinned = |lane: Lane, len: usize| copy(runtime, lane, &there, &here, len);
    let mut pageable = vec![1u8; bytes];
    let mut one = |lane: Lane, busy: f64| -> Result<LinkLimits> {
        let latency_s = sample(effort, || pinned(lane, FEW))?.typical().max(1e-9);
        let bandwidth = |seconds: f64| (bytes - FEW) as f64 / (seconds - latency_s).max(1e-9);
        let pinned_bw = bandwidth(sample(effort, || pinned(lane, bytes))?.typical());
        let run = || {
            let mut done = Ok(());
            let seconds = timed(|| {
                done = match lane {
                    Lane::DeviceToHost => runtime.download(lane, there.ptr(), &mut pageable),
                    _ => runtime
                        .upload(lane, there.ptr(), &pageable)
                        .and_then(|()| runtime.spin_until_done(&runtime.record(lane)?)),
                }
            });
            done.map(|()| seconds)
        };
        let pageable_bw = bytes as f64 / sample(effort, run)?.typical().max(1e-9);
        Ok(LinkLimits { latency_s, pinned_bw, pageable_bw, busy_bw: bandwidth(busy) })
    };
    let busy = while_reading(pool, effort, || {
        let both = [Lane::HostToDevice, Lane::DeviceToHost];
        let [there, back] = both.map(|lane| sample(effort, || pinned(lane, bytes)));
        Ok([there?, back?])
    })?;
    let [there, back] = busy.map(|s| s.typical());
    Ok([one(Lane::HostToDevice, there)?, one(Lane::DeviceToHost, back)?])
}

/// Seconds of a copy of `len` bytes on a copy lane, by the device's clock.
fn copy(
    runtime: &Arc<dyn Runtime>,
    lane: Lane,
    there: &Buffer,
    here: &Arc<dyn Pinned>,
    len: usize,
) -> Result<f64> {
    device_time(runtime, lane, || match lane {
        Lane::DeviceToHost => runtime.download_pinned(lane, there.ptr(), here, 0, len),
        _ => runtime.upload_pinned(lane, there.ptr(), here, 0..len),
    })
}

/// Runs `work` while all threads of `pool` read memory.
fn while_reading(
    pool: &Pool,
    effort: Effort,
    work: impl FnOnce() -> Result<[Samples; 2]> + Send,
) -> Result<[Samples; 2]> {
    let probe = ReadProbe::new(match effort {
        Effort::Quick => 16 << 20,
        Effort::Full => 256 << 20,
    });
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            // Not on the core that this thread, a reader, is pinned to.
            crate::host::unpin_current_thread();
            let result = work();
            done.store(true, Ordering::Release);
            result
        });
        // A panic of the worker is passed on when it is joined; the loop ends with it.
        while !done.load(Ordering::Acquire) && !worker.is_finished() {
            probe.pass(pool);
        }
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
