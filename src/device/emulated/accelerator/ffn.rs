//! The feed-forward sublayer, and the last step of both sublayers: a product that is added to the residual stream.

use std::ops::Range;

use super::EmulatedAccelerator;
use super::operands::{MatrixOperand, NormRows, Operands};
use crate::Result;
use crate::device::accelerator::{LayerWeights, LinearWeight, Residual, StepContext, UpWeight};
use crate::device::emulated::ops::cast::{Kept, numbers_mut};
use crate::device::emulated::ops::linear::{self, Arithmetic};
use crate::device::runtime::DevPtr;
use crate::model::Ffn;

/// The first matrices of a feed-forward among the operands: the gate, if there is one, and up.
pub(super) struct Ups(Option<MatrixOperand>, MatrixOperand);

impl Ups {
    /// Of width `ff`.
    pub fn new(io: &mut Operands, up: &UpWeight, ff: usize) -> Ups {
        match up {
            UpWeight::GateUp(both) => {
                let row = both.dtype.row_bytes(both.k).expect("checked when packed");
                let ups = if both.bias.is_null() { both.bias } else { both.bias.add(4 * ff) };
                let gate = LinearWeight { n: ff, ..*both };
                let up = LinearWeight { n: ff, ptr: both.ptr.add(ff * row), bias: ups, ..*both };
                Ups(Some(io.weight(&gate)), io.weight(&up))
            }
            UpWeight::Separate(gate, up) => Ups(Some(io.weight(gate)), io.weight(up)),
            UpWeight::Plain(up) => Ups(None, io.weight(up)),
        }
    }

    /// y = the activations of `x`.
    pub fn run(&self, by: &Arithmetic, ffn: Ffn, reads: &[&[u8]], x: &[f32], y: &mut [f32]) {
        let (gate, up) = (self.0.map(|w| w.matrix(reads)), self.1.matrix(reads));
        linear::feed_forward(by, ffn, gate.as_ref(), &up, x, y);
    }
}

/// See [`RowOp::FfnUp`](crate::device::accelerator::RowOp::FfnUp).
pub(super) fn up(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    residual: Residual,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let (ws, shape) = (cx.ws, cx.shape);
    let rows = accel.step(cx).clip(&rows);
    let (d, ff, ffn, act) = (shape.d_model, shape.d_ff, shape.ffn, Kept::of(shape, shape.act));
    let by = accel.arithmetic(shape);
    let mut io = accel.operands(cx);
    let delta = io.delta(cx, residual, &rows);
    let weight = io.norm(&layer.ffn_norm, d);
    let ups = Ups::new(&mut io, &layer.ffn.dense()?.up, ff);
    let hidden = io.write_rows(ws.hidden, &rows, 4 * d);
    let x = io.write_rows(ws.x, &rows, act.bytes() * d);
    let out = io.write_rows(ws.act, &rows, act.bytes() * ff);
    let norm_rows = NormRows { kernels: by.kernels, norm: shape.norm, act, d, delta, weight };
    accel.enqueue_function(cx, "ffn_up", io, move |reads, writes| {
        let hidden = numbers_mut(std::mem::take(&mut writes[hidden]));
        let x = norm_rows.run(reads, hidden, std::mem::take(&mut writes[x]));
        let mut y = vec![0f32; rows.len() * ff];
        ups.run(&by, ffn, reads, &x, &mut y);
        act.write(&y, writes[out]);
        Ok(())
    })
}

/// delta = W·x + bias.
pub(super) fn to_delta(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    name: &'static str,
    w: &LinearWeight,
    x: DevPtr,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let rows = accel.step(cx).clip(&rows);
    let (d, act) = (cx.shape.d_model, Kept::of(cx.shape, cx.shape.act));
    let by = accel.arithmetic(cx.shape);
    let mut io = accel.operands(cx);
    let x = io.read_rows(x, &rows, act.bytes() * w.k);
    let w = io.weight(w);
    let delta = io.write_rows(cx.ws.delta, &rows, 4 * d);
    accel.enqueue_function(cx, name, io, move |reads, writes| {
        by.linear(&w.matrix(reads), false, &act.read(reads[x]), numbers_mut(writes[delta]), d, 0);
        Ok(())
    })
}
