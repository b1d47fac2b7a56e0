//! `tandem profile`: what this machine can do, and how long a model's operations take on it, measured once and kept.

mod router;
mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;
use tandem::device::{self, Accelerator, Kind};
use tandem::host::{Pool, cores_beside_device};
use tandem::open::{Device, measure_machine};
use tandem::profile::{
    Effort, Identity, ModelIdentity, Profile, ProfileStore, Subject, measure_model, steps_of,
};
use tandem::simd::Isa;
use tandem::{Error, atomic_file};

use super::{open, output, progress};

/// Measures this machine: memory, arithmetic, the device and the link to it; with -m also how long each operation of a model takes.
/// Of a mixture of experts it also records which experts the routers choose over a text. What was measured is kept for the next time,
/// and `tandem plan --hardware auto` reads it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Time the operations of this model, too: a .gguf file, a folder, a name that `tandem pull` knows, or synth:NAME.
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
    /// What to measure beside the CPU: auto (a GPU if there is one), cpu (nothing), cuda[:i], emulated or emulated:kernels.
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub device: Device,
    /// Write a copy of the profile to this file.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Record which experts the routers choose, and measure nothing.
    #[arg(long, requires = "model")]
    pub router: bool,
    /// The text to record routers over (- is standard input) [default: documents and code of Tandem].
    #[arg(long, value_name = "FILE", requires = "model")]
    pub text: Option<PathBuf>,
    /// Tokens of it to read [default: 4096, with --quick 512].
    #[arg(long, value_name = "N", requires = "model", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub tokens: Option<u32>,
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
    /// Of a mixture of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    router: Option<&'a router::FoundRecord>,
}

/// Measures, or reads an earlier measurement, and prints it.
pub fn run(args: &Args) -> Result<()> {
    let store = ProfileStore::from_env()?;
    if let Some(path) = &args.output {
        atomic_file::check(path)?;
    }
    if let (true, Some(model)) = (args.router, &args.model) {
        return router::run(args, &store, model);
    }
    open::measured_tier()?;
    let device = device(&args.device)?;
    let machine = Identity::of_machine(device.as_ref().map(|d| d.runtime().info()));
    let (profile, cached) = match &args.model {
        Some(model) => of_model(args, &store, machine, device.as_ref(), model)?,
        None => of_machine(args, &store, machine, device.as_ref())?,
    };
    let file = match cached {
        true => store.path(&profile.identity),
        false => store.save(&profile)?,
    };
    if let Some(path) = &args.output {
        profile.write(path)?;
    }
    let router =
        args.model.as_ref().map(|model| router::recorded(args, &store, model)).transpose()?.flatten();
    if args.json {
        return output::json(&Report { file: &file, cached, profile: &profile, router: router.as_ref() });
    }
    output::print(&table::limits(&profile))?;
    if let Some(model) = &profile.model {
        output::print(&table::model(&profile, model))?;
    }
    if let Some(found) = &router {
        output::print(&format!("\n{}", router::text_of(&found.record)))?;
    }
    let how = if cached { "measured before, --again measures anew" } else { "kept" };
    output::line(&format!("\n{how}: {}", file.display()))?;
    router.map_or(Ok(()), |found| {
        let how = if found.cached { "recorded before" } else { "kept" };
        output::line(&format!("{how}: {}", found.file.display()))
    })
}

/// The machine's profile, and whether it is an earlier one.
fn of_machine(
    args: &Args,
    store: &ProfileStore,
    identity: Identity,
    device: Option<&Arc<dyn Accelerator>>,
) -> Result<(Profile, bool)> {
    match kept(args, store, &identity) {
        Some(profile) => Ok((profile, true)),
        None => {
            let stderr = progress::Stderr::default();
            Ok((measure_machine(identity, device, args.quick, &stderr)?, false))
        }
    }
}

/// The profile of the machine and a model, and whether it is an earlier one. Limits measured earlier are reused.
fn of_model(
    args: &Args,
    store: &ProfileStore,
    machine: Identity,
    device: Option<&Arc<dyn Accelerator>>,
    name: &str,
) -> Result<(Profile, bool)> {
    let outline = open::outline(name)?;
    let model = ModelIdentity::of(&outline.spec, &outline.weights, &outline.source);
    drop(outline);
    let identity = machine.clone().with_model(model);
    if let Some(profile) = kept(args, store, &identity) {
        return Ok((profile, true));
    }
    let (of_machine, cached) = of_machine(args, store, machine, device)?;
    if !cached {
        store.save(&of_machine)?;
    }
    let limits = of_machine.limits;
    let opened = open::open(Some(name))?;
    let pool = Pool::pinned(device.map(|_| cores_beside_device()));
    let subject = Subject {
        spec: &opened.loaded.spec,
        weights: &opened.loaded.weights,
        isa: Isa::selected()?,
        pool: &pool,
        effort: if args.quick { Effort::Quick } else { Effort::Full },
    };
    let bar = progress::count_bar(steps_of(&subject, device.is_some()), "timing the model's operations");
    let model = measure_model(&subject, device, &limits, &|| bar.inc(1));
    bar.finish();
    let model = model.map_err(|e| match e {
        Error::Capacity(why) => Error::Capacity(format!("{name}: {why}")),
        other => other,
    })?;
    Ok((Profile { identity, quick: args.quick, limits, model: Some(model) }, false))
}

/// The device to measure.
fn device(asked: &Device) -> Result<Option<Arc<dyn Accelerator>>> {
    let kind = match asked {
        Device::Cpu => return Ok(None),
        Device::Auto if device::check(&Kind::Cuda(0)).is_err() => return Ok(None),
        Device::Auto => Kind::Cuda(0),
        Device::Accelerator(kind @ Kind::Timed(..)) => {
            let why =
                format!("--device {kind}: its times come from a description, there is nothing to measure");
            return Err(Error::usage(why).into());
        }
        Device::Accelerator(kind) => kind.clone(),
    };
    Ok(Some(device::open(&kind, None)?))
}

/// The profile in the cache folder, if it is good enough: a quick profile serves only `--quick` runs. A damaged profile
/// is reported and measured again.
fn kept(args: &Args, store: &ProfileStore, identity: &Identity) -> Option<Profile> {
    if args.again {
        return None;
    }
    match store.load(identity) {
        Ok(profile) => profile.filter(|p| args.quick || !p.quick),
        Err(e) => {
            progress::note(&format!("measuring again: {e}"));
            None
        }
    }
}
