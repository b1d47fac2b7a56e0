//! The model's sizes, for which is planned.

use anyhow::Result;
use tandem::model::synth;
use tandem::plan::Sizes;
use tandem::profile::ModelIdentity;
use tandem::simd::Isa;

use crate::cli::open;

/// The sizes from `--spec`, or from the tensors of `-m`, and the identity of that model.
pub fn sizes(spec: Option<&str>, model: Option<&str>) -> Result<(Sizes, Option<ModelIdentity>)> {
    if let Some(spec) = spec {
        return Ok((Sizes::of_spec(&synth::spec(spec)?), None));
    }
    let model = open::outline(model.expect("the parser wants one of them"))?;
    let identity = ModelIdentity::of(&model.spec, &model.weights, &model.source);
    let mut spec = model.spec;
    if spec.name.is_empty() {
        spec.name = model.source;
    }
    Ok((Sizes::of_weights(&spec, &model.weights, Isa::selected()?), Some(identity)))
}
