//! What is planned for: the model's sizes and the machine's figures.

use std::path::Path;

use anyhow::Result;
use tandem::Error;
use tandem::device::open::{self as devices, Kind};
use tandem::model::synth;
use tandem::plan::hardware;
use tandem::plan::{Hardware, Sizes};
use tandem::profile::{Identity, Profile, Store, THIS_MACHINE, measured_hardware};
use tandem::simd::Isa;

use crate::cli::{open, profile, progress};

/// Most bytes of a hardware description.
const MAX_TOML: u64 = 1 << 20;

/// Sizes of `--spec`, or of the tensors of `-m`.
pub fn sizes(spec: Option<&str>, model: Option<&str>) -> Result<Sizes> {
    if let Some(spec) = spec {
        return Ok(Sizes::of_spec(&synth::spec(spec)?));
    }
    let model = open::outline(model.expect("the parser wants one of them"))?;
    let mut spec = model.spec;
    if spec.name.is_empty() {
        spec.name = model.source;
    }
    Ok(Sizes::of_weights(&spec, &model.weights, Isa::selected()?))
}

/// The machine that `--hardware` names.
pub fn hardware(name: &str) -> Result<Hardware> {
    if name == "auto" {
        return this_machine();
    }
    if let Some(found) = hardware::named(name) {
        return Ok(found);
    }
    let path = Path::new(name);
    if !path.is_file() {
        let known: Vec<_> = hardware::names().collect();
        return Err(Error::usage(format!(
            "--hardware {name}: no such machine or file; give auto, the path of a TOML file or of a profile, or one of {}",
            known.join(", ")
        ))
        .into());
    }
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
        return from_profile(path);
    }
    let length = std::fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    if length > MAX_TOML {
        return Err(
            Error::format(name, format!("{length} bytes, too many for a hardware description")).into()
        );
    }
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
    let text = String::from_utf8(bytes).map_err(|_| Error::format(name, "not text"))?;
    Ok(hardware::parse(name, &text)?)
}

/// As `tandem profile` has measured it, or measures it now, in a hurry.
fn this_machine() -> Result<Hardware> {
    let device = match devices::check(&Kind::Cuda(0)) {
        Err(_) => None,
        Ok(()) => Some(devices::open(&Kind::Cuda(0), None)?),
    };
    let info = device.as_ref().map(|d| d.runtime().info());
    if let Some(known) = measured_hardware(info) {
        return Ok(known);
    }
    progress::note("measuring this machine in a hurry; tandem profile does it thoroughly");
    let profile = profile::measure(Identity::of_machine(info), device.as_ref(), true)?;
    // What cannot be kept is measured again the next time.
    if let Err(e) = Store::from_env().and_then(|store| store.save(&profile)) {
        progress::detail(&format!("the profile was not kept: {e}"));
    }
    Ok(profile.limits.hardware(THIS_MACHINE))
}

/// The machine of a profile that `tandem profile -o` wrote: this one.
fn from_profile(path: &Path) -> Result<Hardware> {
    let wanted = Profile::read(path)?.identity;
    let device = match wanted.device.as_ref().is_some_and(|d| d.driver > 0) {
        true => Some(devices::open(&Kind::Cuda(0), None)?),
        false => None,
    };
    let mut here = Identity::of_machine(device.as_ref().map(|d| d.runtime().info()));
    if device.is_none() {
        // An emulated one is wherever this program is.
        here.device = wanted.device;
    }
    Ok(Profile::read_for(path, &here)?.limits.hardware(THIS_MACHINE))
}
