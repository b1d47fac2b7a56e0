//! `tandem profile`: what this machine can do, measured once and kept.

mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;
use tandem::Error;
use tandem::device::accelerator::Accelerator;
use tandem::device::open::{self as devices, Kind};
use tandem::host::Pool;
use tandem::profile::{Effort, Identity, Limits, Profile, Store, limits};

use super::args::Device;
use super::{output, progress};

/// Measures this machine: memory, arithmetic, the device and the link to it. What was measured is kept for the next time, and
/// `tandem plan --hardware auto` reads it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to measure beside the CPU: auto (a GPU if there is one), cpu (nothing), cuda[:i], emulated or emulated:kernels.
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub device: Device,
    /// Write a copy of the profile to this file.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// A few seconds of smaller and fewer probes, not half a minute.
    #[arg(long)]
    pub quick: bool,
    /// Measure again, even if there is a profile of this machine.
    #[arg(long)]
    pub again: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    file: &'a Path,
    cached: bool,
    #[serde(flatten)]
    profile: &'a Profile,
}

/// Measures, or reads what was measured, and prints it.
pub fn run(args: &Args) -> Result<()> {
    let device = device(args.device)?;
    let identity = Identity::of_machine(device.as_ref().map(|d| d.runtime().info()));
    let store = Store::from_env()?;
    let kept = match args.again {
        true => None,
        false => kept(&store, &identity, args.quick),
    };
    let cached = kept.is_some();
    let profile = match kept {
        Some(profile) => profile,
        None => measure(identity, device.as_ref(), args.quick)?,
    };
    let file = match cached {
        true => store.path(&profile.identity),
        false => store.save(&profile)?,
    };
    if let Some(path) = &args.output {
        profile.write(path)?;
    }
    if args.json {
        return output::json(&Report { file: &file, cached, profile: &profile });
    }
    output::print(&table::limits(&profile))?;
    let how = if cached { "measured before, --again measures anew" } else { "kept" };
    output::line(&format!("\n{how}: {}", file.display()))
}

/// The device to be measured.
fn device(asked: Device) -> Result<Option<Arc<dyn Accelerator>>> {
    let kind = match asked {
        Device::Cpu => return Ok(None),
        Device::Auto if devices::check(Kind::Cuda(0)).is_err() => return Ok(None),
        Device::Auto => Kind::Cuda(0),
        Device::Accelerator(kind) => kind,
    };
    Ok(Some(devices::open(kind, None)?))
}

/// The profile in the cache folder, if it is good enough: a quick one serves only those in a hurry. A damaged one is
/// told of, and measured anew.
fn kept(store: &Store, identity: &Identity, quick: bool) -> Option<Profile> {
    match store.load(identity) {
        Ok(profile) => profile.filter(|p| quick || !p.quick),
        Err(e) => {
            progress::note(&format!("measuring again: {e}"));
            None
        }
    }
}

/// Measures the limits of this machine, with a bar.
pub fn measure(identity: Identity, device: Option<&Arc<dyn Accelerator>>, quick: bool) -> Result<Profile> {
    let effort = if quick { Effort::Quick } else { Effort::Full };
    let pool = Pool::pinned(None);
    let steps = if device.is_some() { limits::STEPS } else { limits::STEPS - 2 };
    let bar = progress::count_bar(steps, "measuring this machine");
    let limits = Limits::measure(&pool, device, effort, &|| bar.inc(1));
    bar.finish();
    let limits = limits.map_err(|e| match e {
        Error::Capacity(why) => Error::Capacity(format!("measuring this machine: {why}")),
        other => other,
    })?;
    Ok(Profile { identity, quick, limits })
}
