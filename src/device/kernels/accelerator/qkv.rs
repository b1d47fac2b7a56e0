//! The first half of attention's sublayer: norm, projections, RoPE, append to the pages or to the mailbox.

use std::ops::Range;

use super::super::elementwise::{NormRows, PublishRows, RopeAppend, norm, rope_append};
use super::super::linear::Epilogue;
use super::matmul::Matmul;
use super::scratch::{linear_scratch, lists};
use crate::Result;
use crate::device::accelerator::{Context, LayerWeights, NormWeight, Publish, Residual};
use crate::device::runtime::{DevPtr, Runtime};

/// hidden += residual, x = norm(hidden), for `rows`.
pub(super) fn norm_rows(
    rt: &dyn Runtime,
    cx: &Context<'_>,
    weight: NormWeight,
    residual: Residual,
    rows: &Range<usize>,
) -> Result<()> {
    let (ws, d) = (cx.ws.from_row(cx.shape, rows.start), cx.shape.d_model);
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

/// See [`Accelerator::qkv`](crate::device::accelerator::Accelerator::qkv).
pub(super) fn qkv(
    rt: &dyn Runtime,
    cx: &Context<'_>,
    layer: &LayerWeights,
    kv: DevPtr,
    residual: Residual,
    publish: Option<Publish<'_>>,
    rows: Range<usize>,
) -> Result<()> {
    let (shape, lists) = (cx.shape, lists(cx));
    let ws = cx.ws.from_row(shape, rows.start);
    norm_rows(rt, cx, layer.attn_norm, residual, &rows)?;
    let width = shape.qkv_dim();
    let mut column = 0;
    for w in &layer.qkv {
        let matmul = Matmul {
            w,
            act: shape.act,
            x: ws.x,
            ldx: shape.d_model,
            y: ws.qkv.add(4 * column),
            ldy: width,
            m: rows.len(),
            epilogue: Epilogue::F32,
            scratch: linear_scratch(cx),
        };
        matmul.run(rt, cx.lane)?;
        column += w.n;
    }
    assert_eq!(column, width, "q, k and v are {column} rows of weights");
    let publish = publish.filter(|_| lists.max_published > 0).map(|p| {
        assert!(lists.max_published <= p.mailbox.rows, "a mailbox of {} rows", p.mailbox.rows);
        let memory = p.mailbox.memory.device();
        PublishRows {
            slots: lists.publish_slot.add(rows.start * 4),
            n: lists.n_published,
            to: memory.add(p.mailbox.row_at(shape, 0)),
            stride: 4 * width,
            f32: true,
            epoch: lists.epoch,
            epoch_add: p.epoch_add,
            epoch_flag: memory,
            arrived: lists.arrived,
        }
    });
    let args = RopeAppend {
        qkv: ws.qkv,
        bias: layer.qkv_bias,
        q_norm: layer.q_norm,
        k_norm: layer.k_norm,
        eps: shape.norm.eps(),
        rope: layer.rope,
        rope_dim: shape.rope_dim,
        pairing: shape.pairing,
        row_pos: lists.row_pos.add(rows.start * 4),
        row_slot: lists.row_slot.add(rows.start * 4),
        q: ws.q,
        kv,
        kv_type: shape.kv,
        publish,
        rows: rows.len(),
        ld: width,
        n_heads: shape.n_heads,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
    };
    rope_append(rt, cx.lane, &args)
}
