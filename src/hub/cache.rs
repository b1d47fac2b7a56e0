//! The cache folder.
//!
//! ```text
//! $TANDEM_HOME, or $XDG_CACHE_HOME/tandem, or ~/.cache/tandem
//!   models/<catalogue name>/<file>.gguf
//!   models/hf/<owner>/<repo>/<revision>/gguf/<file>.gguf       a file of a repository, or all of a split model
//!   models/hf/<owner>/<repo>/<revision>/safetensors/...        a model folder
//!   downloads/                                                 half-finished files, resumed by the next pull
//!   locks/                                                     one per model, held while it is pulled
//! ```

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use super::{Entry, create_dir, env};
use crate::model::formats::gguf::PartName;
use crate::progress::Progress;
use crate::{Error, Result};

/// The folder of pulled models.
#[derive(Debug, Clone)]
pub struct Cache {
    home: PathBuf,
}

/// A model found in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// What `-m` calls it.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Bytes on disk.
    pub bytes: u64,
}

impl Cache {
    /// The folder that the environment names.
    ///
    /// # Errors
    /// None of `TANDEM_HOME`, `XDG_CACHE_HOME` and `HOME` is set.
    pub fn from_env() -> Result<Cache> {
        let home = env("TANDEM_HOME")
            .map(PathBuf::from)
            .or_else(|| env("XDG_CACHE_HOME").map(|d| PathBuf::from(d).join("tandem")))
            .or_else(|| env("HOME").map(|d| PathBuf::from(d).join(".cache/tandem")))
            .ok_or_else(|| Error::usage("no folder for models: set TANDEM_HOME (or HOME)"))?;
        Ok(Cache { home })
    }

    /// A cache at `home`.
    pub fn at(home: impl Into<PathBuf>) -> Cache {
        Cache { home: home.into() }
    }

    /// The folder.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Where the models are.
    pub fn models(&self) -> PathBuf {
        self.home.join("models")
    }

    /// Bytes free on the disk of the folder, if the system tells.
    pub fn free_bytes(&self) -> Option<u64> {
        super::download::free_space(&self.home)
    }

    /// Where a catalogue model belongs.
    pub fn path_of(&self, entry: &Entry<'_>) -> PathBuf {
        self.models().join(entry.name).join(entry.file)
    }

    /// The file of a catalogue model, if it is there with the right length.
    pub fn lookup(&self, entry: &Entry<'_>) -> Option<PathBuf> {
        let path = self.path_of(entry);
        let good = std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() == entry.bytes);
        good.then_some(path)
    }

    /// The folder of half-finished files, made if need be.
    pub(super) fn downloads(&self) -> Result<PathBuf> {
        let path = self.home.join("downloads");
        create_dir(&path)?;
        Ok(path)
    }

    /// Waits until no other process pulls `name`, and keeps the others out until the value is dropped.
    /// The system releases the lock of a process that dies.
    pub(super) fn lock(&self, name: &str, progress: &dyn Progress) -> Result<File> {
        let folder = self.home.join("locks");
        create_dir(&folder)?;
        let path = folder.join(format!("{}.lock", name.replace('/', "--")));
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|e| Error::io(&path, e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.note(&format!("{name}: another process is pulling it; waiting"));
                file.lock().map_err(|e| Error::io(&path, e))?;
            }
            Err(TryLockError::Error(e)) => return Err(Error::io(&path, e)),
        }
        Ok(file)
    }

    /// What is in the cache, by name.
    pub fn list(&self) -> Vec<Cached> {
        let mut found: Vec<Cached> = super::CATALOG
            .iter()
            .filter_map(|e| Some(Cached { name: e.name.into(), path: self.lookup(e)?, bytes: e.bytes }))
            .collect();
        for owner in folders(&self.models().join("hf")) {
            for repo in folders(&owner) {
                for revision in folders(&repo) {
                    let name = format!("hf:{}/{}@{}", leaf(&owner), leaf(&repo), leaf(&revision));
                    let whole = revision.join("safetensors");
                    if whole.is_dir() {
                        found.push(Cached { name: name.clone(), bytes: bytes_in(&whole), path: whole });
                    }
                    let base = revision.join("gguf");
                    let is_model = |p: &PathBuf| part_name(p).is_none_or(|name| name.number == 1);
                    for path in files_below(&base).into_iter().filter(is_model) {
                        let file = path.strip_prefix(&base).unwrap_or(&path).display().to_string();
                        found.push(Cached {
                            name: format!("{name}/{file}"),
                            bytes: bytes_of_model(&path),
                            path,
                        });
                    }
                }
            }
        }
        found
    }
}

fn leaf(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What is directly in `path`, sorted; nothing if it cannot be read.
fn children(path: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(path).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    all.sort();
    all
}

fn folders(path: &Path) -> Vec<PathBuf> {
    children(path).into_iter().filter(|p| p.is_dir()).collect()
}

fn files_below(path: &Path) -> Vec<PathBuf> {
    children(path).into_iter().flat_map(|p| if p.is_dir() { files_below(&p) } else { vec![p] }).collect()
}

/// What the name of a file says about the split model that it is a part of.
fn part_name(path: &Path) -> Option<PartName<'_>> {
    PartName::parse(path.file_name()?.to_str()?)
}

/// Bytes of the model at `path`: a folder's, a file's, or those of all files of a split model.
pub(super) fn bytes_of_model(path: &Path) -> u64 {
    match part_name(path) {
        Some(name) => (1..=name.count).map(|number| bytes_in(&path.with_file_name(name.of(number)))).sum(),
        None => bytes_in(path),
    }
}

/// Bytes of a file, or of all files in a folder.
pub(super) fn bytes_in(path: &Path) -> u64 {
    if path.is_dir() {
        return files_below(path).iter().map(|p| bytes_in(p)).sum();
    }
    std::fs::metadata(path).map(|m| m.len()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_what_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path());
        assert_eq!(cache.list(), []);
        let gguf = cache.models().join("hf/o/r/main/gguf/sub/x.gguf");
        std::fs::create_dir_all(gguf.parent().unwrap()).unwrap();
        std::fs::write(&gguf, b"12345").unwrap();
        // A catalogue model of the wrong length does not count.
        let entry = super::super::find("smollm2-135m").unwrap();
        std::fs::create_dir_all(cache.path_of(entry).parent().unwrap()).unwrap();
        std::fs::write(cache.path_of(entry), b"short").unwrap();
        assert_eq!(cache.lookup(entry), None);
        let part = |number| gguf.with_file_name(format!("m-{number:05}-of-00002.gguf"));
        (1..3).for_each(|number| std::fs::write(part(number), [0; 7]).unwrap());
        let split = Cached { name: "hf:o/r@main/sub/m-00001-of-00002.gguf".into(), path: part(1), bytes: 14 };
        let want = Cached { name: "hf:o/r@main/sub/x.gguf".into(), path: gguf, bytes: 5 };
        assert_eq!(cache.list(), [split, want]);
    }

    #[test]
    fn a_second_lock_waits_for_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path());
        let first = cache.lock("a/b", &crate::progress::Silent).unwrap();
        let (sent, got) = std::sync::mpsc::channel();
        let other = cache.clone();
        let waiter = std::thread::spawn(move || {
            let _second = other.lock("a/b", &crate::progress::Silent).unwrap();
            sent.send(()).unwrap();
        });
        let early = got.recv_timeout(std::time::Duration::from_millis(100));
        assert!(early.is_err(), "the second lock was granted while the first was held");
        drop(first);
        got.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        waiter.join().unwrap();
    }
}
