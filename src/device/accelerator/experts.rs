//! The rows that pass between the parts of a feed-forward of experts.
//!
//! ```text
//! ffn_up     norm ─► logits ─► the chosen and their weights ─► act of each choice        act of the shared expert
//! ffn_down                                                   └► Σ weight·(W·act)  (+ σ(gate)·W·act of the shared)
//! ```

use super::shape::{ExpertShape, Shape};
use crate::device::runtime::DevPtr;

/// Addresses of what passes between the kernels of experts, from one row of a step on. Rows of choices are k for each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRows {
    /// Logits of the router, f32 `[rows][E]`.
    pub logits: DevPtr,
    /// Logit of the shared expert's gate, f32 `[rows]`.
    pub gate: DevPtr,
    /// The chosen experts, u32 `[rows][k]`.
    pub ids: DevPtr,
    /// Their weights, f32 `[rows][k]`.
    pub weights: DevPtr,
    /// The place of each choice among those sorted by expert, u32 `[rows][k]`.
    pub places: DevPtr,
    /// The row of each place, u32 `[rows · k]`.
    pub rows: DevPtr,
    /// Which places are of one expert, four u32 each, `[rows · 2k]`.
    pub groups: DevPtr,
    /// Normed rows by place, act `[rows · k][d]`.
    pub x: DevPtr,
    /// Activations by place or choice, act `[rows · k][I]`.
    pub act: DevPtr,
    /// What the experts give, f32 `[rows · k][d]`.
    pub out: DevPtr,
    /// Activations of the shared expert, act `[rows][I of it]`.
    pub shared: DevPtr,
    /// What the host's experts give ([`ExpertShape::share_bytes`]), of layers whose experts are divided.
    pub share: DevPtr,
}

/// Buffers of [`ExpertRows`].
const BUFFERS: usize = 12;

/// Alignment of each buffer in bytes.
const ALIGN: usize = 256;

impl ExpertRows {
    /// Bytes of a row of each buffer, in the order of the fields.
    fn row_bytes(shape: &Shape, e: &ExpertShape) -> [usize; BUFFERS] {
        const WORD: usize = 4;
        // Of four words; for each choice no more than one that is not full, and for every four one that is.
        const GROUP: usize = 4 * WORD;
        let (act, k, d) = (shape.act_bytes(), e.used, shape.d_model);
        [
            WORD * e.count,
            WORD,
            WORD * k,
            WORD * k,
            WORD * k,
            WORD * k,
            2 * GROUP * k,
            act * k * d,
            act * k * e.d_ff,
            WORD * k * d,
            act * e.shared,
            if e.divided { e.share_bytes(shape) } else { 0 },
        ]
    }

    /// Bytes of all buffers for `rows` rows; 0 for a model without experts.
    pub fn bytes(shape: &Shape, rows: usize) -> usize {
        let Some(e) = &shape.experts else { return 0 };
        Self::row_bytes(shape, e).iter().map(|b| (rows * b).next_multiple_of(ALIGN)).sum()
    }

    /// The buffers from row `first` on, of those for `rows` rows that begin at `base`; `None` for a model without experts.
    pub fn at(base: DevPtr, shape: &Shape, rows: usize, first: usize) -> Option<ExpertRows> {
        let mut next = base;
        let [logits, gate, ids, weights, places, of_places, groups, x, act, out, shared, share] =
            Self::row_bytes(shape, shape.experts.as_ref()?).map(|bytes| {
                let here = next;
                next = next.add((rows * bytes).next_multiple_of(ALIGN));
                here.add(first * bytes)
            });
        Some(ExpertRows {
            logits,
            gate,
            ids,
            weights,
            places,
            rows: of_places,
            groups,
            x,
            act,
            out,
            shared,
            share,
        })
    }
}
