//! The first half of attention's sublayer: norm, projections, RoPE, append to the pages, publication in the mailbox.
//!
//! One kernel (`cuda/rope_append.cu`) does everything after the projections. [`qkv`] launches it once with all of its
//! outputs. [`project`] and [`append`] launch it once each and pass the finished rows between them; these are the f32
//! values before rounding, so both ways give the same bits.

use std::ops::Range;

use super::super::elementwise::{NormRows, PublishRows, RopeAppend, norm, rope_append};
use super::super::exchange::{self, PublishSource, publish_rows};
use super::super::product::{Epilogue, ProductArgs, product};
use super::lists::{linear_scratch, lists};
use super::uses::{Use, declare};
use crate::device::accelerator::{
    LayerWeights, Mailbox, NormWeight, Publish, Published, Residual, StepContext,
};
use crate::device::runtime::{DevPtr, Runtime};
use crate::model::{QkNorm, RopePairing};
use crate::{Error, Result};

/// hidden += residual, x = norm(hidden), or hidden itself without a norm, for `rows`.
pub(super) fn norm_rows(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    weight: NormWeight,
    residual: Residual,
    rows: &Range<usize>,
) -> Result<()> {
    let (ws, d) = (cx.ws.at_row(cx.shape, rows.start), cx.shape.d_model);
    let (delta, post) = residual.operands(ws.delta);
    let args = NormRows {
        norm: cx.shape.norm,
        hidden: ws.hidden,
        delta,
        delta_bias: DevPtr::NULL,
        post,
        weight,
        sum: if delta.is_null() { DevPtr::NULL } else { ws.hidden },
        x: ws.x,
        act: cx.shape.act,
        row_list: DevPtr::NULL,
        rows: rows.len(),
        d,
        ld_delta: d,
        ld_x: d,
    };
    norm(rt, cx.lane, &args)
}

/// See [`RowOp::Fold`](crate::device::accelerator::RowOp::Fold).
pub(super) fn fold(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    residual: Residual,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let ws = cx.ws.at_row(cx.shape, rows.start);
    let (delta, post) = residual.operands(ws.delta);
    if delta.is_null() {
        return Ok(());
    }
    add_rows(rt, cx, ws.hidden, (delta, post), rows.len())
}

/// to += from, through the norm `post` unless that is NULL, of `rows` rows of f32 `[d]`.
pub(super) fn add_rows(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    to: DevPtr,
    (from, post): (DevPtr, DevPtr),
    rows: usize,
) -> Result<()> {
    let d = cx.shape.d_model;
    let args = NormRows {
        norm: cx.shape.norm,
        hidden: to,
        delta: from,
        delta_bias: DevPtr::NULL,
        post,
        weight: NormWeight::default(),
        sum: to,
        x: DevPtr::NULL,
        act: cx.shape.act,
        row_list: DevPtr::NULL,
        rows,
        d,
        ld_delta: d,
        ld_x: d,
    };
    norm(rt, cx.lane, &args)
}

/// hidden += residual, x = norm(hidden), qkv = W·x.
fn multiply(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    residual: Residual,
    rows: &Range<usize>,
) -> Result<()> {
    let shape = cx.shape;
    let ws = cx.ws.at_row(shape, rows.start);
    norm_rows(rt, cx, layer.attn_norm, residual, rows)?;
    let width = shape.qkv_dim();
    let mut column = 0;
    for w in &layer.qkv {
        let args = ProductArgs {
            w: w.into(),
            act: shape.act,
            x: ws.x,
            ldx: shape.d_model,
            y: ws.qkv.add(4 * column),
            ldy: width,
            m: rows.len(),
            epilogue: Epilogue::F32,
            scratch: linear_scratch(cx),
        };
        product(rt, cx.lane, &args)?;
        column += w.n;
    }
    assert_eq!(column, width, "q, k and v are {column} rows of weights");
    Ok(())
}

/// Arguments that leave the rows of qkv unchanged: no bias, norm or RoPE, nothing stored.
fn as_they_are(cx: &StepContext<'_>, rows: &Range<usize>) -> RopeAppend {
    let (shape, lists) = (cx.shape, lists(cx));
    RopeAppend {
        qkv: cx.ws.at_row(shape, rows.start).qkv,
        bias: DevPtr::NULL,
        q_norm: DevPtr::NULL,
        k_norm: DevPtr::NULL,
        norms: shape.qk_norm.unwrap_or(QkNorm::PerHead),
        eps: shape.norm.eps(),
        rope: [DevPtr::NULL; 2],
        rope_dim: 0,
        pairing: RopePairing::Half,
        row_pos: lists.row_pos.add(rows.start * 4),
        row_slot: DevPtr::NULL,
        finished: DevPtr::NULL,
        q: DevPtr::NULL,
        kv: DevPtr::NULL,
        kv_type: shape.kv,
        publish: None,
        rows: rows.len(),
        ld: shape.qkv_dim(),
        n_heads: shape.n_heads,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
    }
}

/// Arguments that add the bias, normalise q and k and apply RoPE.
fn finishing(cx: &StepContext<'_>, layer: &LayerWeights, rows: &Range<usize>) -> RopeAppend {
    RopeAppend {
        bias: layer.qkv_bias,
        q_norm: layer.q_norm,
        k_norm: layer.k_norm,
        rope: layer.tables.rope,
        rope_dim: cx.shape.rope_dim,
        pairing: cx.shape.pairing,
        ..as_they_are(cx, rows)
    }
}

/// `args`, extended to round the queries and to store keys and values in their pages.
fn appending(cx: &StepContext<'_>, kv: DevPtr, args: RopeAppend, rows: &Range<usize>) -> RopeAppend {
    RopeAppend {
        row_slot: lists(cx).row_slot.add(rows.start * 4),
        q: cx.ws.at_row(cx.shape, rows.start).q,
        kv,
        ..args
    }
}

/// See [`RowOp::Project`](crate::device::accelerator::RowOp::Project).
pub(super) fn project(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    residual: Residual,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    multiply(rt, cx, layer, residual, rows)?;
    let args = finishing(cx, layer, rows);
    rope_append(rt, cx.lane, &RopeAppend { finished: args.qkv, ..args })
}

/// See [`RowOp::Append`](crate::device::accelerator::RowOp::Append).
pub(super) fn append(rt: &dyn Runtime, cx: &StepContext<'_>, kv: DevPtr, rows: &Range<usize>) -> Result<()> {
    cx.check(rows)?;
    declare(rt, cx, kv, rows, Use::Append)?;
    rope_append(rt, cx.lane, &appending(cx, kv, as_they_are(cx, rows), rows))
}

/// Returns an error unless the mailbox has a place for every row of the step that may need one.
pub(super) fn check_mailbox(cx: &StepContext<'_>, mailbox: &Mailbox) -> Result<()> {
    let n = cx.step.lists.published().len();
    match n <= mailbox.rows {
        true => Ok(()),
        false => Err(Error::Capacity(format!("{n} rows for a mailbox of {}", mailbox.rows))),
    }
}

/// See [`RowOp::Publish`](crate::device::accelerator::RowOp::Publish).
pub(super) fn publish(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    publish: Publish<'_>,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    check_mailbox(cx, publish.mailbox)?;
    let (shape, lists) = (cx.shape, lists(cx));
    let places = cx.step.lists.published_in(rows);
    if places.is_empty() {
        return Ok(());
    }
    let memory = publish.mailbox.memory.device();
    let mut sources = [PublishSource::default(); 3];
    let bytes = 4 * publish.what.width(shape);
    sources[0] = PublishSource { at: cx.ws.qkv, stride: 4 * shape.qkv_dim(), bytes };
    let args = exchange::PublishArgs {
        sources,
        half: shape.kv.half(),
        to: memory.add(publish.mailbox.row_at(shape, places.start)),
        stride: 2 * shape.qkv_dim(),
        list: lists.published.add(4 * places.start),
        n_rows: DevPtr::NULL,
        max_rows: places.len(),
        epoch: lists.epoch,
        epoch_add: publish.epoch_add,
        epoch_flag: memory,
        arrived: lists.arrived,
    };
    publish_rows(rt, cx.lane, &args)
}

/// See [`RowOp::Qkv`](crate::device::accelerator::RowOp::Qkv).
pub(super) fn qkv(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    kv: DevPtr,
    residual: Residual,
    publication: Option<Publish<'_>>,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let (shape, lists, step) = (cx.shape, lists(cx), &cx.step.lists);
    let published = step.published_in(rows);
    let publication = publication.filter(|_| !published.is_empty());
    if let Some(p) = publication {
        check_mailbox(cx, p.mailbox)?;
        // The kernel publishes whole rows, and sets the epoch only after all rows that the step publishes.
        if p.what != Published::Qkv || published.len() < step.published().len() {
            project(rt, cx, layer, residual, rows)?;
            append(rt, cx, kv, rows)?;
            return publish(rt, cx, p, rows);
        }
    }
    multiply(rt, cx, layer, residual, rows)?;
    let publish = publication.map(|p| {
        let memory = p.mailbox.memory.device();
        PublishRows {
            slots: lists.publish_slot.add(rows.start * 4),
            n: lists.n_published,
            to: memory.add(p.mailbox.row_at(shape, 0)),
            stride: 2 * shape.qkv_dim(),
            epoch: lists.epoch,
            epoch_add: p.epoch_add,
            epoch_flag: memory,
            arrived: lists.arrived,
        }
    });
    declare(rt, cx, kv, rows, Use::Append)?;
    let args = appending(cx, kv, finishing(cx, layer, rows), rows);
    rope_append(rt, cx.lane, &RopeAppend { publish, ..args })
}
