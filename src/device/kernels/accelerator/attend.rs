//! Attention over pages, and its merging with a part from elsewhere.

use super::super::attention::{self, DecodeAttention, MergeAttention, PrefillAttention};
use super::scratch::{attention_shape, lists};
use super::step::Lists;
use crate::Result;
use crate::device::accelerator::{Context, LayerWeights, PartialRows};
use crate::device::runtime::{DevPtr, Runtime};

/// See [`Accelerator::attend`](crate::device::accelerator::Accelerator::attend).
pub(super) fn attend(rt: &dyn Runtime, cx: &Context<'_>, layer: &LayerWeights, kv: DevPtr) -> Result<()> {
    let (ws, step) = (cx.ws, lists(cx));
    let (work, window): (Lists, Option<u32>) = match (layer.windowed, step.window) {
        (true, Some(lists)) => (lists, cx.shape.window.map(|w| w as u32)),
        _ => (step.full, None),
    };
    let shape = attention_shape(cx.shape);
    let decode = DecodeAttention {
        q: ws.q,
        kv,
        page_table: step.page_table,
        items: work.decode.items,
        n_items: work.decode.n,
        max_items: work.decode.max,
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
        out: ws.attn,
        partial: ws.partial,
    };
    attention::prefill_attention(rt, cx.lane, &shape, &prefill)
}

/// See [`Accelerator::merge`](crate::device::accelerator::Accelerator::merge).
pub(super) fn merge(rt: &dyn Runtime, cx: &Context<'_>, other: &PartialRows) -> Result<()> {
    let lists = lists(cx);
    let args = MergeAttention {
        here: cx.ws.partial,
        elsewhere: *other,
        rows: lists.partial_rows,
        n_rows: lists.n_partial,
        max_rows: lists.max_partial,
        out: cx.ws.attn,
    };
    attention::merge_attention(rt, cx.lane, &attention_shape(cx.shape), &args)
}
