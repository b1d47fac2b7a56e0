//! Attention over pages, and merging it with a partial result from another device.

use std::ops::Range;

use super::super::attention::{self, DecodeAttention, MergeAttention, PrefillAttention};
use super::lists::{Lists, lists};
use super::scratch::attention_shape;
use super::uses::{Use, declare};
use crate::Result;
use crate::device::accelerator::{LayerWeights, PartialRows, StepContext};
use crate::device::runtime::{DevPtr, Runtime};

/// See [`RowOp::Attend`](crate::device::accelerator::RowOp::Attend).
pub(super) fn attend(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    kv: DevPtr,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let window = cx.shape.window.map(|w| w as u32).filter(|_| layer.windowed);
    declare(rt, cx, kv, rows, Use::Attend(window))?;
    for part in &lists(cx).parts[cx.step.lists.parts_of(rows)?] {
        let work = part.window.filter(|_| window.is_some()).unwrap_or(part.full);
        attend_part(rt, cx, (kv, layer.tables.sinks), work, window)?;
    }
    Ok(())
}

/// Attention of the rows in one part of the step.
fn attend_part(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    (kv, sinks): (DevPtr, DevPtr),
    work: Lists,
    window: Option<u32>,
) -> Result<()> {
    let (ws, step) = (cx.ws, lists(cx));
    let shape = attention_shape(cx.shape);
    let decode = DecodeAttention {
        q: ws.q,
        kv,
        page_table: step.page_table,
        items: work.decode.items,
        n_items: work.decode.n,
        max_items: work.decode.max,
        sinks,
        out: ws.attn,
        partial: ws.partial,
        workspace: step.scratch.attention(ws.scratch, &shape),
    };
    attention::decode_attention(rt, cx.lane, &shape, &decode)?;
    let prefill = PrefillAttention {
        kernel: step.prefill,
        q: ws.q,
        kv,
        n_pages: step.n_pages,
        page_table: step.page_table,
        items: work.prefill.items,
        n_items: work.prefill.n,
        max_items: work.prefill.max,
        window,
        sinks,
        out: ws.attn,
        partial: ws.partial,
    };
    attention::prefill_attention(rt, cx.lane, &shape, &prefill)
}

/// See [`RowOp::Merge`](crate::device::accelerator::RowOp::Merge).
pub(super) fn merge(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    other: &PartialRows,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let places = cx.step.lists.partial_in(rows);
    if places.is_empty() {
        return Ok(());
    }
    let lists = lists(cx);
    let args = MergeAttention {
        here: cx.ws.partial.at_place(cx.shape, places.start),
        elsewhere: other.at_place(cx.shape, places.start),
        rows: lists.partial_rows.add(4 * places.start),
        n_rows: lists.counts.add(4 * (places.len() - 1)),
        max_rows: places.len(),
        sinks: layer.tables.sinks,
        out: cx.ws.attn,
    };
    attention::merge_attention(rt, cx.lane, &attention_shape(cx.shape), &args)
}
