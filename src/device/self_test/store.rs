//! Verdicts of self-tests in the cache folder.
//!
//! ```text
//! <folder>/<key>.json     of a program, a driver and a device: the key is a hash of them
//! ```

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use super::{About, SelfTest};
use crate::{Error, Result, atomic_file, small_file};

/// Most bytes of a verdict.
const MAX_BYTES: u64 = 1 << 20;

/// A folder of verdicts.
pub struct Store(PathBuf);

impl Store {
    pub fn at(folder: &Path) -> Store {
        Store(folder.to_owned())
    }

    fn path(&self, about: &About) -> PathBuf {
        let mut key = DefaultHasher::new();
        about.hash(&mut key);
        self.0.join(format!("{:016x}.json", key.finish()))
    }

    /// The verdict on this program and device. A damaged file is none.
    pub fn load(&self, about: &About) -> Option<SelfTest> {
        let text = small_file::read_text(&self.path(about), MAX_BYTES).ok()??;
        let report: SelfTest = serde_json::from_str(&text).ok()?;
        (report.about == *about).then_some(report)
    }

    /// Keeps a verdict, in the place of an older one.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, report: &SelfTest) -> Result<()> {
        std::fs::create_dir_all(&self.0).map_err(|e| Error::io(&self.0, e))?;
        let text = serde_json::to_string_pretty(report).expect("numbers and strings");
        atomic_file::replace(&self.path(&report.about), |to| to.write_all(text.as_bytes()))
    }
}
