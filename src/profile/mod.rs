//! What this machine can do, measured: limits that no kernel exceeds, kept from run to run.
//!
//! | a file | what |
//! |---|---|
//! | `limits` | read bandwidth, arithmetic, the device's memory and matrix rate, the link |
//! | `identity` | which machine, which device, which model a measurement is of |
//! | `store` | [`Profile`]: a file in the cache folder |
//! | `measure` | timing a model's operations one by one, on the CPU and on a device |
//! | `tables` | what came of it, with interpolation: the costs that planners ask for |
//! | `execute` | real steps of the engine, held against what the tables predict |
//! | `calibrate` | the factors that follow |
//! | `router` | which experts a model's routers choose over a text |
//! | `estimate` | this machine in a fraction of a second, where nothing has been measured |
//! | `tune` | the tuning table of the kernels, measured on this machine |
//! | `state` | whether the cores are shared at the moment, and samples sorted by it |
//! | `sample` | timing something several times |
//! | `bandwidth`, `peak` | the probes of memory and arithmetic |
//! | `cold` | how much data overflows the caches |
//!
//! | item | what |
//! |---|---|
//! | [`Profile`], [`ModelProfile`], [`ProfileStore`], [`Identity`], [`DeviceIdentity`], [`ModelIdentity`] | profiles on disk, and the machine, device and model they belong to |
//! | [`Limits`], [`CpuLimits`], [`Bandwidth`], [`HostAttention`], [`CopyLoad`], [`DeviceLimits`], [`LinkLimits`], [`NodeLimits`], [`HandOver`], [`LaneLimits`], [`Rate`], [`LIMITS_STEPS`] | the limits of a machine |
//! | [`measure_model`], [`steps_of`], [`Subject`], [`Calibration`] | measures a model |
//! | [`Tables`], [`Timings`], [`Measured`] | costs from measured times |
//! | [`measured_tables`], [`tables_of`], [`measured_hardware`], [`measured_readers`], [`THIS_MACHINE`] | profiles of earlier runs |
//! | [`RouterRecord`], [`RouterText`], [`record_router`], [`router_text`], [`kept_router`] | which experts a model's routers choose |
//! | [`estimate()`], [`estimate_cpu`], [`similar_device`] | estimates for a machine without a profile |
//! | [`measure_tuning`], [`TUNING_STEPS`], [`Tuned`], [`Finding`], [`TimedValue`], [`TuningStore`], [`install_kept_tuning`] | measures the kernels' tuning table |
//! | [`Gauge`], [`CoreProbe`], [`CoreState`], [`SortedSamples`] | detects whether cores are shared with other processes |
//! | [`Effort`], [`Samples`], [`ReadProbe`], [`read_bandwidth`], [`Peak`], [`peaks`], [`cold_bytes`] | timing, and the probes of memory and arithmetic |

mod bandwidth;
mod calibrate;
mod cold;
mod curve;
mod estimate;
mod execute;
mod identity;
mod limits;
mod measure;
mod peak;
mod router;
mod sample;
mod state;
mod store;
mod tables;
mod tune;

pub use bandwidth::{ReadProbe, read_bandwidth};
pub use calibrate::Calibration;
pub use cold::cold_bytes;
pub use estimate::{EMULATED, estimate, estimate_cpu, similar_device};
pub use identity::{DeviceIdentity, Identity, ModelIdentity};
pub use limits::{
    Bandwidth, CopyLoad, CpuLimits, DeviceLimits, HandOver, HostAttention, LIMITS_STEPS, LaneLimits, Limits,
    LinkLimits, NodeLimits, Rate,
};
pub use measure::Subject;
pub use peak::{Peak, peaks};
pub use router::{RouterRecord, RouterText, record_router, router_text};
pub use sample::{Effort, Samples};
pub use state::{CoreProbe, CoreState, Gauge, SortedSamples};
pub use store::{ModelProfile, Profile, ProfileStore};
pub use tables::{Measured, Tables, Timings};
pub use tune::{Finding, TUNING_STEPS, TimedValue, Tuned, TuningStore, install_kept_tuning, measure_tuning};

use std::sync::Arc;

use crate::device::{Accelerator, DeviceInfo};
use crate::model::{ModelSpec, Weights};
use crate::plan::Hardware;
use crate::{Error, Result};

/// What a measured machine is called as [`Hardware`].
pub const THIS_MACHINE: &str = "this machine";

/// The timing tables of a model on this machine, with `device` or without one, as `tandem profile -m` has kept them: `None`
/// if it has not, or if what is kept cannot be read. Reads one file; measures nothing. `source`: as for
/// [`ModelIdentity::of`].
pub fn measured_tables(
    device: Option<&DeviceInfo>,
    spec: &ModelSpec,
    weights: &Weights,
    source: &str,
) -> Option<Tables> {
    tables_of(device, &ModelIdentity::of(spec, weights, source))
}

/// As [`measured_tables`], of a model that is known already.
pub fn tables_of(device: Option<&DeviceInfo>, model: &ModelIdentity) -> Option<Tables> {
    let store = ProfileStore::from_env().ok()?;
    let identity = Identity::of_machine(device).with_model(model.clone());
    Some(store.load(&identity).ok()??.model?.tables)
}

/// What the routers of a model chose, as `tandem profile -m` has kept it: `None` if it has not. Reads one file; runs nothing.
///
/// # Errors
/// A file that is there and is damaged.
pub fn kept_router(model: &ModelIdentity, spec: &ModelSpec) -> Result<Option<RouterRecord>> {
    match spec.experts {
        Some(_) => ProfileStore::from_env()?.load_router(model, spec),
        None => Ok(None),
    }
}

/// Times the operations of a model, then runs real steps of it: on the CPU, and on `accelerator`, if there is one.
/// `limits` are those of the machine. `progress` is called after each of [`steps_of`] steps.
///
/// # Errors
/// A damaged model; no memory for it; a device that failed, or that cannot run it.
pub fn measure_model(
    subject: &Subject<'_>,
    accelerator: Option<&Arc<dyn Accelerator>>,
    limits: &Limits,
    progress: &dyn Fn(),
) -> Result<ModelProfile> {
    let mut tables = subject.measure(accelerator, progress)?;
    let hardware = limits.hardware(THIS_MACHINE);
    let mut calibration = execute::calibrate(subject, None, &mut tables, &hardware, progress)?;
    if accelerator.is_some() {
        match execute::calibrate(subject, accelerator, &mut tables, &hardware, progress) {
            Ok(device) => {
                calibration.operations.extend(device.operations);
                calibration.steps.extend(device.steps);
            }
            // All of a model that is to be shared need not fit the device: then its tables stand as they are.
            Err(Error::Capacity(_)) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(ModelProfile { tables, calibration })
}

/// Steps of [`measure_model`], for a progress bar.
pub fn steps_of(subject: &Subject<'_>, device: bool) -> u64 {
    let real = execute::count(subject) * if device { 2 } else { 1 };
    subject.steps(device) + real
}

/// How many threads read memory as fast as all of them ([`CpuLimits::knee`]), as `tandem profile` has kept it; `None` of a
/// profile made in a hurry, which is too noisy to give threads up for.
pub fn measured_readers(device: Option<&DeviceInfo>) -> Option<usize> {
    let profile = ProfileStore::from_env().ok()?.load(&Identity::of_machine(device)).ok()??;
    (!profile.quick).then(|| profile.limits.cpu.knee() as usize)
}

/// This machine as it was measured before (`tandem profile`), with `device` or without one: `None` if it was not, or if
/// what is kept cannot be read. Reads one file; measures nothing.
pub fn measured_hardware(device: Option<&DeviceInfo>) -> Option<Hardware> {
    let store = ProfileStore::from_env().ok()?;
    let profile = store.load(&Identity::of_machine(device)).ok()??;
    let mut hardware = profile.limits.hardware(THIS_MACHINE);
    // How much of the memory is free changes from hour to hour.
    let now = crate::host::numa_nodes();
    for node in &mut hardware.nodes {
        let available = now.iter().find(|n| n.node == node.node).and_then(|n| n.available);
        node.bytes = available.map_or(node.bytes, |bytes| bytes as f64);
    }
    if let Some(available) = crate::host::memory_available() {
        hardware.share_memory(available as f64);
    }
    Some(hardware)
}
