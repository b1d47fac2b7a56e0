//! The description of a model, independent of its file.
//!
//! One transformer block covers every family here; families differ in the values of this struct, which
//! `arch/<family>.rs` fills from GGUF metadata or from a `config.json`.

pub use super::experts::{Experts, RouterWeights};
pub use crate::rope::{QueryScaling, Rope, RopePairing, RopeScaling};

/// Sizes and switches of a decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Family name: `llama`, `qwen3`, `gemma3`, `opt`...
    pub family: String,
    /// Human-readable model name, if the file has one.
    pub name: String,
    /// L, the number of blocks.
    pub n_layers: usize,
    /// d, width of the residual stream.
    pub d_model: usize,
    /// h_a, query heads.
    pub n_heads: usize,
    /// h_kv, key/value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// d_h; `n_heads * head_dim` need not equal `d_model`.
    pub head_dim: usize,
    /// I, width of the dense feed-forward; of no importance if every layer has experts.
    pub d_ff: usize,
    /// Experts in place of the dense feed-forward, on some or all layers.
    pub experts: Option<Experts>,
    /// V, rows of the embedding.
    pub vocab: usize,
    /// Longest context the model was made for, in tokens.
    pub max_context: usize,
    /// The norm used everywhere in the block and at the end.
    pub norm: Norm,
    /// Feed-forward shape and activation.
    pub ffn: Ffn,
    /// How positions enter.
    pub position: Position,
    /// Whether queries, keys and values have biases (Qwen2; OPT has them on every matrix). Llama checkpoints may have
    /// any.
    pub qkv_bias: bool,
    /// Whether the out-projection has a bias (gpt-oss; OPT has one, too).
    pub o_bias: bool,
    /// RMS norms of queries and keys before RoPE (Qwen3, Gemma 3, OLMo 2).
    pub qk_norm: Option<QkNorm>,
    /// Norms of the inputs of attention and feed-forward (all families but OLMo 2).
    pub pre_norms: bool,
    /// Norms of the outputs of attention and feed-forward, before they are added (Gemma 2 and 3, OLMo 2).
    pub post_norms: bool,
    /// Factor of the embeddings (Gemma: sqrt(d)); 1.0 otherwise.
    pub embed_scale: f32,
    /// Factor of q·k (usually head_dim^-0.5).
    pub attn_scale: f32,
    /// tanh soft-cap of the scaled scores, before the mask: cap*tanh(x/cap) (Gemma 2).
    pub attn_softcap: Option<f32>,
    /// Whether each head of each layer has a sink: a logit that takes part in the softmax of the scores and has no value (gpt-oss).
    pub sinks: bool,
    /// Sliding-window attention of some layers.
    pub window: Option<Window>,
    /// Whether the output head is the embedding matrix.
    pub tied_head: bool,
    /// tanh soft-cap of the logits: cap*tanh(x/cap).
    pub logit_softcap: Option<f32>,
    /// Factor of the logits, before any soft-cap (Granite); it is applied to the weights of the last norm.
    pub logit_scale: f32,
    /// Whether activations may exceed the range of f16 (Gemma: trained in bfloat16, known to overflow).
    pub wide_activations: bool,
}

/// Normalisation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Norm {
    /// x / sqrt(mean(x²) + eps) * w. (Gemma's "1 + w" is folded into w by the loader.)
    Rms {
        /// Added to the mean square.
        eps: f32,
    },
    /// (x - mean) / sqrt(var + eps) * w + b.
    Layer {
        /// Added to the variance.
        eps: f32,
    },
}

impl Norm {
    /// The epsilon of either kind, which is added before the root.
    pub fn eps(self) -> f32 {
        let (Norm::Rms { eps } | Norm::Layer { eps }) = self;
        eps
    }
}

/// What an RMS norm of queries and keys is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head on its own; all query heads share one vector of weights, all key heads another.
    PerHead,
    /// All query heads of a row together, and all its key heads together; every element has a weight of its own.
    Whole,
}

impl QkNorm {
    /// Weights of the norm of `heads[0]` query heads and of that of `heads[1]` key heads.
    pub fn widths(self, head_dim: usize, heads: [usize; 2]) -> [usize; 2] {
        match self {
            QkNorm::PerHead => [head_dim; 2],
            QkNorm::Whole => heads.map(|n| n * head_dim),
        }
    }
}

/// Feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ffn {
    /// down(silu(gate x) * (up x)).
    SwiGlu,
    /// down(g * sigmoid(1.702 g) * (u + 1)), g = min(gate x, 7), u = up x between -7 and 7 (gpt-oss).
    ClampedSwiGlu,
    /// down(gelu_tanh(gate x) * (up x)).
    GeGlu,
    /// down(relu(up x)), with biases (OPT).
    Relu,
}

/// Positions.
#[derive(Debug, Clone, PartialEq)]
pub enum Position {
    /// Rotary embedding of queries and keys.
    Rope(Rope),
    /// A learned table added to the embeddings; row = position + `offset` (OPT: 2).
    Learned {
        /// First row used.
        offset: usize,
    },
}

/// Sliding windows.
#[derive(Debug, Clone, PartialEq)]
pub struct Window {
    /// A query sees the last `size` positions, itself included.
    pub size: usize,
    /// For each layer, whether it has the window.
    pub layers: Vec<bool>,
}

impl ModelSpec {
    /// The window of layer `i`, if it has one.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.as_ref().and_then(|w| w.layers.get(layer).copied().unwrap_or(false).then_some(w.size))
    }

    /// The experts of layer `i`; `None` if its feed-forward is dense.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|e| e.layers.get(layer).copied().unwrap_or(false))
    }

    /// Whether the feed-forward of some layer is dense.
    pub fn has_dense_ffn(&self) -> bool {
        (0..self.n_layers).any(|layer| self.experts_of(layer).is_none())
    }

    /// Whether the feed-forward has a gate.
    pub fn gated(&self) -> bool {
        self.ffn != Ffn::Relu
    }

    /// Width of the concatenated query heads, h_a·d_h.
    pub fn q_dim(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Width of the concatenated key (or value) heads, h_kv·d_h.
    pub fn kv_dim(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Weights of the norms of queries and of keys; `None` without such norms.
    pub fn qk_norm_widths(&self) -> Option<[usize; 2]> {
        self.qk_norm.map(|norm| norm.widths(self.head_dim, [self.n_heads, self.n_kv_heads]))
    }
}
