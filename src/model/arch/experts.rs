//! The settings of mixtures of experts, under the names that the families share.

use serde_json::{Map, Value as Json};

use super::{GgufConfig, HfConfig};
use crate::model::ModelSpec;
use crate::model::check::MAX_LAYERS;
use crate::model::spec::{Experts, RouterWeights};
use crate::{Error, Result};

/// The experts of a GGUF file. `usual`: how the family weighs them where the file does not say, as older files.
///
/// # Errors
/// A key is missing or malformed, or asks for a way of routing that is not supported.
pub fn gguf_experts(c: &GgufConfig, spec: &ModelSpec, usual: RouterWeights) -> Result<Experts> {
    let size = |key| Ok::<_, Error>(c.opt_size(key)?.filter(|&n| n > 0));
    // 0 and 1: softmax, 3: softmax of the chosen ones only. 2 is a sigmoid.
    let scored = c.opt_size("expert_gating_func")?.unwrap_or(0);
    let groups = c.opt_size("expert_group_count")?.unwrap_or(0);
    let scale = c.opt_float("expert_weights_scale")?.filter(|&x| x != 0.0).unwrap_or(1.0);
    for (key, found, plain) in [
        ("expert_gating_func", scored.to_string(), matches!(scored, 0 | 1 | 3)),
        ("expert_group_count", groups.to_string(), groups <= 1),
        ("expert_weights_scale", scale.to_string(), scale == 1.0),
    ] {
        if !plain {
            return Err(Error::Unsupported(format!(
                "{}: {found}; routers with a plain softmax are supported",
                c.full(key)
            )));
        }
    }
    let weights = match c.opt_flag("expert_weights_norm")? {
        _ if scored == 3 => RouterWeights::OfChosen,
        None => usual,
        Some(true) => RouterWeights::OfChosen,
        Some(false) => RouterWeights::OfAll,
    };
    // A layer with a dense matrix is dense. What is missing from the others is told when the tensors are checked.
    let dense = |layer: &usize| c.tensors.get(&format!("blk.{layer}.ffn_up.weight")).is_some();
    Ok(Experts {
        count: c.size("expert_count")?,
        used: c.size("expert_used_count")?,
        d_ff: size("expert_feed_forward_length")?.unwrap_or(spec.d_ff),
        shared: None,
        biases: false,
        weights,
        layers: (0..spec.n_layers.min(MAX_LAYERS + 1)).map(|layer| !dense(&layer)).collect(),
    })
}

/// The keys under which a family's `config.json` has its experts, and what is assumed where it is silent.
pub struct HfExperts {
    /// E.
    pub count: (&'static str, usize),
    /// k.
    pub used: usize,
    /// The width of an expert; `None`: that of the feed-forward.
    pub d_ff: Option<(&'static str, usize)>,
    /// `None`: `norm_topk_prob` says.
    pub weights: Option<RouterWeights>,
    /// Whether some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`).
    pub dense_layers: bool,
}

/// Keys of layers without experts.
const DENSE: &str = "mlp_only_layers";
const STEP: &str = "decoder_sparse_step";

/// The experts of a `config.json`; `None` if all layers are dense.
///
/// # Errors
/// A setting is malformed.
pub fn hf_experts(c: &HfConfig, spec: &ModelSpec, of: &HfExperts) -> Result<Option<Experts>> {
    let (key, usual) = of.count;
    let count = match c.opt_size(key)? {
        Some(n) => n,
        // The other of the two names that `transformers` has for it.
        None => c.opt_size("num_local_experts")?.unwrap_or(usual),
    };
    let d_ff = match of.d_ff {
        Some((key, usual)) => c.opt_size(key)?.unwrap_or(usual),
        None => spec.d_ff,
    };
    let weights = match of.weights {
        Some(weights) => weights,
        None if c.flag("norm_topk_prob", false)? => RouterWeights::OfChosen,
        None => RouterWeights::OfAll,
    };
    let layers = if of.dense_layers { sparse_layers(c, spec.n_layers)? } else { vec![true; spec.n_layers] };
    let used = c.opt_size("num_experts_per_tok")?.unwrap_or(of.used);
    let experts = Experts { count, used, d_ff, shared: None, biases: false, weights, layers };
    Ok(experts.layers.contains(&true).then_some(experts))
}

/// Every `decoder_sparse_step`-th layer that is not listed.
fn sparse_layers(c: &HfConfig, n_layers: usize) -> Result<Vec<bool>> {
    let step = c.opt_size(STEP)?.unwrap_or(1);
    if step == 0 {
        return Err(Error::format(format!("config.json: {STEP}"), "0, wanted a positive number"));
    }
    let mut layers: Vec<bool> = (1..=n_layers).map(|i| i.is_multiple_of(step)).collect();
    let Some(listed) = c.get(DENSE) else { return Ok(layers) };
    let wrong = || HfConfig::wrong(DENSE, "numbers of layers", listed);
    for layer in listed.as_array().ok_or_else(wrong)? {
        let layer = layer.as_u64().ok_or_else(wrong)?;
        // Files of models with fewer layers keep the list of the larger ones.
        if let Some(sparse) = usize::try_from(layer).ok().and_then(|l| layers.get_mut(l)) {
            *sparse = false;
        }
    }
    Ok(layers)
}

/// Adds a spec's experts to a `config.json`.
pub fn experts_to_hf(s: &ModelSpec, c: &mut Map<String, Json>, of: &HfExperts) {
    let Some(e) = &s.experts else { return };
    let mut set = |key: &str, v: Json| c.insert(key.to_owned(), v);
    set(of.count.0, e.count.into());
    set("num_experts_per_tok", e.used.into());
    if let Some((key, _)) = of.d_ff {
        set(key, e.d_ff.into());
    }
    if of.weights.is_none() {
        set("norm_topk_prob", (e.weights == RouterWeights::OfChosen).into());
    }
    if of.dense_layers {
        set(STEP, 1.into());
        set(DENSE, (0..s.n_layers).filter(|&i| s.experts_of(i).is_none()).collect());
    }
}
