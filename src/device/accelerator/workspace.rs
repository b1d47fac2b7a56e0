//! Activations: the buffers that sublayers read and write.

use super::exchange::PartialRows;
use super::shape::{Limits, Shape};
use crate::device::runtime::DevPtr;

/// Addresses of the activations of up to [`Limits::rows`] rows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Workspace {
    /// Residual stream, f32 `[rows][d]`.
    pub hidden: DevPtr,
    /// To be added to it, f32 `[rows][d]`.
    pub delta: DevPtr,
    /// Normed, act `[rows][d]`.
    pub x: DevPtr,
    /// f32 `[rows][qkv_dim]`.
    pub qkv: DevPtr,
    /// kv `[rows][q_dim]`.
    pub q: DevPtr,
    /// Attention's output, act `[rows][q_dim]`.
    pub attn: DevPtr,
    /// f32 `[rows][2 · d_ff]`, where gate and up cannot be fused; NULL if never.
    pub gate_up: DevPtr,
    /// act `[rows][d_ff]`.
    pub act: DevPtr,
    /// act `[logit_rows][d]`.
    pub head_x: DevPtr,
    /// f32 `[logit_rows][V]`.
    pub logits: DevPtr,
    /// u32 `[logit_rows]`.
    pub argmax: DevPtr,
    /// Partial attention of the rows with [`Attend::From`](super::Attend::From), in order; NULL where none ever has.
    pub partial: PartialRows,
    /// [`Accelerator::scratch_bytes`](super::Accelerator::scratch_bytes) of working memory, zeroed once.
    pub scratch: DevPtr,
}

/// Bytes of one row of each buffer of a [`Workspace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowBytes {
    /// Of [`Workspace::hidden`].
    pub hidden: usize,
    /// Of [`Workspace::delta`].
    pub delta: usize,
    /// Of [`Workspace::x`].
    pub x: usize,
    /// Of [`Workspace::qkv`].
    pub qkv: usize,
    /// Of [`Workspace::q`].
    pub q: usize,
    /// Of [`Workspace::attn`].
    pub attn: usize,
    /// Of [`Workspace::gate_up`].
    pub gate_up: usize,
    /// Of [`Workspace::act`].
    pub act: usize,
    /// Of [`Workspace::head_x`].
    pub head_x: usize,
    /// Of [`Workspace::logits`].
    pub logits: usize,
    /// Of [`Workspace::argmax`].
    pub argmax: usize,
}

impl RowBytes {
    /// For a model.
    pub fn new(shape: &Shape) -> RowBytes {
        const F32: usize = 4;
        const HALF: usize = 2;
        RowBytes {
            hidden: F32 * shape.d_model,
            delta: F32 * shape.d_model,
            x: HALF * shape.d_model,
            qkv: F32 * shape.qkv_dim(),
            q: HALF * shape.q_dim(),
            attn: HALF * shape.q_dim(),
            gate_up: F32 * 2 * shape.d_ff,
            act: HALF * shape.d_ff,
            head_x: HALF * shape.d_model,
            logits: F32 * shape.vocab,
            argmax: size_of::<u32>(),
        }
    }
}

impl Workspace {
    /// Bytes of the buffers of one without partial attention, in the order of the fields: for steps within `limits`,
    /// with [`Workspace::gate_up`] only if `separate_gate_up`, and with `scratch` bytes of working memory.
    pub fn sizes(shape: &Shape, limits: &Limits, separate_gate_up: bool, scratch: usize) -> [usize; 12] {
        let (row, rows, logit_rows) = (RowBytes::new(shape), limits.rows, limits.logit_rows);
        [
            rows * row.hidden,
            rows * row.delta,
            rows * row.x,
            rows * row.qkv,
            rows * row.q,
            rows * row.attn,
            if separate_gate_up { rows * row.gate_up } else { 0 },
            rows * row.act,
            logit_rows * row.head_x,
            logit_rows * row.logits,
            logit_rows * row.argmax,
            scratch,
        ]
    }

    /// The workspace whose buffers, of [`Workspace::sizes`], lie at these addresses (NULL where the size is zero).
    pub fn at(buffers: [DevPtr; 12]) -> Workspace {
        let [hidden, delta, x, qkv, q, attn, gate_up, act, head_x, logits, argmax, scratch] = buffers;
        let partial = PartialRows::default();
        Workspace { hidden, delta, x, qkv, q, attn, gate_up, act, head_x, logits, argmax, partial, scratch }
    }

    /// Row `row` and those behind it. Of what has a row for every row of the step: logits, partial attention and
    /// scratch stay where they are.
    pub fn from_row(&self, shape: &Shape, row: usize) -> Workspace {
        let bytes = RowBytes::new(shape);
        let at = |p: DevPtr, row_bytes: usize| if p.is_null() { p } else { p.add(row * row_bytes) };
        Workspace {
            hidden: at(self.hidden, bytes.hidden),
            delta: at(self.delta, bytes.delta),
            x: at(self.x, bytes.x),
            qkv: at(self.qkv, bytes.qkv),
            q: at(self.q, bytes.q),
            attn: at(self.attn, bytes.attn),
            gate_up: at(self.gate_up, bytes.gate_up),
            act: at(self.act, bytes.act),
            ..*self
        }
    }
}

/// What is still to be added to the residual stream before a norm: the last sublayer's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residual {
    /// Nothing (before the first sublayer).
    None,
    /// `delta`.
    Delta,
    /// `delta`, normed with these weights (f32 `[d]`) first.
    Normed(DevPtr),
}

impl Residual {
    /// `delta`, through `post` if that is not NULL.
    pub fn after(post: DevPtr) -> Residual {
        if post.is_null() { Residual::Delta } else { Residual::Normed(post) }
    }

    /// What is added, and the weights that norm it first: `delta` itself, and NULL where there is nothing.
    pub fn operands(self, delta: DevPtr) -> (DevPtr, DevPtr) {
        match self {
            Residual::None => (DevPtr::NULL, DevPtr::NULL),
            Residual::Delta => (delta, DevPtr::NULL),
            Residual::Normed(w) => (delta, w),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Half;
    use super::*;
    use crate::model::spec::{Ffn, Norm, RopePairing};

    fn shape() -> Shape {
        Shape {
            d_model: 24,
            n_heads: 6,
            n_kv_heads: 2,
            head_dim: 10,
            d_ff: 56,
            vocab: 131,
            norm: Norm::Rms { eps: 1e-5 },
            ffn: Ffn::SwiGlu,
            attn_scale: 1.0,
            embed_scale: 1.0,
            rope_dim: 10,
            pairing: RopePairing::Half,
            window: None,
            logit_softcap: None,
            act: Half::F16,
            kv: Half::BF16,
        }
    }

    /// Buffers one behind the other: the row behind the last is the first of the next buffer.
    #[test]
    fn rows_fill_the_buffers_that_are_sized_for_them() {
        let shape = shape();
        let limits = Limits { rows: 7, logit_rows: 3, sequences: 3, pages_per_sequence: 1 };
        let sizes = Workspace::sizes(&shape, &limits, true, 5);
        let mut end = 1 << 20;
        let ws = Workspace::at(sizes.map(|bytes| {
            end += bytes as u64;
            DevPtr(end - bytes as u64)
        }));
        let next = ws.from_row(&shape, limits.rows);
        let behind = [next.hidden, next.delta, next.x, next.qkv, next.q, next.attn, next.gate_up, next.act];
        assert_eq!(behind, [ws.delta, ws.x, ws.qkv, ws.q, ws.attn, ws.gate_up, ws.act, ws.head_x]);
        assert_eq!(sizes[8..], [3 * 24 * 2, 3 * 131 * 4, 3 * 4, 5]);
        assert_eq!((next.head_x, next.logits, next.argmax), (ws.head_x, ws.logits, ws.argmax));
        assert_eq!(next.scratch, ws.scratch);
    }

    #[test]
    fn what_is_absent_stays_absent() {
        let none = Workspace::default();
        assert_eq!(none.from_row(&shape(), 3), none);
    }
}
