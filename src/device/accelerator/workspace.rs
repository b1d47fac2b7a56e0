//! Activations: the buffers that sublayers read and write.

use std::ops::Range;

use super::Accelerator;
use super::experts::ExpertRows;
use super::shape::{Limits, Shape};
use super::top::TOP_BYTES;
use super::weights::LinearWeight;
use crate::device::runtime::DevPtr;

/// Addresses of the activations of up to [`Limits::rows`] rows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Workspace {
    /// The limits that it was sized for: it holds every step that was prepared within them.
    pub limits: Limits,
    /// Residual stream, f32 `[rows][d]`.
    pub hidden: DevPtr,
    /// Output of the last sublayer, still to be added to `hidden`, f32 `[rows][d]`.
    pub delta: DevPtr,
    /// Normed, act `[rows][d]`.
    pub x: DevPtr,
    /// q|k|v, f32 `[rows][qkv_dim]`, with bias, norm and RoPE applied after [`RowOp::Project`](super::RowOp::Project).
    pub qkv: DevPtr,
    /// Queries as attention reads them, kv `[rows][q_dim]`.
    pub q: DevPtr,
    /// Attention's output, act `[rows][q_dim]`.
    pub attn: DevPtr,
    /// f32 `[rows][2 · d_ff]`, where gate and up cannot be fused; NULL if never.
    pub gate_up: DevPtr,
    /// act `[rows][d_ff]`.
    pub act: DevPtr,
    /// Rows of experts ([`ExpertRows`]); NULL for a model without.
    pub experts: DevPtr,
    /// act `[logit_rows][d]`.
    pub head_x: DevPtr,
    /// f32 `[logit_rows][V]`.
    pub logits: DevPtr,
    /// u32 `[logit_rows]`, then log Σ e^x of the same rows, f32 `[logit_rows]`: [`Workspace::picked`].
    pub argmax: DevPtr,
    /// The likeliest tokens of the rows that want logits, `[logit_rows]` times [`TOP_BYTES`], after [`Accelerator::top`].
    pub top: DevPtr,
    /// Partial attention of the rows with [`Attend::From`](super::Attend::From) or [`Attend::UpTo`](super::Attend::UpTo),
    /// in order; NULL if no row ever has.
    pub partial: PartialRows,
    /// [`Accelerator::scratch_bytes`] of working memory, zeroed once.
    pub scratch: DevPtr,
}

/// Partial attention of some rows (f32, natural-log units): see [`crate::simd::attention::Partial`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PartialRows {
    /// `[rows][n_heads]`: largest scores.
    pub m: DevPtr,
    /// `[rows][n_heads]`: sums of exponentials.
    pub s: DevPtr,
    /// `[rows][q_dim]`: weighted values.
    pub o: DevPtr,
}

impl PartialRows {
    /// The partial rows from place `place` on.
    pub fn at_place(&self, shape: &Shape, place: usize) -> PartialRows {
        let row = RowBytes::new(shape);
        PartialRows {
            m: self.m.add(place * row.partial_ms),
            s: self.s.add(place * row.partial_ms),
            o: self.o.add(place * row.partial_o),
        }
    }
}

/// Bytes of one row of each buffer of a [`Workspace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowBytes {
    /// Bytes of a row of [`Workspace::hidden`].
    pub hidden: usize,
    /// Bytes of a row of [`Workspace::delta`].
    pub delta: usize,
    /// Bytes of a row of [`Workspace::x`].
    pub x: usize,
    /// Bytes of a row of [`Workspace::qkv`].
    pub qkv: usize,
    /// Bytes of a row of [`Workspace::q`].
    pub q: usize,
    /// Bytes of a row of [`Workspace::attn`].
    pub attn: usize,
    /// Bytes of a row of [`Workspace::gate_up`].
    pub gate_up: usize,
    /// Bytes of a row of [`Workspace::act`].
    pub act: usize,
    /// Bytes of a row of [`Workspace::head_x`].
    pub head_x: usize,
    /// Bytes of a row of [`Workspace::logits`].
    pub logits: usize,
    /// Bytes of a row of the tokens in [`Workspace::argmax`], and of the sums that follow them.
    pub argmax: usize,
    /// Bytes of a row of `m`, and of `s`, of [`Workspace::partial`].
    pub partial_ms: usize,
    /// Bytes of a row of its `o`.
    pub partial_o: usize,
}

impl RowBytes {
    /// The bytes per row for a model.
    pub fn new(shape: &Shape) -> RowBytes {
        const F32: usize = 4;
        let act = shape.act_bytes();
        RowBytes {
            hidden: F32 * shape.d_model,
            delta: F32 * shape.d_model,
            x: act * shape.d_model,
            qkv: F32 * shape.qkv_dim(),
            q: act * shape.q_dim(),
            attn: act * shape.q_dim(),
            gate_up: F32 * 2 * shape.d_ff,
            act: act * shape.d_ff,
            head_x: act * shape.d_model,
            logits: F32 * shape.vocab,
            argmax: size_of::<u32>(),
            partial_ms: F32 * shape.n_heads,
            partial_o: F32 * shape.q_dim(),
        }
    }
}

/// Buffers of a [`Workspace`].
const BUFFERS: usize = 17;

/// Alignment of the buffers in bytes.
const ALIGN: usize = 256;

/// Bytes from an address on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSpan {
    /// Address of the first byte.
    pub ptr: DevPtr,
    /// Number of bytes.
    pub bytes: usize,
}

impl Workspace {
    /// Bytes of the buffers, in the order of the fields, for steps within `limits`: with [`Workspace::gate_up`] only if
    /// `separate_gate_up`, with partial attention only if `partial`, and with `scratch` bytes of working memory.
    pub fn sizes(
        shape: &Shape,
        limits: &Limits,
        separate_gate_up: bool,
        partial: bool,
        scratch: usize,
    ) -> [usize; BUFFERS] {
        let (row, rows, logit_rows) = (RowBytes::new(shape), limits.rows, limits.logit_rows);
        let partial_rows = if partial { rows } else { 0 };
        [
            rows * row.hidden,
            rows * row.delta,
            rows * row.x,
            rows * row.qkv,
            rows * row.q,
            rows * row.attn,
            if separate_gate_up { rows * row.gate_up } else { 0 },
            rows * row.act,
            ExpertRows::bytes(shape, rows),
            logit_rows * row.head_x,
            logit_rows * row.logits,
            2 * logit_rows * row.argmax,
            logit_rows * TOP_BYTES,
            partial_rows * row.partial_ms,
            partial_rows * row.partial_ms,
            partial_rows * row.partial_o,
            scratch,
        ]
    }

    /// The workspace whose buffers, of [`Workspace::sizes`], lie at these addresses (NULL where the size is zero).
    pub fn at(limits: Limits, buffers: [DevPtr; BUFFERS]) -> Workspace {
        let [
            hidden,
            delta,
            x,
            qkv,
            q,
            attn,
            gate_up,
            act,
            experts,
            head_x,
            logits,
            argmax,
            top,
            m,
            s,
            o,
            scratch,
        ] = buffers;
        let partial = PartialRows { m, s, o };
        Workspace {
            limits,
            hidden,
            delta,
            x,
            qkv,
            q,
            attn,
            gate_up,
            act,
            experts,
            head_x,
            logits,
            argmax,
            top,
            partial,
            scratch,
        }
    }

    /// Rows of the residual stream. They cross the link between layers on different sides, after [`RowOp::Fold`](super::RowOp::Fold)
    /// has added the residual.
    pub fn hidden_rows(&self, shape: &Shape, rows: &Range<usize>) -> RowSpan {
        span(self.hidden, RowBytes::new(shape).hidden, rows)
    }

    /// Rows of the last sublayer's output, still to be added to the residual stream.
    pub fn delta_rows(&self, shape: &Shape, rows: &Range<usize>) -> RowSpan {
        span(self.delta, RowBytes::new(shape).delta, rows)
    }

    /// Rows of q|k|v; rows that the host projected are uploaded here before [`RowOp::Append`](super::RowOp::Append).
    pub fn qkv_rows(&self, shape: &Shape, rows: &Range<usize>) -> RowSpan {
        span(self.qkv, RowBytes::new(shape).qkv, rows)
    }

    /// Rows of attention's output.
    pub fn attn_rows(&self, shape: &Shape, rows: &Range<usize>) -> RowSpan {
        span(self.attn, RowBytes::new(shape).attn, rows)
    }

    /// Rows of the activations between the matrices of the feed-forward.
    pub fn act_rows(&self, shape: &Shape, rows: &Range<usize>) -> RowSpan {
        span(self.act, RowBytes::new(shape).act, rows)
    }

    /// Rows that a norm has made: of a feed-forward of experts, their input.
    pub fn normed_rows(&self, shape: &Shape, rows: &Range<usize>) -> RowSpan {
        span(self.x, RowBytes::new(shape).x, rows)
    }

    /// Rows of experts from row `row` on; `None` for a model without.
    pub fn expert_rows(&self, shape: &Shape, row: usize) -> Option<ExpertRows> {
        ExpertRows::at(self.experts, shape, self.limits.rows, row)
    }

    /// Rows of logits, by their places among the rows that want them.
    pub fn logit_rows(&self, shape: &Shape, places: &Range<usize>) -> RowSpan {
        span(self.logits, RowBytes::new(shape).logits, places)
    }

    /// The results of [`Accelerator::top`] for the first `rows` rows that want logits.
    pub fn top_rows(&self, rows: usize) -> RowSpan {
        span(self.top, TOP_BYTES, &(0..rows))
    }

    /// Address of log Σ e^x for the row at `place` among the rows that want logits.
    pub fn logsumexp_at(&self, place: usize) -> DevPtr {
        self.argmax.add(4 * (self.limits.logit_rows + place))
    }

    /// The results of [`RowOp::Argmax`](super::RowOp::Argmax) for the first `rows` rows that want logits, as one span.
    pub fn picked(&self, rows: usize) -> RowSpan {
        RowSpan { ptr: self.argmax, bytes: 4 * (self.limits.logit_rows + rows) }
    }

    /// The likeliest tokens of rows, from the bytes of [`Workspace::picked`]. `None` for a row whose logits are NaN or
    /// infinite, or all minus infinity: such a row has no likeliest token.
    pub fn picked_tokens<'a>(&self, bytes: &'a [u8]) -> impl Iterator<Item = Option<u32>> + 'a {
        let (tokens, sums) = bytes.split_at(4 * self.limits.logit_rows);
        let word = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let rows = tokens.chunks_exact(4).zip(sums.chunks_exact(4));
        rows.map(move |(token, sum)| f32::from_bits(word(sum)).is_finite().then(|| word(token)))
    }

    /// The workspace of row `row` and the rows after it, of the same step. Buffers with a row for every row of the step
    /// advance; logits, partial attention and scratch stay, since a step has them once. For sub-batches, see
    /// [`SubBatches`].
    #[cfg(any(test, tandem_kernels))] // the launchers of kernels are its users
    pub(crate) fn at_row(&self, shape: &Shape, row: usize) -> Workspace {
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

fn span(base: DevPtr, row_bytes: usize, rows: &Range<usize>) -> RowSpan {
    RowSpan { ptr: base.add(rows.start * row_bytes), bytes: rows.len() * row_bytes }
}

/// Memory of an iteration's sub-batches. Each has its own limits, workspace and step lists, and no two overlap. It is
/// planned before anything is allocated, then laid out in one range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubBatches {
    parts: Vec<([usize; BUFFERS], usize, Limits)>,
}

/// The memory of one sub-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SubBatch {
    /// Its activations.
    pub ws: Workspace,
    /// Address at which its steps are prepared ([`Accelerator::prepare`], within [`Workspace::limits`]).
    pub lists: DevPtr,
}

impl SubBatches {
    /// Plans the memory of sub-batches within these limits, for a model with these matrices
    /// ([`Accelerator::scratch_bytes`]).
    pub fn plan(
        accel: &dyn Accelerator,
        shape: &Shape,
        limits: &[Limits],
        weights: &[LinearWeight],
        separate_gate_up: bool,
        partial: bool,
    ) -> SubBatches {
        let part = |limits: &Limits| {
            let scratch = accel.scratch_bytes(shape, limits, weights);
            let sizes = Workspace::sizes(shape, limits, separate_gate_up, partial, scratch);
            (sizes, accel.step_bytes(shape, limits), *limits)
        };
        SubBatches { parts: limits.iter().map(part).collect() }
    }

    /// Bytes of all sub-batches.
    pub fn bytes(&self) -> usize {
        let all = self.parts.iter().flat_map(|(sizes, lists, _)| sizes.iter().chain([lists]));
        all.map(|bytes| bytes.next_multiple_of(ALIGN)).sum()
    }

    /// Lays the sub-batches out in the [`SubBatches::bytes`] from `base` on, which must have been zeroed once.
    pub fn at(&self, base: DevPtr) -> Vec<SubBatch> {
        let mut next = base;
        let mut take = |bytes: usize| {
            let here = next;
            next = next.add(bytes.next_multiple_of(ALIGN));
            if bytes == 0 { DevPtr::NULL } else { here }
        };
        let part = |(sizes, lists, limits): &([usize; BUFFERS], usize, Limits)| SubBatch {
            ws: Workspace::at(*limits, sizes.map(&mut take)),
            lists: take(*lists),
        };
        self.parts.iter().map(part).collect()
    }
}

/// The last sublayer's output, which is still to be added to the residual stream before a norm.
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

    /// The addresses of the rows to add and of the weights that norm them first; NULL for either that is absent.
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
    use super::*;
    use crate::cache::KvType;
    use crate::device::accelerator::ExpertShape;
    use crate::model::{Ffn, Norm, RopePairing, RouterWeights};
    use crate::tensor::Half;

    const EXPERTS: ExpertShape =
        ExpertShape { count: 5, used: 2, d_ff: 32, shared: 16, weights: RouterWeights::OfAll, divided: true };

    fn shape() -> Shape {
        Shape {
            d_model: 24,
            n_heads: 6,
            n_kv_heads: 2,
            head_dim: 10,
            d_ff: 56,
            vocab: 131,
            norm: Norm::Rms { eps: 1e-5 },
            qk_norm: None,
            ffn: Ffn::SwiGlu,
            experts: Some(EXPERTS),
            attn_scale: 1.0,
            attn_softcap: None,
            embed_scale: 1.0,
            rope_dim: 10,
            pairing: RopePairing::Half,
            window: None,
            logit_softcap: None,
            act: Half::F16,
            kv: KvType::BF16,
            exact: None,
        }
    }

    const LIMITS: Limits = Limits { rows: 7, logit_rows: 3, sequences: 3, pages_per_sequence: 1 };

    /// Buffers follow one another: the row after the last one is the first row of the next buffer.
    #[test]
    fn rows_fill_the_buffers_that_are_sized_for_them() {
        let shape = shape();
        let sizes = Workspace::sizes(&shape, &LIMITS, true, true, 5);
        let mut end = 1 << 20;
        let ws = Workspace::at(
            LIMITS,
            sizes.map(|bytes| {
                end += bytes as u64;
                DevPtr(end - bytes as u64)
            }),
        );
        let next = ws.at_row(&shape, LIMITS.rows);
        let behind = [next.hidden, next.delta, next.x, next.qkv, next.q, next.attn, next.gate_up, next.act];
        assert_eq!(behind, [ws.delta, ws.x, ws.qkv, ws.q, ws.attn, ws.gate_up, ws.act, ws.experts]);
        // A token and the logarithm of a sum for each row of logits.
        assert_eq!(sizes[9..12], [3 * 24 * 2, 3 * 131 * 4, 2 * 3 * 4]);
        assert_eq!(sizes[12..], [3 * TOP_BYTES, 7 * 6 * 4, 7 * 6 * 4, 7 * 60 * 4, 5]);
        assert_eq!((next.experts, next.head_x), (ws.experts, ws.head_x));
        assert_eq!((next.logits, next.argmax), (ws.logits, ws.argmax));
        assert_eq!((next.partial, next.scratch), (ws.partial, ws.scratch));
        let rows = 2..5;
        let spans = [
            (ws.hidden_rows(&shape, &rows), ws.hidden, 24 * 4),
            (ws.delta_rows(&shape, &rows), ws.delta, 24 * 4),
            (ws.qkv_rows(&shape, &rows), ws.qkv, 100 * 4),
            (ws.attn_rows(&shape, &rows), ws.attn, 60 * 2),
            (ws.logit_rows(&shape, &rows), ws.logits, 131 * 4),
        ];
        for (span, base, row) in spans {
            assert_eq!(span, RowSpan { ptr: base.add(2 * row), bytes: 3 * row });
        }
    }

    /// Rows of experts: each buffer has its rows and no more, wherever one begins.
    #[test]
    fn rows_of_experts_are_apart() {
        let shape = shape();
        let ws = Workspace { limits: LIMITS, experts: DevPtr(1 << 20), ..Workspace::default() };
        let of = |row| {
            let r = ws.expert_rows(&shape, row).unwrap();
            [
                r.logits, r.gate, r.ids, r.weights, r.places, r.rows, r.groups, r.x, r.act, r.out, r.shared,
                r.share,
            ]
        };
        let (k, d) = (2, 24);
        let row = [
            5 * 4,
            4,
            k * 4,
            k * 4,
            k * 4,
            k * 4,
            2 * k * 16,
            k * d * 2,
            k * 32 * 2,
            k * d * 4,
            16 * 2,
            d * 4,
        ];
        let mut end = ws.experts;
        for ((first, third), bytes) in of(0).into_iter().zip(of(3)).zip(row) {
            assert!(
                first.0 >= end.0 && first.0 < end.0 + ALIGN as u64 && first.0.is_multiple_of(ALIGN as u64)
            );
            assert_eq!(third, first.add(3 * bytes));
            end = first.add(LIMITS.rows * bytes);
        }
        assert_eq!(
            Workspace::sizes(&shape, &LIMITS, false, false, 0)[8] as u64,
            end.0.next_multiple_of(256) - (1 << 20)
        );
        assert_eq!(ws.expert_rows(&Shape { experts: None, ..shape }, 0), None);
    }

    #[test]
    fn what_is_absent_stays_absent() {
        let none = Workspace::default();
        assert_eq!(none.at_row(&shape(), 3), none);
    }

    /// Every byte of every buffer of every sub-batch is used exactly once.
    #[test]
    fn sub_batches_share_nothing() {
        let shape = shape();
        let few = Limits { rows: 2, logit_rows: 1, ..LIMITS };
        let sizes = [LIMITS, few, LIMITS].map(|l| (Workspace::sizes(&shape, &l, false, true, 700), 900, l));
        let plan = SubBatches { parts: sizes.to_vec() };
        let base = DevPtr(1 << 20);
        let mut spans = Vec::new();
        for (b, (sizes, lists, limits)) in plan.at(base).iter().zip(&sizes) {
            assert_eq!(b.ws.limits, *limits);
            assert_eq!(b.ws.gate_up, DevPtr::NULL);
            let (ws, p) = (&b.ws, &b.ws.partial);
            let buffers = [
                ws.hidden, ws.delta, ws.x, ws.qkv, ws.q, ws.attn, ws.gate_up, ws.act, ws.experts, ws.head_x,
                ws.logits, ws.argmax, ws.top, p.m, p.s, p.o, ws.scratch,
            ];
            spans.extend(buffers.into_iter().zip(*sizes).filter(|(_, bytes)| *bytes > 0));
            spans.push((b.lists, *lists));
        }
        spans.sort();
        assert!(spans.iter().all(|(p, _)| p.0.is_multiple_of(ALIGN as u64)));
        assert!(spans.windows(2).all(|w| w[0].0.add(w[0].1) <= w[1].0), "{spans:?}");
        let (last, bytes) = spans[spans.len() - 1];
        assert_eq!(spans[0].0, base);
        assert!(last.add(bytes) <= base.add(plan.bytes()));
    }
}
