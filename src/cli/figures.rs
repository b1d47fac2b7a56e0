//! The figures of the machine that predictions are made for: from a description, a measurement or a profile.

use std::path::Path;

use anyhow::Result;
use tandem::Error;
use tandem::device::{self, Kind, find_machine, machine_names};
use tandem::plan::Hardware;
use tandem::profile::{
    Identity, ModelIdentity, Profile, Store, THIS_MACHINE, Tables, measured_hardware, tables_of,
};

use super::limits::measure;
use super::progress;

/// The machine that `--hardware` names, and the model's timings on it.
pub fn hardware(name: &str, model: Option<&ModelIdentity>) -> Result<(Hardware, Option<Tables>)> {
    if name == "auto" {
        return this_machine(model);
    }
    if Path::new(name).extension().is_some_and(|e| e.eq_ignore_ascii_case("json"))
        && Path::new(name).is_file()
    {
        return from_profile(Path::new(name), model);
    }
    described(name).map(|hardware| (hardware, None))
}

/// The machine and the model's timings from a profile that `tandem profile -o` wrote on this machine.
pub fn profiled(file: &str, model: Option<&ModelIdentity>) -> Result<(Hardware, Option<Tables>)> {
    from_profile(Path::new(file), model)
}

/// A description: one of Tandem's own, or a file.
fn described(name: &str) -> Result<Hardware> {
    let unknown = || {
        Error::usage(format!(
            "--hardware {name}: no such machine or file; give auto, the path of a TOML file or of a profile, or one of {}",
            machine_names()
        ))
    };
    Ok(find_machine(name)?.ok_or_else(unknown)?)
}

/// This machine, as `tandem profile` has measured it, or measured quickly now.
fn this_machine(model: Option<&ModelIdentity>) -> Result<(Hardware, Option<Tables>)> {
    let device = match device::check(&Kind::Cuda(0)) {
        Err(_) => None,
        Ok(()) => Some(device::open(&Kind::Cuda(0), None)?),
    };
    let info = device.as_ref().map(|d| d.runtime().info());
    if let Some(known) = measured_hardware(info) {
        return Ok((known, model.and_then(|m| tables_of(info, m))));
    }
    progress::note("measuring this machine in a hurry; tandem profile does it thoroughly");
    let profile = measure(Identity::of_machine(info), device.as_ref(), true)?;
    // A profile that cannot be stored is measured again the next time.
    if let Err(e) = Store::from_env().and_then(|store| store.save(&profile)) {
        progress::detail(&format!("the profile was not kept: {e}"));
    }
    Ok((profile.limits.hardware(THIS_MACHINE), None))
}

/// The machine of a profile that `tandem profile -o` wrote, which must be this one.
fn from_profile(path: &Path, model: Option<&ModelIdentity>) -> Result<(Hardware, Option<Tables>)> {
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

/// Refuses to tell of energy where nothing is known of it.
///
/// # Errors
/// `--energy` of a machine whose description has no watts.
pub fn check_energy(asked: bool, hardware: &Hardware) -> tandem::Result<()> {
    match asked && hardware.power.is_none() {
        true => Err(Error::usage(format!(
            "--energy: {} says nothing of watts; give a description a section [power] with cpu_idle_w, cpu_busy_w, gpu_idle_w and gpu_busy_w",
            hardware.name
        ))),
        false => Ok(()),
    }
}

/// Refuses limits on memory that the machine does not have: they would change the plan without a word.
///
/// # Errors
/// `--gpu-memory` or `--host-memory` above the machine's, with the numbers.
pub fn check_memory(hardware: &Hardware, gpu: Option<u64>, host: Option<u64>) -> tandem::Result<()> {
    let gpu_has = hardware.accelerator.map_or(0, |(gpu, _)| gpu.mem_bytes as u64);
    let host_has = hardware.cpu.dram_bytes as u64;
    for (flag, wanted, has, whose) in
        [("--gpu-memory", gpu, gpu_has, "GPU"), ("--host-memory", host, host_has, "host")]
    {
        if let Some(bytes) = wanted.filter(|&b| b > has && has > 0) {
            let gb = |bytes: u64| bytes as f64 / 1e9;
            return Err(tandem::Error::usage(format!(
                "{flag}: {:.2} GB, the {whose} of {} has {:.2} GB; set at most that",
                gb(bytes),
                hardware.name,
                gb(has)
            )));
        }
    }
    Ok(())
}
