//! What a model's name means: a path, a name that the hub knows, or random weights.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::hub::{CATALOG, DEFAULT_MODEL, Hub, ModelName};
use crate::progress::Progress;
use crate::{Error, Result};

/// A model that can be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResolvedModel {
    /// What the user called it (the default's name if nothing).
    pub name: String,
    /// Where it is.
    pub source: ModelSource,
}

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ModelSource {
    /// A `.gguf` file or a folder; it exists.
    Path(PathBuf),
    /// Random weights of the spec after `synth:`.
    Synth(String),
}

/// Finds a model by name, fetching it if it has to be fetched; without a name, the default one.
///
/// # Errors
/// Nothing has that name (the message says where was looked), or the pull fails.
pub(super) fn resolve(model: Option<&str>, progress: &dyn Progress) -> Result<ResolvedModel> {
    let name = model.unwrap_or(DEFAULT_MODEL);
    if name.trim().is_empty() {
        return Err(Error::usage("the model's name is empty; leave it out for the default"));
    }
    let at = |source| Ok(ResolvedModel { name: name.into(), source });
    if let Some(spec) = name.strip_prefix("synth:") {
        return at(ModelSource::Synth(spec.into()));
    }
    // A name in the catalogue wins over a file that happens to be called so, only if there is no such file.
    let path = Path::new(name);
    if model.is_some() && path.exists() {
        return at(ModelSource::Path(path.into()));
    }
    let missing = || {
        let known: Vec<_> = CATALOG.iter().map(|e| e.name).collect();
        Error::usage(format!(
            "{name}: no such file or folder, and no model that `tandem pull` knows ({}, hf:OWNER/REPO)",
            known.join(", ")
        ))
    };
    let parsed = ModelName::parse(name).map_err(|_| missing())?;
    let hub = Hub::from_env()?;
    if let Some(found) = hub.lookup(&parsed) {
        return at(ModelSource::Path(found));
    }
    // A mistyped path looks like OWNER/REPO; only the explicit form reaches for the network.
    let explicit = name.starts_with("hf:") || name.starts_with("https://");
    if matches!(parsed, ModelName::Hub(_)) && !explicit {
        return Err(missing());
    }
    at(ModelSource::Path(pull(&hub, name, &parsed, false, progress)?))
}

/// Pulls a model, and notes how long it took.
///
/// # Errors
/// As [`Hub::pull`].
pub fn pull(
    hub: &Hub,
    name: &str,
    parsed: &ModelName,
    force: bool,
    progress: &dyn Progress,
) -> Result<PathBuf> {
    let begun = Instant::now();
    if let ModelName::Catalog(entry) = parsed
        && hub.lookup(parsed).is_none()
    {
        let size = decimal(entry.bytes);
        progress.note(&format!("{name}: fetching {} ({size}, {})", entry.about, entry.licence));
    }
    let pulled = hub.pull(parsed, force, progress)?;
    let took = begun.elapsed().as_secs_f64();
    let size = decimal(pulled.bytes);
    match pulled.fetched {
        true => progress.note(&format!("{name}: {size} in {took:.1} s")),
        false => progress.note(&format!("{name}: already here ({size}), checked in {took:.1} s")),
    }
    Ok(pulled.path)
}

/// `98.4 MB`.
pub fn decimal(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn paths_and_synthetic_models_need_no_hub() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert_eq!(resolve(Some(path), &Silent).unwrap().source, ModelSource::Path(path.into()));
        let synth = resolve(Some("synth:llama-3.2-1b"), &Silent).unwrap();
        assert_eq!(synth.source, ModelSource::Synth("llama-3.2-1b".into()));
    }

    #[test]
    fn a_missing_model_says_where_was_looked() {
        for name in ["no/such/file.gguf", "nosuch", "/no/such"] {
            let error = resolve(Some(name), &Silent).unwrap_err();
            assert!(matches!(error, Error::Usage(_)), "{error:?}");
            assert!(error.to_string().contains("smollm2-135m"), "{error}");
        }
    }
}
