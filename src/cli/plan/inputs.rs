//! The model's sizes, for which is planned.

use anyhow::Result;
use tandem::model::{LoadedModel, synth};
use tandem::plan::Sizes;
use tandem::profile::ModelIdentity;
use tandem::simd::Isa;

use crate::cli::open;

/// What is planned for.
pub struct Subject {
    /// Bytes of its parts.
    pub sizes: Sizes,
    /// The model, if there is one behind the sizes.
    pub model: Option<(LoadedModel, ModelIdentity)>,
}

impl Subject {
    /// The sizes from `--spec`, or from the tensors of `-m`.
    pub fn of(spec: Option<&str>, model: Option<&str>) -> Result<Subject> {
        if let Some(spec) = spec {
            return Ok(Subject { sizes: Sizes::of_spec(&synth::spec(spec)?), model: None });
        }
        let mut model = open::outline(model.expect("the parser wants one of them"))?;
        let identity = ModelIdentity::of(&model.spec, &model.weights, &model.source);
        if model.spec.name.is_empty() {
            model.spec.name = model.source.clone();
        }
        let sizes = Sizes::of_weights(&model.spec, &model.weights, Isa::selected()?);
        Ok(Subject { sizes, model: Some((model, identity)) })
    }

    /// The identity of the model.
    pub fn identity(&self) -> Option<&ModelIdentity> {
        self.model.as_ref().map(|m| &m.1)
    }
}
