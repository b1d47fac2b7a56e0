//! What the routers of a mixture choose while it runs, kept for its next runs.
//!
//! Where experts are divided between the sides, the device has those that are chosen most: as far as a profile of the router says so, which
//! few people record before they ask something. So runs with a device count what is chosen and keep it with the model, where `tandem profile
//! --router` keeps what it records: the next run begins with the experts that this one ended with, and its plan knows how often they are used.

use std::path::PathBuf;

use super::Settings;
use super::model::Model;
use crate::Result;
use crate::engine::Engine;
use crate::model::ModelSpec;
use crate::profile::{ModelIdentity, ProfileStore};

/// A run whose routers are counted. See the [module](self).
pub struct RouterLearning {
    model: ModelIdentity,
    spec: ModelSpec,
}

impl Model {
    /// Begins to count what the routers choose on `engine`, for [`RouterLearning::keep`]. `None` where nothing is to be kept: models without
    /// experts or of random weights, runs without a device, and those whose experts are to stay where they are.
    pub fn learn_router(&self, settings: &Settings, engine: &mut Engine) -> Option<RouterLearning> {
        let model = &self.loaded;
        if model.spec.experts.is_none()
            || model.files.count == 0
            || settings.kind().is_none()
            || settings.fixed_experts
        {
            return None;
        }
        engine.count_choices();
        let identity = ModelIdentity::of(&model.spec, &model.weights, &model.source);
        Some(RouterLearning { model: identity, spec: model.spec.clone() })
    }
}

impl RouterLearning {
    /// Adds what has been chosen to what is kept of the model's routers. Returns the number of tokens, and the file; `None` if nothing was
    /// counted: all experts are on the device, or nothing ran.
    ///
    /// # Errors
    /// The file cannot be written, or the one that is there is damaged.
    pub fn keep(&self, engine: &mut Engine) -> Result<Option<(u64, PathBuf)>> {
        let Some(chosen) = engine.choices().filter(|chosen| chosen.tokens > 0) else { return Ok(None) };
        let path = ProfileStore::from_env()?.learn_router(&self.model, &self.spec, &chosen)?;
        Ok(Some((chosen.tokens, path)))
    }
}
