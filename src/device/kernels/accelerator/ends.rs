//! Both ends of the model: embedding, and the head with its reductions.

use std::ops::Range;

use super::super::elementwise::{
    self, Embed, LogitsReduce, NormRows, Positions, TopK, logits_reduce, logits_top_k, norm, softcap,
};
use super::super::product::{Epilogue, ProductArgs, product};
use super::super::quant::{self, GatherArgs, PackedLayout};
use super::lists::{linear_scratch, lists};
use crate::Result;
use crate::device::accelerator::{
    EmbedWeight, LinearWeight, NormWeight, Residual, RowBytes, Shape, StepContext, Workspace,
};
use crate::device::runtime::{DevPtr, Lane, Runtime};

/// See [`RowOp::Embed`](crate::device::accelerator::RowOp::Embed).
pub(super) fn embed(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    weight: &EmbedWeight,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let (lists, d) = (lists(cx), cx.shape.d_model);
    let hidden = cx.ws.at_row(cx.shape, rows.start).hidden;
    let layout = PackedLayout::new(weight.dtype, cx.shape.vocab, d).filter(|_| weight.packed);
    if let Some(layout) = layout {
        let args = GatherArgs {
            layout,
            w: weight.table,
            row_ids: lists.tokens.add(rows.start * 4),
            y: hidden,
            ldy: d,
            count: rows.len(),
            scale: cx.shape.embed_scale,
        };
        return quant::gather(rt, cx.lane, &args);
    }
    let positions = (!weight.positions.is_null()).then(|| Positions {
        table: weight.positions,
        dtype: weight.positions_dtype,
        n: weight.n_positions,
        offset: weight.position_offset,
        row_pos: lists.row_pos.add(rows.start * 4),
    });
    let args = Embed {
        tokens: lists.tokens.add(rows.start * 4),
        table: weight.table,
        dtype: weight.dtype,
        vocab: cx.shape.vocab,
        scale: cx.shape.embed_scale,
        positions,
        hidden,
        rows: rows.len(),
        d,
    };
    elementwise::embed(rt, cx.lane, &args)
}

/// See [`RowOp::Logits`](crate::device::accelerator::RowOp::Logits).
pub(super) fn logits(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    weight: NormWeight,
    head: &LinearWeight,
    residual: Residual,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let (ws, shape, lists) = (cx.ws, cx.shape, lists(cx));
    let (delta, post) = residual.operands(ws.delta);
    let places = logit_places(cx, &rows);
    let (d, rows, first) = (shape.d_model, places.len(), places.start);
    let head_x = ws.head_x.add(first * RowBytes::new(shape).head_x);
    let logits = ws.logit_rows(shape, &places).ptr;
    let args = NormRows {
        norm: shape.norm,
        hidden: ws.hidden,
        delta,
        delta_bias: DevPtr::NULL,
        post,
        weight,
        sum: DevPtr::NULL,
        x: head_x,
        act: shape.act,
        row_list: lists.logit_rows.add(4 * first),
        rows,
        d,
        ld_delta: d,
        ld_x: d,
    };
    norm(rt, cx.lane, &args)?;
    let args = ProductArgs {
        w: head.into(),
        act: shape.act,
        x: head_x,
        ldx: d,
        y: logits,
        ldy: shape.vocab,
        m: rows,
        epilogue: Epilogue::F32,
        scratch: linear_scratch(cx),
    };
    product(rt, cx.lane, &args)?;
    match shape.logit_softcap {
        Some(cap) => softcap(rt, cx.lane, logits, cap, rows, shape.vocab, shape.vocab),
        None => Ok(()),
    }
}

/// Places of the logits of some rows. If these are all rows of a step that is launched for more rows, the places of the
/// padding rows too.
fn logit_places(cx: &StepContext<'_>, rows: &Range<usize>) -> Range<usize> {
    match cx.step.lists.is_all(rows) {
        true => 0..lists(cx).launch_logits,
        false => cx.step.lists.logits_in(rows),
    }
}

/// See [`RowOp::Argmax`](crate::device::accelerator::RowOp::Argmax).
pub(super) fn argmax(rt: &dyn Runtime, cx: &StepContext<'_>, rows: &Range<usize>) -> Result<()> {
    cx.check(rows)?;
    let (ws, lists) = (cx.ws, lists(cx));
    let places = logit_places(cx, rows);
    let args = LogitsReduce {
        logits: ws.logit_rows(cx.shape, &places).ptr,
        workspace: ws.scratch.add(lists.scratch.logits),
        indices: ws.argmax.add(places.start * RowBytes::new(cx.shape).argmax),
        values: DevPtr::NULL,
        logsumexp: ws.logsumexp_at(places.start),
        rows: places.len(),
        vocab: cx.shape.vocab,
        ld: cx.shape.vocab,
        k: 1,
    };
    logits_reduce(rt, cx.lane, &args)
}

/// See [`Accelerator::top`](crate::device::accelerator::Accelerator::top).
pub(super) fn top(
    rt: &dyn Runtime,
    lane: Lane,
    shape: &Shape,
    ws: &Workspace,
    factors: &[f32],
) -> Result<()> {
    let args = TopK { logits: ws.logits, out: ws.top, factors, vocab: shape.vocab, ld: shape.vocab };
    logits_top_k(rt, lane, &args)
}
