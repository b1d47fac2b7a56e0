//! Experts on an accelerator: their sizes, their weights, and the rows that pass between the parts of their feed-forward.
//!
//! ```text
//! ffn_up     norm ─► logits ─► the chosen and their weights ─► act of each choice        act of the shared expert
//! ffn_down                                                   └► Σ weight·(W·act)  (+ σ(gate)·W·act of the shared)
//! ```
//! The matrices of all experts of a layer have one type, and lie one after the other at equal distances.

use super::shape::Shape;
use super::weights::{FfnWeights, LinearWeight, UpWeight};
use crate::device::runtime::DevPtr;
use crate::model::{Experts, RouterWeights};

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
}

impl ExpertShape {
    /// The sizes; `None` if no accelerator computes such experts.
    pub fn of(experts: &Experts) -> Option<ExpertShape> {
        let Experts { count, used, d_ff, shared, weights, .. } = *experts;
        experts.on_devices().then_some(ExpertShape {
            count,
            used,
            d_ff,
            shared: shared.unwrap_or(0),
            weights,
        })
    }
}

/// The feed-forward of a layer of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertWeights {
    /// f32 `[E][d]`.
    pub router: DevPtr,
    /// Gate and up of expert 0.
    pub up: UpWeight,
    /// Bytes from an expert's gate and up to the next one's.
    pub up_stride: usize,
    /// Down of expert 0.
    pub down: LinearWeight,
    /// Bytes from an expert's down to the next one's.
    pub down_stride: usize,
    /// The expert of all rows, and the f32 `[d]` of its gate.
    pub shared: Option<(FfnWeights, DevPtr)>,
}

impl ExpertWeights {
    /// The matrices of expert `e`.
    pub fn expert(&self, e: usize) -> FfnWeights {
        let at = |w: &LinearWeight, stride: usize| LinearWeight { ptr: w.ptr.add(e * stride), ..*w };
        let up = match &self.up {
            UpWeight::GateUp(w) => UpWeight::GateUp(at(w, self.up_stride)),
            UpWeight::Plain(w) => UpWeight::Plain(at(w, self.up_stride)),
            UpWeight::Separate(gate, up) => {
                UpWeight::Separate(at(gate, self.up_stride), at(up, self.up_stride))
            }
        };
        FfnWeights { up, down: at(&self.down, self.down_stride) }
    }
}

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
}

/// Buffers of [`ExpertRows`].
const BUFFERS: usize = 11;

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
        let [logits, gate, ids, weights, places, of_places, groups, x, act, out, shared] =
            Self::row_bytes(shape, shape.experts.as_ref()?).map(|bytes| {
                let here = next;
                next = next.add((rows * bytes).next_multiple_of(ALIGN));
                here.add(first * bytes)
            });
        Some(ExpertRows { logits, gate, ids, weights, places, rows: of_places, groups, x, act, out, shared })
    }
}
