//! The description of a model for `tandem inspect`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::spec::{Experts, Norm, Position, QkNorm, RopePairing, RopeScaling, RouterWeights};
use super::{LoadedModel, ModelSpec, TextSource};
use crate::model::formats::gguf::Value;

/// A model in numbers.
#[derive(Debug, Clone, Serialize)]
pub struct Description {
    /// The model's own name.
    pub name: String,
    /// Where it was loaded from.
    pub source: String,
    /// Files with weights.
    pub files: usize,
    /// Their bytes together.
    pub file_bytes: u64,
    /// Family.
    pub family: String,
    /// L.
    pub layers: usize,
    /// d.
    pub d_model: usize,
    /// h_a.
    pub heads: usize,
    /// h_kv.
    pub kv_heads: usize,
    /// d_h.
    pub head_dim: usize,
    /// I; 0 if every layer has experts.
    pub d_ff: usize,
    /// Mixtures of experts, as a sentence; empty without.
    pub experts: String,
    /// Elements of the tensors that a token uses: of the experts, the chosen ones.
    pub active_parameters: u64,
    /// V.
    pub vocab: usize,
    /// Tokens.
    pub max_context: usize,
    /// Tokens that windowed layers see, and how many layers those are.
    pub window: Option<(usize, usize)>,
    /// How positions enter, as a sentence.
    pub position: String,
    /// Where norms are, as a sentence.
    pub norms: String,
    /// tanh soft-cap of attention's scores.
    pub attn_softcap: Option<f32>,
    /// Each head has a sink: a logit of the softmax without a value.
    pub attn_sinks: bool,
    /// tanh soft-cap of the logits.
    pub logit_softcap: Option<f32>,
    /// The output head is the embedding.
    pub tied_head: bool,
    /// Elements of all tensors.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub weight_bytes: u64,
    /// Bytes of all tensors, by dtype.
    pub bytes_by_dtype: BTreeMap<&'static str, u64>,
    /// Bytes that one token adds to the KV cache (16-bit keys and values, no window).
    pub kv_bytes_per_token: u64,
    /// Where the tokenizer comes from.
    pub tokenizer: String,
    /// Whether there is a chat template.
    pub chat_template: bool,
    /// The authors' recommendation for sampling, as a sentence; empty if there is none.
    pub sampling: String,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// The numbers of `m`.
pub fn describe(m: &LoadedModel) -> Description {
    let s = &m.spec;
    let mut parameters = 0;
    let mut bytes_by_dtype = BTreeMap::new();
    for (_, t) in m.weights.iter() {
        parameters += t.rows() as u64 * t.cols() as u64;
        *bytes_by_dtype.entry(t.dtype.name()).or_insert(0) += t.data.len() as u64;
    }
    let tokenizer = match &m.text {
        TextSource::Gguf(meta) => {
            let get = |k: &str| meta.get(k).and_then(Value::as_str).unwrap_or("?");
            format!("gguf: {} ({})", get("tokenizer.ggml.model"), get("tokenizer.ggml.pre"))
        }
        TextSource::TokenizerJson { .. } => "tokenizer.json".into(),
        TextSource::Missing(_) => "none: tokenizer.json is missing".into(),
        TextSource::None => "none".into(),
    };
    let position = match &s.position {
        Position::Learned { offset } => format!("learned, offset {offset}"),
        Position::Rope(r) => {
            let pairing = match r.pairing {
                RopePairing::Half => "halves",
                RopePairing::Interleaved => "neighbours",
            };
            let local = match r.local_theta {
                Some(t) => format!(" ({t}{} in windows)", scaling(&r.local_scaling)),
                None => String::new(),
            };
            let queries = match r.query_scaling {
                Some(q) => {
                    format!(", queries scaled from position {} on (beta {})", q.original_context, q.beta)
                }
                None => String::new(),
            };
            format!(
                "rope base {}{local}, {} of {} elements in {pairing}{}{queries}",
                r.theta,
                r.dim,
                s.head_dim,
                scaling(&r.scaling)
            )
        }
    };
    Description {
        name: s.name.clone(),
        source: m.source.clone(),
        files: m.files.count,
        file_bytes: m.files.bytes,
        family: s.family.clone(),
        layers: s.n_layers,
        d_model: s.d_model,
        heads: s.n_heads,
        kv_heads: s.n_kv_heads,
        head_dim: s.head_dim,
        d_ff: if s.has_dense_ffn() { s.d_ff } else { 0 },
        experts: s.experts.as_ref().map(|e| experts(e, s.n_layers)).unwrap_or_default(),
        active_parameters: parameters - unused_by_a_token(s),
        vocab: s.vocab,
        max_context: s.max_context,
        window: s.window.as_ref().map(|w| (w.size, w.layers.iter().filter(|&&l| l).count())),
        position,
        norms: norms(s),
        attn_softcap: s.attn_softcap,
        attn_sinks: s.sinks,
        logit_softcap: s.logit_softcap,
        tied_head: s.tied_head,
        parameters,
        weight_bytes: m.weights.bytes(),
        bytes_by_dtype,
        kv_bytes_per_token: (s.n_layers * 2 * s.kv_dim() * 2) as u64,
        tokenizer,
        chat_template: m.chat_template.is_some(),
        sampling: m.sampling.to_string(),
        notes: m.notes.iter().chain(&m.sampling.ignored).cloned().collect(),
    }
}

/// The experts of a model of so many layers.
fn experts(e: &Experts, n_layers: usize) -> String {
    let shared = e.shared.map(|ff| format!(", a shared one of width {ff}")).unwrap_or_default();
    let over = match e.weights {
        RouterWeights::OfAll => "all",
        RouterWeights::OfChosen => "the chosen",
    };
    let layers = match e.layers.iter().filter(|&&l| l).count() {
        n if n == n_layers => String::new(),
        n => format!(", on {n} of {n_layers} layers"),
    };
    format!("{} of {} of width {}{shared}, softmax over {over}{layers}", e.used, e.count, e.d_ff)
}

/// Elements of the experts that a token does not choose.
fn unused_by_a_token(s: &ModelSpec) -> u64 {
    let Some(e) = &s.experts else { return 0 };
    let matrices = if s.gated() { 3 } else { 2 };
    let layers = e.layers.iter().filter(|&&l| l).count();
    let biases = if e.biases { (matrices - 1) * e.d_ff + s.d_model } else { 0 };
    (layers * (e.count - e.used) * (matrices * e.d_ff * s.d_model + biases)) as u64
}

/// Where a model has norms.
fn norms(s: &ModelSpec) -> String {
    let kind = match s.norm {
        Norm::Rms { .. } => "RMS norms",
        Norm::Layer { .. } => "layer norms",
    };
    let place = match (s.pre_norms, s.post_norms) {
        (true, true) => "before and after",
        (true, false) => "before",
        (false, true) => "after",
        (false, false) => "not beside",
    };
    let of_heads = match s.qk_norm {
        None => "",
        Some(QkNorm::PerHead) => ", of each query and key head",
        Some(QkNorm::Whole) => ", of all query heads together and all key heads together",
    };
    format!("{kind} {place} attention and feed-forward{of_heads}")
}

/// A scaling of RoPE, after a comma; empty if there is none.
fn scaling(scaling: &RopeScaling) -> String {
    let kind = match scaling {
        RopeScaling::None => return String::new(),
        RopeScaling::Linear { factor } => format!("stretched {factor}x"),
        RopeScaling::Llama3 { factor, .. } => format!("llama3 scaling {factor}x"),
        RopeScaling::Factors(_) => "factors per frequency".into(),
        RopeScaling::Yarn { factor, original_context, .. } => {
            format!("yarn scaling {factor}x of {original_context} tokens")
        }
        RopeScaling::LongRope { original_context, .. } => {
            format!("longrope scaling, long factors in contexts above {original_context} tokens")
        }
        RopeScaling::Dynamic { factor, original_context } => {
            format!("dynamic scaling {factor}x in contexts above {original_context} tokens")
        }
    };
    match scaling.attention_factor() {
        1.0 => format!(", {kind}"),
        by => format!(", {kind}, attention factor {by:.4}"),
    }
}
