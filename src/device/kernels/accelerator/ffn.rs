//! The feed-forward sublayer, and the last step of both sublayers: a product that is added to the residual stream.

use std::ops::Range;

use super::super::elementwise::{Activate, Activation, activate};
use super::super::product::{Epilogue, ProductArgs, product};
use super::lists::linear_scratch;
use super::qkv::norm_rows;
use crate::Result;
use crate::device::accelerator::{LayerWeights, LinearWeight, Residual, StepContext, UpWeight};
use crate::device::runtime::{DevPtr, Runtime};
use crate::model::Ffn;

/// See [`RowOp::FfnUp`](crate::device::accelerator::RowOp::FfnUp).
pub(super) fn up(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    residual: Residual,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    norm_rows(rt, cx, layer.ffn_norm, residual, &rows)?;
    let shape = cx.shape;
    let ws = cx.ws.at_row(shape, rows.start);
    let (d, ff) = (shape.d_model, shape.d_ff);
    let multiply = |w: &LinearWeight, y: DevPtr, ldy: usize, epilogue: Epilogue| {
        let (x, act, m, scratch) = (ws.x, shape.act, rows.len(), linear_scratch(cx));
        product(rt, cx.lane, &ProductArgs { w: w.into(), act, x, ldx: d, y, ldy, m, epilogue, scratch })
    };
    let epilogue = epilogue(shape.ffn);
    match &layer.ffn.dense()?.up {
        UpWeight::GateUp(w) | UpWeight::Plain(w) => multiply(w, ws.act, ff, epilogue),
        UpWeight::Separate(gate, up) => {
            // A row's gate and up lie side by side.
            let both = ws.gate_up;
            multiply(gate, both, 2 * ff, Epilogue::F32)?;
            multiply(up, both.add(ff * 4), 2 * ff, Epilogue::F32)?;
            let args = Activate {
                gate: both,
                up: both.add(ff * 4),
                gate_bias: DevPtr::NULL,
                up_bias: DevPtr::NULL,
                out: ws.act,
                rows: rows.len(),
                n: ff,
                ld_gate: 2 * ff,
                ld_up: 2 * ff,
                ld_out: ff,
            };
            activate(rt, cx.lane, Activation::Ffn(shape.ffn, shape.act), &args)
        }
    }
}

/// What becomes of the sums of the first matrices.
pub(super) fn epilogue(ffn: Ffn) -> Epilogue {
    match ffn {
        Ffn::SwiGlu => Epilogue::SwiGlu,
        Ffn::ClampedSwiGlu => Epilogue::ClampedSwiGlu,
        Ffn::GeGlu => Epilogue::GeGlu,
        Ffn::Relu => Epilogue::Relu,
    }
}

/// delta = W·x + bias, for `rows`; `x`, `[..][k]`, begins with the first of these rows.
pub(super) fn to_delta(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    w: &LinearWeight,
    x: DevPtr,
    rows: &Range<usize>,
) -> Result<()> {
    cx.check(rows)?;
    let d = cx.shape.d_model;
    let args = ProductArgs {
        w: w.into(),
        act: cx.shape.act,
        x,
        ldx: w.k,
        y: cx.ws.at_row(cx.shape, rows.start).delta,
        ldy: d,
        m: rows.len(),
        epilogue: Epilogue::F32,
        scratch: linear_scratch(cx),
    };
    product(rt, cx.lane, &args)
}
