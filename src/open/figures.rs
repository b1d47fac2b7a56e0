//! The figures of the machine that predictions are made for: from a description, a measurement or a profile.

use std::path::Path;
use std::sync::Arc;

use crate::device::{self, Accelerator, Kind, find_machine, machine_names};
use crate::hardware::Hardware;
use crate::host::{Pool, cores_beside_device};
use crate::profile::{
    Effort, Identity, LIMITS_STEPS, Limits, ModelIdentity, Profile, ProfileStore, THIS_MACHINE, Tables,
    measured_hardware, tables_of,
};
use crate::progress::{Progress, WorkUnit};
use crate::{Error, Result};

/// The machine that `name` means (`auto`: this one, measured in a hurry if it never was), and the model's timings on it.
///
/// # Errors
/// No machine or file has that name, or it cannot be read; a measurement that fails.
pub fn hardware(
    name: &str,
    model: Option<&ModelIdentity>,
    progress: &dyn Progress,
) -> Result<(Hardware, Option<Tables>)> {
    if name == "auto" {
        return this_machine(model, progress);
    }
    let path = Path::new(name);
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) && path.is_file() {
        return profiled(path, model);
    }
    let unknown = || {
        Error::usage(format!(
            "`hardware` {name}: no such machine or file; give auto, the path of a TOML file or of a profile, or one of {}",
            machine_names()
        ))
    };
    Ok((find_machine(name)?.ok_or_else(unknown)?, None))
}

/// This machine, as it was measured earlier, or measured quickly now.
fn this_machine(
    model: Option<&ModelIdentity>,
    progress: &dyn Progress,
) -> Result<(Hardware, Option<Tables>)> {
    let device = match device::check(&Kind::Cuda(0)) {
        Err(_) => None,
        Ok(()) => Some(device::open(&Kind::Cuda(0), None)?),
    };
    let info = device.as_ref().map(|d| d.runtime().info());
    if let Some(known) = measured_hardware(info) {
        return Ok((known, model.and_then(|m| tables_of(info, m))));
    }
    progress.note("measuring this machine in a hurry; tandem profile does it thoroughly");
    let profile = measure_machine(Identity::of_machine(info), device.as_ref(), true, progress)?;
    // A profile that cannot be stored is measured again the next time.
    if let Err(e) = ProfileStore::from_env().and_then(|store| store.save(&profile)) {
        progress.detail(&format!("the profile was not kept: {e}"));
    }
    Ok((profile.limits.hardware(THIS_MACHINE), None))
}

/// Measures the limits of this machine, with `device` if there is one.
///
/// # Errors
/// As [`Limits::measure`].
pub fn measure_machine(
    identity: Identity,
    device: Option<&Arc<dyn Accelerator>>,
    quick: bool,
    progress: &dyn Progress,
) -> Result<Profile> {
    let pool = Pool::pinned(device.map(|_| cores_beside_device()));
    let steps = if device.is_some() { LIMITS_STEPS } else { LIMITS_STEPS - 2 };
    progress.begin("measuring this machine", Some(steps), WorkUnit::Things);
    let done = std::cell::Cell::new(0);
    let step = || {
        done.set(done.get() + 1);
        progress.at(done.get());
    };
    let effort = if quick { Effort::Quick } else { Effort::Full };
    let limits = Limits::measure(&pool, device, effort, &step);
    progress.end();
    let limits = limits.map_err(|e| match e {
        Error::Capacity(why) => Error::Capacity(format!("measuring this machine: {why}")),
        other => other,
    })?;
    Ok(Profile { identity, quick, limits, model: None })
}

/// The machine of a profile that was written on this machine, and the model's timings from it.
///
/// # Errors
/// A file that cannot be read, or is of another machine.
pub fn profiled(path: &Path, model: Option<&ModelIdentity>) -> Result<(Hardware, Option<Tables>)> {
    let wanted = Profile::read(path)?.identity;
    let device = match wanted.device.as_ref().is_some_and(|d| d.driver > 0) {
        true => Some(device::open(&Kind::Cuda(0), None)?),
        false => None,
    };
    let mut here = Identity::of_machine(device.as_ref().map(|d| d.runtime().info()));
    if device.is_none() {
        // An emulated device exists wherever this program runs.
        here.device = wanted.device;
    }
    // The profile's limits hold for any model, its tables only for its own.
    here.model = wanted.model;
    let profile = Profile::read_for(path, &here)?;
    let hardware = profile.limits.hardware(THIS_MACHINE);
    let same = model.is_some() && model == profile.identity.model.as_ref();
    Ok((hardware, profile.model.filter(|_| same).map(|m| m.tables)))
}
