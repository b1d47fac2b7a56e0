//! The model's sizes, for which is planned.

use std::path::{Path, PathBuf};

use anyhow::Result;
use tandem::model::{LoadedModel, ModelSpec, synth};
use tandem::plan::Sizes;
use tandem::profile::{ModelIdentity, ProfileStore, RouterRecord, kept_router};
use tandem::simd::Isa;

use crate::cli::{open, progress};

/// What is planned for.
pub struct PlanSubject {
    /// Bytes of its parts.
    pub sizes: Sizes,
    /// The model, if there is one behind the sizes.
    pub model: Option<(LoadedModel, ModelIdentity)>,
    /// Where it comes from how often each expert is chosen: `uniform`, or a file. `None` of a dense model.
    pub router: Option<String>,
}

impl PlanSubject {
    /// The sizes from `--spec`, or from the tensors of `-m`; experts are used as the file `router` says, or what is kept of `-m`.
    pub fn of(spec: Option<&str>, model: Option<&str>, router: Option<&Path>) -> Result<PlanSubject> {
        let subject = match (spec, model) {
            (Some(spec), _) => {
                PlanSubject { sizes: Sizes::of_spec(&synth::spec(spec)?), model: None, router: None }
            }
            (None, model) => {
                let mut model = open::outline(model.expect("the parser wants one of them"))?;
                let identity = ModelIdentity::of(&model.spec, &model.weights, &model.source);
                if model.spec.name.is_empty() {
                    model.spec.name = model.source.clone();
                }
                let sizes = Sizes::of_weights(&model.spec, &model.weights, Isa::selected()?);
                PlanSubject { sizes, model: Some((model, identity)), router: None }
            }
        };
        subject.with_router(router)
    }

    fn with_router(self, file: Option<&Path>) -> Result<PlanSubject> {
        let spec = &self.sizes.spec;
        let found = match (file, self.identity()) {
            (Some(file), _) => Some((file.to_owned(), RouterRecord::read(file, spec)?)),
            (None, Some(identity)) => kept(identity, spec),
            (None, None) => None,
        };
        let uniform = spec.experts.as_ref().map(|_| "uniform".to_owned());
        Ok(match found {
            None => PlanSubject { router: uniform, ..self },
            Some((file, record)) => {
                let sizes = self.sizes.with_router(record.router);
                PlanSubject { router: Some(file.display().to_string()), sizes, ..self }
            }
        })
    }

    /// The identity of the model.
    pub fn identity(&self) -> Option<&ModelIdentity> {
        self.model.as_ref().map(|m| &m.1)
    }
}

/// What is kept of the model's routers. A damaged file is reported, and every expert is as likely as any other.
fn kept(identity: &ModelIdentity, spec: &ModelSpec) -> Option<(PathBuf, RouterRecord)> {
    match kept_router(identity, spec) {
        Ok(record) => Some((ProfileStore::from_env().ok()?.router_path(identity), record?)),
        Err(e) => {
            progress::note(&format!("experts as if used alike: {e}"));
            None
        }
    }
}
