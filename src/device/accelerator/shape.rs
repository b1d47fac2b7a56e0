//! The sizes of a model and its steps from which an accelerator sizes memory.

use crate::cache::KvType;
use crate::model::{Experts, Ffn, ModelSpec, Norm, Position, QkNorm, RopePairing, RouterWeights};
use crate::simd::Isa;
use crate::tensor::Half;

/// The sizes that are the same in all steps of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// d.
    pub d_model: usize,
    /// h_a.
    pub n_heads: usize,
    /// h_kv.
    pub n_kv_heads: usize,
    /// d_h.
    pub head_dim: usize,
    /// I.
    pub d_ff: usize,
    /// V.
    pub vocab: usize,
    /// The norm of all blocks.
    pub norm: Norm,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Activation of the feed-forward.
    pub ffn: Ffn,
    /// The experts of the layers that have some.
    pub experts: Option<ExpertShape>,
    /// Factor of q·k.
    pub attn_scale: f32,
    /// Soft-cap of the scaled scores.
    pub attn_softcap: Option<f32>,
    /// Factor of embeddings.
    pub embed_scale: f32,
    /// Rotated elements per head; 0 without RoPE.
    pub rope_dim: usize,
    /// Pairs of RoPE.
    pub pairing: RopePairing,
    /// Sliding window of the layers that have one.
    pub window: Option<usize>,
    /// Soft-cap of the logits.
    pub logit_softcap: Option<f32>,
    /// Type of normed activations.
    pub act: Half,
    /// Type of keys and values in pages; until they are there, and queries, are of its [`KvType::half`].
    pub kv: KvType,
    /// If set, results have the bits that this CPU tier computes in deterministic mode, whatever the batch and wherever
    /// the rest is computed. Values that are otherwise 16 bits wide are then f32, except keys and values.
    /// [`Accelerator::check`](super::Accelerator::check) returns an error if the accelerator cannot do so.
    pub exact: Option<Isa>,
}

impl Shape {
    /// The shape of a model, with activations and keys and values of these types.
    pub fn of(spec: &ModelSpec, act: Half, kv: impl Into<KvType>) -> Shape {
        let (rope_dim, pairing) = match &spec.position {
            Position::Rope(r) => (r.dim, r.pairing),
            Position::Learned { .. } => (0, RopePairing::Half),
        };
        Shape {
            d_model: spec.d_model,
            n_heads: spec.n_heads,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            d_ff: spec.d_ff,
            vocab: spec.vocab,
            norm: spec.norm,
            qk_norm: spec.qk_norm,
            ffn: spec.ffn,
            experts: spec.experts.as_ref().map(ExpertShape::of),
            attn_scale: spec.attn_scale,
            attn_softcap: spec.attn_softcap,
            embed_scale: spec.embed_scale,
            rope_dim,
            pairing,
            window: spec.window.as_ref().map(|w| w.size),
            logit_softcap: spec.logit_softcap,
            act,
            kv: kv.into(),
            exact: None,
        }
    }

    /// h_a·d_h.
    pub fn q_dim(&self) -> usize {
        self.n_heads * self.head_dim
    }
    /// h_kv·d_h.
    pub fn kv_dim(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }
    /// Weights of the norms of queries and of keys; zeros without such norms.
    pub fn qk_norm_widths(&self) -> [usize; 2] {
        self.qk_norm.map_or([0; 2], |norm| norm.widths(self.head_dim, [self.n_heads, self.n_kv_heads]))
    }
    /// Width of q|k|v.
    pub fn qkv_dim(&self) -> usize {
        self.q_dim() + 2 * self.kv_dim()
    }
    /// Bytes of an element of normed activations, queries and attention's output.
    pub fn act_bytes(&self) -> usize {
        if self.exact.is_some() { 4 } else { 2 }
    }
    /// The type of normed activations: `f16`, `bf16` or `f32`.
    pub fn act_name(&self) -> &'static str {
        if self.exact.is_some() { "f32" } else { self.act.name() }
    }
    /// Bytes of one page of one layer.
    pub fn page_bytes(&self) -> usize {
        self.n_kv_heads * 2 * self.kv.part_bytes(self.head_dim)
    }
}

/// The sizes of the experts of a model that an accelerator computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertShape {
    /// E, experts of a layer.
    pub count: usize,
    /// k, experts that a row uses.
    pub used: usize,
    /// Width of an expert.
    pub d_ff: usize,
    /// Width of the expert of all rows; 0 without one.
    pub shared: usize,
    /// The factors of the chosen experts' outputs.
    pub weights: RouterWeights,
    /// Whether the host computes some experts of a layer, whose rows come here.
    pub divided: bool,
}

impl ExpertShape {
    /// The same, divided between the sides.
    pub fn divided(self) -> ExpertShape {
        ExpertShape { divided: true, ..self }
    }

    /// Bytes of what the host's experts give to a row: their sum, f32 `[d]`. With exact results, f32 `[k][d]`, zeros for choices of the
    /// device's: they are added in the order of the row's choices, whoever computed them.
    pub fn share_bytes(&self, shape: &Shape) -> usize {
        let rows = if shape.exact.is_some() { self.used } else { 1 };
        4 * rows * shape.d_model
    }

    /// The sizes.
    pub fn of(experts: &Experts) -> ExpertShape {
        let Experts { count, used, d_ff, shared, weights, .. } = *experts;
        ExpertShape { count, used, d_ff, shared: shared.unwrap_or(0), weights, divided: false }
    }
}

/// Upper bounds of all steps, from which memory is sized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Rows of a step.
    pub rows: usize,
    /// Rows that want logits in a step.
    pub logit_rows: usize,
    /// Sequences in a step.
    pub sequences: usize,
    /// Pages of a sequence on the device.
    pub pages_per_sequence: usize,
}
