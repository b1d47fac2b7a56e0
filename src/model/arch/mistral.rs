//! Mistral: Llama with an optional sliding window on every layer. (GGUF files call themselves `llama`.)

use super::{Family, HfConfig, llama, names};
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
    to_hf: llama::to_hf,
};

fn from_hf(c: &HfConfig) -> Result<ModelSpec> {
    let mut spec = llama::from_hf(c, "mistral")?;
    if let Some(size) = c.opt_size("sliding_window")? {
        let layers = c.layer_types(spec.n_layers)?.unwrap_or_else(|| vec![true; spec.n_layers.min(1 << 16)]);
        spec.window = layers.contains(&true).then_some(Window { size, layers });
    }
    Ok(spec)
}
