//! Gemma 2: soft-capped scores and logits, a window on every other layer (the first has one), norms before and after each
//! half of the block, GeGLU, embeddings scaled by sqrt(d), head tied to the embedding.
//!
//! Read like Gemma 3, which came after it without the caps and with norms of queries and keys.

use super::gemma3::{self, Generation};
use super::{Family, Habits, gemma3::NAMES};
use crate::model::spec::RopePairing;

pub const FAMILY: Family = Family {
    name: "gemma2",
    gguf: &["gemma2"],
    hf: &["gemma2"],
    from_gguf: |c| gemma3::gguf_like_gemma(c, &GEMMA2),
    from_hf: |c| gemma3::hf_like_gemma(c, &GEMMA2),
    names: NAMES,
    hf_norms_are_offsets: true,
    gguf_pairing: RopePairing::Half,
    gguf_windows: true,
    gguf_softcaps: true,
    habits: Habits::NONE,
    experts: false,
    to_hf: gemma3::to_hf,
};

const GEMMA2: Generation = Generation {
    family: "gemma2",
    qk_norm: None,
    theta: 10_000.0,
    local_theta: None,
    window: Some(4096),
    pattern: 2,
    attn_softcap: Some(50.0),
    logit_softcap: Some(30.0),
    vocab: 256_000,
    max_context: 8192,
    layers_27b: 46,
};
