//! Mistral: Llama with an optional sliding window on every layer. (GGUF files call themselves `llama`.)

use serde_json::{Map, Value as Json};

use super::llama::Defaults;
use super::{Family, Habits, HfConfig, RopeDefaults, llama, names};
use crate::model::ModelSpec;
use crate::model::spec::{RopePairing, Window};
use crate::{Error, Result};

pub const FAMILY: Family = Family {
    name: "mistral",
    gguf: &[],
    hf: &["mistral"],
    from_gguf: |_| Err(Error::Unsupported("GGUF files of Mistral name the llama architecture".into())),
    from_hf,
    names: names::LLAMA,
    hf_norms_are_offsets: false,
    gguf_pairing: RopePairing::Interleaved,
    gguf_windows: false,
    gguf_softcaps: false,
    habits: Habits::NONE,
    experts: false,
    to_hf,
};

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    let mut spec = llama::from_hf_or(c, "mistral", &DEFAULTS)?;
    spec.window = window(c, spec.n_layers, Some(4096))?;
    Ok(spec)
}

/// What `transformers` assumes where a file is silent.
pub const DEFAULTS: Defaults = Defaults {
    n_kv_heads: Some(8),
    rope: RopeDefaults { max_context: Some(131_072), ..RopeDefaults::base(10_000.0) },
    ..llama::LLAMA
};

/// A window on every layer, or those that the file lists; of `default` tokens if it is silent about their number.
pub fn window(c: &HfConfig, n_layers: usize, default: Option<usize>) -> Result<Option<Window>> {
    let Some(size) = c.size_or_null("sliding_window", default)? else { return Ok(None) };
    let layers = c.layer_types(n_layers)?.unwrap_or_else(|| vec![true; n_layers.min(1 << 16)]);
    Ok(layers.contains(&true).then_some(Window { size, layers }))
}

/// [`llama::to_hf`], which says explicitly that there is no window: silence would mean one.
pub fn to_hf(s: &ModelSpec, c: &mut Map<String, Json>) -> Result<()> {
    llama::to_hf(s, c)?;
    if s.window.is_none() {
        c.insert("sliding_window".to_owned(), Json::Null);
    }
    Ok(())
}
