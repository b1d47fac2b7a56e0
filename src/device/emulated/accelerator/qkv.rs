//! The first half of attention's sublayer: norm, projections, norms of q and k, RoPE, append to the pages, publication in the mailbox.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::EmulatedAccelerator;
use super::operands::{MatrixOperand, NormRows};
use crate::device::accelerator::{LayerWeights, Mailbox, Publish, Residual, StepContext};
use crate::device::emulated::ops::cast::{Kept, numbers, numbers_mut};
use crate::device::emulated::ops::norm;
use crate::device::emulated::ops::pages::PageShape;
use crate::device::emulated::ops::qkv::{self, Heads};
use crate::device::emulated::step::Row;
use crate::device::runtime::{DevPtr, Pinned};
use crate::{Error, Result};

/// See [`RowOp::Fold`](crate::device::accelerator::RowOp::Fold).
pub(super) fn fold(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    residual: Residual,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let rows = accel.step(cx).clip(&rows);
    let (d, kind, kernels) = (cx.shape.d_model, cx.shape.norm, accel.arithmetic(cx.shape).kernels);
    let mut io = accel.operands(cx);
    let Some(delta) = io.delta(cx, residual, &rows) else { return Ok(()) };
    let hidden = io.write_rows(cx.ws.hidden, &rows, 4 * d);
    accel.enqueue_function(cx, "fold", io, move |reads, writes| {
        for (i, hidden) in numbers_mut::<f32>(writes[hidden]).chunks_exact_mut(d).enumerate() {
            norm::add(kernels, kind, hidden, delta.row(reads, i));
        }
        Ok(())
    })
}

/// See [`RowOp::Project`](crate::device::accelerator::RowOp::Project).
pub(super) fn project(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    residual: Residual,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let step = accel.step(cx).clone();
    let (ws, shape) = (cx.ws, cx.shape.clone());
    let rows = step.clip(&rows);
    let (d, width) = (shape.d_model, shape.qkv_dim());
    let mut io = accel.operands(cx);
    let delta = io.delta(cx, residual, &rows);
    let weight = io.norm(&layer.attn_norm, d);
    let parts: Vec<MatrixOperand> = layer.qkv.iter().map(|w| io.weight(w)).collect();
    let columns: usize = layer.qkv.iter().map(|w| w.n).sum();
    assert_eq!(columns, width, "q, k and v are {columns} rows of weights");
    let bias = io.read(layer.qkv_bias, 4 * width);
    let widths = shape.qk_norm_widths();
    let norms = [io.read(layer.q_norm, 4 * widths[0]), io.read(layer.k_norm, 4 * widths[1])];
    // The rows of the RoPE tables from the first position to the last.
    let pairs = shape.rope_dim / 2;
    let seen = step.positions(&rows);
    let rope = layer.tables.rope.map(|table| io.read_rows(table, &seen, 4 * pairs));
    let hidden = io.write_rows(ws.hidden, &rows, 4 * d);
    let act = Kept::of(&shape, shape.act);
    let x = io.write_rows(ws.x, &rows, act.bytes() * d);
    let projected = io.write_rows(ws.qkv, &rows, 4 * width);
    let by = accel.arithmetic(&shape);
    let kernels = by.kernels;
    let norm_rows = NormRows { kernels, norm: shape.norm, act, d, delta, weight };
    accel.enqueue_function(cx, "project", io, move |reads, writes| {
        let hidden = numbers_mut(std::mem::take(&mut writes[hidden]));
        let x = norm_rows.run(reads, hidden, std::mem::take(&mut writes[x]));
        let projected = numbers_mut::<f32>(std::mem::take(&mut writes[projected]));
        let mut column = 0;
        for part in &parts {
            let w = part.matrix(reads);
            by.linear(&w, true, &x, projected, width, column);
            column += w.n();
        }
        let heads = Heads {
            n_heads: shape.n_heads,
            n_kv_heads: shape.n_kv_heads,
            head_dim: shape.head_dim,
            bias: numbers(reads[bias]),
            q_norm: numbers(reads[norms[0]]),
            k_norm: numbers(reads[norms[1]]),
            eps: shape.norm.eps(),
            pairing: shape.pairing,
        };
        for (row, r) in projected.chunks_exact_mut(width).zip(rows.clone()) {
            let [cos, sin] = rope.map(|table| {
                let table = numbers::<f32>(reads[table]);
                let at = (step.position(r) - seen.start) * pairs;
                if table.is_empty() { table } else { &table[at..at + pairs] }
            });
            qkv::finish(kernels, &heads, row, cos, sin);
        }
        Ok(())
    })
}

/// See [`RowOp::Append`](crate::device::accelerator::RowOp::Append).
pub(super) fn append(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    kv: DevPtr,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let step = accel.step(cx).clone();
    let (ws, shape) = (cx.ws, cx.shape.clone());
    let rows = step.clip(&rows);
    let (qd, kvd, width) = (shape.q_dim(), shape.kv_dim(), shape.qkv_dim());
    let mut io = accel.operands(cx);
    let finished = io.read_rows(ws.qkv, &rows, 4 * width);
    let kept = Kept::of(&shape, shape.kv.half());
    let q_bytes = kept.bytes() * qd;
    let q = io.write_rows(ws.q, &rows, q_bytes);
    let page = PageShape::of(&shape);
    let pages = step.pages_written(&rows);
    let first_page = io.writes.len();
    for &p in &pages {
        io.write(kv.add(p as usize * shape.page_bytes()), shape.page_bytes());
    }
    accel.enqueue_function(cx, "append", io, move |reads, writes| {
        let finished = numbers::<f32>(reads[finished]).chunks_exact(width);
        for ((i, r), row) in rows.clone().enumerate().zip(finished) {
            kept.write(&row[..qd], &mut writes[q][i * q_bytes..(i + 1) * q_bytes]);
            if let Row::Here { page: p, token, .. } = step.rows[r] {
                let slot = pages.binary_search(&p).expect("all pages written are listed");
                let (k, v) = row[qd..].split_at(kvd);
                page.append(writes[first_page + slot], token, k, v, shape.exact.is_some());
            }
        }
        Ok(())
    })
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
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    publish: Publish<'_>,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    check_mailbox(cx, publish.mailbox)?;
    let lists = &cx.step.lists;
    let places = lists.published_in(&rows);
    if places.is_empty() {
        return Ok(());
    }
    let (shape, mailbox) = (cx.shape, publish.mailbox);
    let (width, sent, kept) = (shape.qkv_dim(), publish.what.width(shape), Kept::of(shape, shape.kv.half()));
    let memory = mailbox.memory.clone();
    let mut io = accel.operands(cx);
    let letters: Vec<(usize, usize)> = places
        .clone()
        .map(|place| {
            let row = lists.published()[place] as usize;
            let read = io.read(cx.ws.qkv.add(4 * width * row), 4 * sent);
            (read, io.write(memory.device().add(mailbox.row_at(shape, place)), kept.bytes() * sent))
        })
        .collect();
    let epoch = accel.step(cx).epoch.wrapping_add(publish.epoch_add);
    accel.enqueue_function(cx, "publish", io, move |reads, writes| {
        for &(from, to) in &letters {
            kept.write(numbers(reads[from]), writes[to]);
        }
        publish_epoch(&memory, epoch);
        Ok(())
    })
}

/// Stores the mailbox's epoch with release ordering, after everything that this thread has written to the mailbox.
fn publish_epoch(mailbox: &Arc<dyn Pinned>, epoch: u32) {
    // SAFETY: a mailbox begins with its epoch, a word that both sides touch atomically only, and is page-aligned.
    let word = unsafe { AtomicU32::from_ptr(mailbox.host().cast()) };
    word.store(epoch, Ordering::Release);
}
