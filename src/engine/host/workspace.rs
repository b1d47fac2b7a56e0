//! Activations in host memory.

use super::expert_rows::ExpertRows;
use super::row_buffer::RowBuffer;
use crate::model::ModelSpec;
use crate::simd::Isa;
use crate::simd::linear::{Acts, Mode};
use crate::tensor::DType;

/// The activations of all rows that are in flight on the CPU; sub-batches have disjoint rows of it.
pub struct HostWorkspace {
    /// Residual stream, `[rows][d]`.
    pub hidden: RowBuffer,
    /// Output of the last sublayer, still to be added to `hidden`, `[rows][d]`.
    pub delta: RowBuffer,
    /// Queries, norms and RoPE applied, `[rows][q_dim]`.
    pub q: RowBuffer,
    /// Keys, norms and RoPE applied, `[rows][kv_dim]`.
    pub k: RowBuffer,
    /// Values, `[rows][kv_dim]`.
    pub v: RowBuffer,
    /// Attention's output, `[rows][q_dim]`.
    pub attn: RowBuffer,
    /// The dense feed-forward's activation, `[rows][d_ff]`.
    pub act: RowBuffer,
    /// The factor of the activation in a gated feed-forward, `[rows][d_ff]`.
    pub up: RowBuffer,
    /// `[rows that want them][V]`.
    pub logits: RowBuffer,
    /// Activations of experts, if the model has some.
    pub(super) experts: Option<ExpertRows>,
    /// Inputs of the running operation's matrices; they do not outlive the operation.
    pub(super) acts: Acts,
}

impl HostWorkspace {
    /// A workspace without room for rows.
    pub fn new(spec: &ModelSpec) -> HostWorkspace {
        let [hidden, delta, q, k, v, attn, act, up] = widths(spec).map(RowBuffer::new);
        let logits = RowBuffer::new(spec.vocab);
        let experts = ExpertRows::new(spec);
        HostWorkspace { hidden, delta, q, k, v, attn, act, up, logits, experts, acts: Acts::default() }
    }

    /// Makes room for rows `0..rows`, and logits of `logits` rows; keeps existing contents.
    pub fn reserve(&mut self, rows: usize, logits: usize) {
        let buffers = [
            &mut self.hidden,
            &mut self.delta,
            &mut self.q,
            &mut self.k,
            &mut self.v,
            &mut self.attn,
            &mut self.act,
            &mut self.up,
        ];
        buffers.into_iter().for_each(|b| b.reserve(rows));
        self.logits.reserve(logits);
        if let Some(experts) = &mut self.experts {
            experts.reserve(rows);
        }
    }

    /// The chosen experts of `rows`, k each, of a model with experts.
    pub fn chosen(&self, rows: std::ops::Range<usize>) -> &[u32] {
        self.experts.as_ref().expect("a workspace of a model with experts").ids(rows)
    }

    /// The chosen experts of `rows` and their weights, k each, of a model with experts: for choices that were made elsewhere.
    pub(in crate::engine) fn choices_mut(
        &mut self,
        rows: std::ops::Range<usize>,
    ) -> (&mut [u32], &mut [f32]) {
        self.experts.as_mut().expect("a workspace of a model with experts").choices_mut(rows)
    }

    /// Bytes of the inputs of experts in steps of up to `rows` rows; `types`: those of the first and of the second matrices.
    pub(in crate::engine) fn expert_inputs_bytes(
        spec: &ModelSpec,
        rows: usize,
        types: [&[DType]; 2],
        isa: Isa,
        mode: Mode,
    ) -> usize {
        ExpertRows::inputs_bytes(spec, rows, types, isa, mode)
    }

    /// Bytes of a workspace with room for `rows` rows and logits of `logits` rows, without [`HostWorkspace::acts`].
    pub(in crate::engine) fn bytes(spec: &ModelSpec, rows: usize, logits: usize) -> usize {
        let floats = rows * widths(spec).iter().sum::<usize>() + logits * spec.vocab;
        size_of::<f32>() * floats + ExpertRows::bytes(spec, rows)
    }
}

/// Elements of a row of hidden, delta, q, k, v, attn, act, up.
fn widths(spec: &ModelSpec) -> [usize; 8] {
    let (d, qd, kvd) = (spec.d_model, spec.q_dim(), spec.kv_dim());
    let ff = if spec.has_dense_ffn() { spec.d_ff } else { 0 };
    [d, d, qd, kvd, kvd, qd, ff, if spec.gated() { ff } else { 0 }]
}
