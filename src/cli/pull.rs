//! `tandem pull`: fetch a model into the cache folder.

use anyhow::Result;
use serde::Serialize;
use tandem::hub::{CATALOG, Hub, ModelName};

use super::{output, progress};

/// Fetches a model into the cache folder, and prints where it is.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A known name (see --list), or [hf:]OWNER/REPO[@REV][/FILE.gguf] or an address on the Hugging Face hub.
    #[arg(value_name = "NAME", required_unless_present = "list")]
    pub name: Option<String>,
    /// List the known names, and what is in the cache folder.
    #[arg(long, conflicts_with_all = ["name", "force"])]
    pub list: bool,
    /// Fetch it even if it is there.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    path: String,
}

#[derive(Serialize)]
struct Listing {
    home: String,
    known: Vec<Known>,
    cached: Vec<InCache>,
}

#[derive(Serialize)]
struct Known {
    name: &'static str,
    about: &'static str,
    licence: &'static str,
    bytes: u64,
}

/// A model in the cache folder.
#[derive(Serialize)]
pub struct InCache {
    name: String,
    path: String,
    bytes: u64,
}

/// Pulls or lists.
pub fn run(args: &Args) -> Result<()> {
    let hub = Hub::from_env()?;
    let Some(name) = &args.name else { return list(&hub, args.json) };
    let parsed = ModelName::parse(name)?;
    let stderr = progress::Stderr::default();
    let path = tandem::open::pull(&hub, name, &parsed, args.force, &stderr)?.display().to_string();
    if args.json { output::json(&Report { name, path }) } else { output::line(&path) }
}

impl InCache {
    /// Name, size and place.
    pub fn describe(&self) -> String {
        format!("{} ({}): {}", self.name, progress::megabytes(self.bytes), self.path)
    }
}

/// The models in the cache.
pub fn cached(hub: &Hub) -> Vec<InCache> {
    let entry =
        |c: tandem::hub::Cached| InCache { name: c.name, path: c.path.display().to_string(), bytes: c.bytes };
    hub.cache().list().into_iter().map(entry).collect()
}

fn list(hub: &Hub, json: bool) -> Result<()> {
    let known = |e: &tandem::hub::Entry<'static>| Known {
        name: e.name,
        about: e.about,
        licence: e.licence,
        bytes: e.bytes,
    };
    let listing = Listing {
        home: hub.cache().home().display().to_string(),
        known: CATALOG.iter().map(known).collect(),
        cached: cached(hub),
    };
    if json {
        return output::json(&listing);
    }
    output::line("known names:")?;
    for k in &listing.known {
        let size = progress::megabytes(k.bytes);
        output::line(&format!("  {:16} {:>9}  {} ({})", k.name, size, k.about, k.licence))?;
    }
    output::line(&format!("in {}:", listing.home))?;
    if listing.cached.is_empty() {
        output::line("  nothing yet")?;
    }
    for c in &listing.cached {
        output::line(&format!("  {:16} {:>9}  {}", c.name, progress::megabytes(c.bytes), c.path))?;
    }
    Ok(())
}
