//! Measuring the limits of this machine, with a bar.

use std::sync::Arc;

use anyhow::Result;
use tandem::Error;
use tandem::device::Accelerator;
use tandem::host::{Pool, cores_beside_device};
use tandem::profile::{Effort, Identity, LIMITS_STEPS, Limits, Profile};

use super::progress;

/// How long to measure.
pub fn effort(quick: bool) -> Effort {
    if quick { Effort::Quick } else { Effort::Full }
}

/// Measures the limits of this machine, with a bar.
pub fn measure(identity: Identity, device: Option<&Arc<dyn Accelerator>>, quick: bool) -> Result<Profile> {
    let pool = Pool::pinned(device.map(|_| cores_beside_device()));
    let steps = if device.is_some() { LIMITS_STEPS } else { LIMITS_STEPS - 2 };
    let bar = progress::count_bar(steps, "measuring this machine");
    let limits = Limits::measure(&pool, device, effort(quick), &|| bar.inc(1));
    bar.finish();
    let limits = limits.map_err(|e| match e {
        Error::Capacity(why) => Error::Capacity(format!("measuring this machine: {why}")),
        other => other,
    })?;
    Ok(Profile { identity, quick, limits, model: None })
}
