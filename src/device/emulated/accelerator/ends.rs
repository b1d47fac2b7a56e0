//! Both ends of the model: embedding, and the head with its argmax.

use std::ops::Range;

use super::EmulatedAccelerator;
use super::operands::{DeltaOperand, Operands};
use crate::device::accelerator::{
    EmbedWeight, LinearWeight, NormWeight, Residual, Shape, StepContext, TOP_BYTES, Workspace, write_top,
};
use crate::device::emulated::op::HostOp;
use crate::device::emulated::ops::cast::{Kept, numbers, numbers_mut};
use crate::device::emulated::ops::norm;
use crate::device::runtime::Lane;
use crate::tensor::DType;
use crate::{Error, Result};

/// See [`RowOp::Embed`](crate::device::accelerator::RowOp::Embed).
pub(super) fn embed(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    weight: &EmbedWeight,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let step = accel.step(cx).clone();
    let rows = step.clip(&rows);
    let (d, vocab, scale) = (cx.shape.d_model, cx.shape.vocab, cx.shape.embed_scale);
    let row_bytes = |dtype: DType| dtype.row_bytes(d).expect("a row of the embedding is whole blocks");
    let mut io = accel.operands(cx);
    let table = io.read(weight.table, vocab * row_bytes(weight.dtype));
    let positions = io.read(weight.positions, weight.n_positions * row_bytes(weight.positions_dtype));
    let hidden = io.write_rows(cx.ws.hidden, &rows, 4 * d);
    let (weight, kernels) = (*weight, accel.arithmetic(cx.shape).kernels);
    accel.enqueue_function(cx, "embed", io, move |reads, writes| {
        let tokens = &numbers::<u32>(reads[0])[rows.clone()];
        let hidden = numbers_mut::<f32>(writes[hidden]).chunks_exact_mut(d);
        let row = |table: usize, dtype: DType, i: usize| {
            let bytes = row_bytes_of(reads[table], dtype, d, i);
            bytes.ok_or_else(|| failed("embed", format!("row {i} of a table that is shorter")))
        };
        for ((&token, out), r) in tokens.iter().zip(hidden).zip(rows.clone()) {
            kernels.embed_row(weight.dtype, row(table, weight.dtype, token as usize)?, scale, out);
            if !weight.positions.is_null() {
                let dtype = weight.positions_dtype;
                let mut position = vec![0f32; d];
                let at = row(positions, dtype, step.position(r) + weight.position_offset)?;
                kernels.embed_row(dtype, at, 1.0, &mut position);
                kernels.add(out, &position);
            }
        }
        Ok(())
    })
}

/// See [`RowOp::Logits`](crate::device::accelerator::RowOp::Logits).
pub(super) fn logits(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    weight: NormWeight,
    head: &LinearWeight,
    residual: Residual,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let (ws, shape) = (cx.ws, cx.shape);
    let (d, vocab, norm, act) = (shape.d_model, shape.vocab, shape.norm, Kept::of(shape, shape.act));
    let places = cx.step.lists.logits_in(rows);
    let wanted = &cx.step.lists.logits()[places.clone()];
    let mut io = accel.operands(cx);
    let deltas: Vec<Option<DeltaOperand>> =
        wanted.iter().map(|&r| io.delta(cx, residual, &(r as usize..r as usize + 1))).collect();
    let hiddens: Vec<usize> =
        wanted.iter().map(|&r| io.read(ws.hidden.add(r as usize * 4 * d), 4 * d)).collect();
    let weight = io.norm(&weight, d);
    let head = io.weight(head);
    let x = io.write_rows(ws.head_x, &places, act.bytes() * d);
    let logits = io.write_rows(ws.logits, &places, 4 * vocab);
    let (cap, by) = (shape.logit_softcap, accel.arithmetic(shape));
    accel.enqueue_function(cx, "logits", io, move |reads, writes| {
        let (kernels, to) = (by.kernels, std::mem::take(&mut writes[x]));
        let rows = deltas.iter().zip(&hiddens).zip(to.chunks_exact_mut(act.bytes() * d));
        for ((delta, &hidden), x) in rows {
            let mut hidden = numbers::<f32>(reads[hidden]).to_vec();
            if let Some(delta) = delta {
                norm::add(kernels, norm, &mut hidden, delta.row(reads, 0));
            }
            let [w, b] = weight.map(|i| numbers::<f32>(reads[i]));
            let mut out = vec![0f32; d];
            norm::norm(kernels, norm, &hidden, w, b, &mut out);
            act.write(&out, x);
        }
        let logits = numbers_mut(writes[logits]);
        by.linear(&head.matrix(reads), false, &act.read(to), logits, vocab, 0);
        if let Some(cap) = cap {
            kernels.softcap(logits, cap);
        }
        Ok(())
    })
}

/// See [`RowOp::Argmax`](crate::device::accelerator::RowOp::Argmax).
pub(super) fn argmax(accel: &EmulatedAccelerator, cx: &StepContext<'_>, rows: &Range<usize>) -> Result<()> {
    cx.check(rows)?;
    let (vocab, places) = (cx.shape.vocab, cx.step.lists.logits_in(rows));
    let mut io = accel.operands(cx);
    let logits = io.read_rows(cx.ws.logits, &places, 4 * vocab);
    let argmax = io.write_rows(cx.ws.argmax, &places, 4);
    let sums = io.write_rows(cx.ws.logsumexp_at(0), &places, 4);
    let kernels = accel.arithmetic(cx.shape).kernels;
    accel.enqueue_function(cx, "argmax", io, move |reads, writes| {
        let rows = || numbers::<f32>(reads[logits]).chunks_exact(vocab);
        for (row, best) in rows().zip(numbers_mut::<u32>(writes[argmax])) {
            *best = kernels.argmax(row) as u32;
        }
        for (row, sum) in rows().zip(numbers_mut::<f32>(writes[sums])) {
            // A single NaN makes the sum NaN, as on a GPU.
            let nan = row.iter().any(|x| x.is_nan());
            *sum = if nan { f32::NAN } else { kernels.max_and_logsumexp(row).1 as f32 };
        }
        Ok(())
    })
}

/// See [`Accelerator::top`](crate::device::accelerator::Accelerator::top).
pub(super) fn top(
    accel: &EmulatedAccelerator,
    lane: Lane,
    shape: &Shape,
    ws: &Workspace,
    factors: &[f32],
) -> Result<()> {
    let (vocab, places, factors) = (shape.vocab, 0..factors.len(), factors.to_vec());
    let mut io = Operands { reads: Vec::new(), writes: Vec::new() };
    let logits = io.read_rows(ws.logits, &places, 4 * vocab);
    let top = io.write_rows(ws.top, &places, TOP_BYTES);
    let Operands { reads, writes } = io;
    let body = move |reads: &[&[u8]], writes: &mut [&mut [u8]]| {
        let rows = numbers::<f32>(reads[logits]).chunks_exact(vocab);
        for ((row, out), &factor) in rows.zip(writes[top].chunks_exact_mut(TOP_BYTES)).zip(&factors) {
            write_top(row, factor, out);
        }
        Ok(())
    };
    accel.emulated.enqueue(lane, HostOp { name: "top".into(), reads, writes, body: Box::new(body) })
}

/// Row `i` of a table, if the table is long enough.
fn row_bytes_of(table: &[u8], dtype: DType, d: usize, i: usize) -> Option<&[u8]> {
    let bytes = dtype.row_bytes(d)?;
    table.get(i.checked_mul(bytes)?..)?.get(..bytes)
}

fn failed(what: &str, problem: String) -> Error {
    Error::Device { what: format!("operation {what}"), problem }
}
