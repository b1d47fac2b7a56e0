//! Time by the device's clock.

use std::sync::Arc;

use crate::Result;
use crate::device::{Lane, Runtime};

/// Seconds of what `enqueue` puts on `lane`, by the device's clock.
///
/// # Errors
/// A device that failed.
pub(in crate::profile) fn device_time(
    runtime: &Arc<dyn Runtime>,
    lane: Lane,
    enqueue: impl FnOnce() -> Result<()>,
) -> Result<f64> {
    let from = runtime.record_timed(lane)?;
    enqueue()?;
    let to = runtime.record_timed(lane)?;
    runtime.spin_until_done(&to)?;
    Ok(runtime.elapsed(&from, &to)?.as_secs_f64())
}
