//! What there is to say of an engine that runs.

use super::decision::PlacementDecision;
use super::model::Model;
use super::settings::Settings;
use crate::engine::{Engine, Options};
use crate::simd::linear::Linear;
use crate::tensor::DType;

/// Which machine's time is reported, if it is not this computer's, and settings without an effect.
pub(super) fn notes(settings: &Settings, engine: &Engine, decision: &PlacementDecision) -> Vec<String> {
    let mut notes: Vec<String> = clock(settings, engine).into_iter().collect();
    let mut without = |given: bool, sentence: String| {
        if given {
            notes.push(sentence);
        }
    };
    without(
        settings.far.is_some() && !decision.pages_move(),
        "`far` has no effect: all pages of keys and values stay where they are".into(),
    );
    without(
        settings.kv_pages.is_some() && !decision.keeps_kv_on_device(),
        "`kv_pages` has no effect: no block keeps its keys and values on the device".into(),
    );
    without(
        settings.hardware != "auto" && !decision.is_predicted(),
        format!("`hardware` {} has no effect: there is nothing to choose", settings.hardware),
    );
    without(
        settings.weights_node.is_some() && engine.placement().strategy == "gpu-only",
        "`weights_node` has no effect: all weights are on the device".into(),
    );
    notes
}

/// The machine whose time is reported, if it is not this computer.
pub(super) fn clock(settings: &Settings, engine: &Engine) -> Option<String> {
    engine.emulated_seconds()?;
    let machine = settings.timed_machine().map_or("another machine".into(), |machine| machine.name.clone());
    Some(format!("times are those of {machine}, not of this computer"))
}

/// Where weights are, how much memory is used, and by which kernels the CPU multiplies.
pub(super) fn of_run(
    model: &Model,
    settings: &Settings,
    options: &Options,
    engine: &Engine,
    load_ms: f64,
) -> Vec<String> {
    let mut said = Vec::new();
    let (placement, memory) = (engine.placement(), engine.memory());
    let whole = placement.strategy == "gpu-only";
    if let Some(nodes) = nodes(settings, options).filter(|_| !whole) {
        said.push(format!("weights on the host are on {nodes}"));
    }
    said.push(format!(
        "{}: {} ({}), {} threads, context {}; weights {:.2} GB, KV {:.2} GB, activations {:.2} GB; \
         loaded in {load_ms:.0} ms",
        model.name,
        placement.device,
        placement.isa,
        placement.threads,
        engine.context(),
        memory.weights as f64 / 1e9,
        memory.kv as f64 / 1e9,
        memory.activations as f64 / 1e9
    ));
    if !whole {
        said.push(format!("products on the CPU: {}", products(model, options)));
    }
    said
}

/// The memory nodes of weights on the host, if they were chosen.
fn nodes(settings: &Settings, options: &Options) -> Option<String> {
    if let Some(nodes) = &options.weights_node {
        return Some(nodes.describe());
    }
    let machine = settings.timed_machine()?;
    Some(format!("{} of {}", machine.weights.as_ref()?.describe(), machine.name))
}

/// Which kernels multiply the model's weights on the CPU, by dtype and number of rows.
fn products(model: &Model, options: &Options) -> String {
    let weights = model.loaded.weights.iter().map(|(_, t)| t);
    let mut dtypes: Vec<DType> = weights.filter(|t| t.shape.len() == 2).map(|t| t.dtype).collect();
    dtypes.sort_by_key(|d| d.to_string());
    dtypes.dedup();
    let of = |dtype: &DType| {
        let kernels = Linear::kernels_up_to(*dtype, options.isa, false, options.chunk, options.mode);
        let named = kernels.iter().map(|(from, kernel)| match from {
            1 => kernel.to_string(),
            _ => format!("from {from} rows {kernel}"),
        });
        format!("{dtype} by {}", named.collect::<Vec<_>>().join(", "))
    };
    dtypes.iter().map(of).collect::<Vec<_>>().join("; ")
}
