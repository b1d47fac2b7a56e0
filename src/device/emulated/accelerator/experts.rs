//! Experts: the choice of each row, and the products of the chosen ones, row by row of an expert.
//!
//! Results are in the order of a row's choices, so that they depend on no other row.

use std::ops::Range;

use super::EmulatedAccelerator;
use super::ffn::Ups;
use super::operands::{MatrixOperand, NormRows, Operands};
use crate::Result;
use crate::device::accelerator::{
    ExpertShape, ExpertWeights, LayerWeights, LinearWeight, NO_SLOT, Residual, StepContext,
};
use crate::device::emulated::ops::cast::{Kept, numbers, numbers_mut};
use crate::device::emulated::ops::linear::{self, Arithmetic};
use crate::device::emulated::ops::matrix::Matrix;
use crate::device::runtime::DevPtr;
use crate::model::route;
use crate::tensor::DType;

/// A matrix of every expert.
#[derive(Clone, Copy)]
struct OfExperts {
    of_one: MatrixOperand,
    stride: usize,
}

impl OfExperts {
    /// The matrices of `count` experts among the operands; `w` is that of expert 0.
    fn new(io: &mut Operands, w: &LinearWeight, stride: usize, count: usize) -> OfExperts {
        OfExperts { of_one: io.spaced(w, stride, count), stride }
    }

    /// Rows `rows` of that of expert `e`.
    fn matrix<'a>(&self, reads: &[&'a [u8]], e: usize, rows: Range<usize>) -> Matrix<'a> {
        self.of_one.part(reads, e * self.stride, rows)
    }
}

/// Which experts are here.
#[derive(Clone, Copy)]
struct Slots(Option<usize>);

impl Slots {
    fn new(io: &mut Operands, weights: &ExpertWeights, count: usize) -> Slots {
        Slots(weights.is_divided().then(|| io.read(weights.slots, 4 * count)))
    }

    /// Where the matrices of expert `e` are, if they are here.
    fn of(self, reads: &[&[u8]], e: u32) -> Option<usize> {
        let slot = self.0.map_or(e, |at| numbers::<u32>(reads[at])[e as usize]);
        (slot != NO_SLOT).then_some(slot as usize)
    }

    /// The choices of some rows that are of experts here, by the places of their matrices: ascending places, and for each its choices,
    /// ascending.
    fn choices(self, reads: &[&[u8]], ids: &[u32], here: usize) -> Vec<(usize, Vec<usize>)> {
        let mut of: Vec<Vec<usize>> = vec![Vec::new(); here];
        for (choice, &e) in ids.iter().enumerate() {
            if let Some(slot) = self.of(reads, e) {
                of[slot].push(choice);
            }
        }
        of.into_iter().enumerate().filter(|(_, choices)| !choices.is_empty()).collect()
    }
}

/// See [`RowOp::FfnUp`](crate::device::accelerator::RowOp::FfnUp).
pub(super) fn up(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    weights: &ExpertWeights,
    residual: Residual,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let (ws, shape) = (cx.ws, cx.shape);
    let rows = accel.step(cx).clip(&rows);
    let (d, ffn, act) = (shape.d_model, shape.ffn, Kept::of(shape, shape.act));
    let (e, to_rows) = cx.expert_rows(rows.start)?;
    let by = accel.arithmetic(shape);
    let mut io = accel.operands(cx);
    let delta = io.delta(cx, residual, &rows);
    let weight = io.norm(&layer.ffn_norm, d);
    let router = io.weight(&LinearWeight {
        ptr: weights.router,
        dtype: DType::F32,
        n: e.count,
        k: d,
        bias: weights.router_bias,
    });
    let shared = weights.shared.as_ref().map(|(mlp, gate)| {
        let gate = LinearWeight { ptr: *gate, dtype: DType::F32, n: 1, k: d, bias: DevPtr::NULL };
        (Ups::new(&mut io, &mlp.up, e.shared), io.weight(&gate))
    });
    let n = rows.len();
    let hidden = io.write_rows(ws.hidden, &rows, 4 * d);
    let x = io.write_rows(ws.x, &rows, act.bytes() * d);
    let ids = io.write(to_rows.ids, 4 * n * e.used);
    let factors = io.write(to_rows.weights, 4 * n * e.used);
    let gate = io.write(to_rows.gate, if shared.is_some() { 4 * n } else { 0 });
    let shared_out = io.write(to_rows.shared, act.bytes() * n * e.shared);
    let norm_rows = NormRows { kernels: by.kernels, norm: shape.norm, act, d, delta, weight };
    accel.enqueue_function(cx, "ffn_up", io, move |reads, writes| {
        let hidden = numbers_mut(std::mem::take(&mut writes[hidden]));
        let x = norm_rows.run(reads, hidden, std::mem::take(&mut writes[x]));
        let mut logits = vec![0f32; n * e.count];
        by.linear(&router.matrix(reads), false, &x, &mut logits, e.count, 0);
        let ids: &mut [u32] = numbers_mut(std::mem::take(&mut writes[ids]));
        let factors: &mut [f32] = numbers_mut(std::mem::take(&mut writes[factors]));
        let rows = logits.chunks_exact(e.count).zip(ids.chunks_exact_mut(e.used));
        for ((logits, ids), factors) in rows.zip(factors.chunks_exact_mut(e.used)) {
            route(logits, e.weights, ids, factors);
        }
        if let Some((ups, gate_w)) = &shared {
            by.linear(&gate_w.matrix(reads), false, &x, numbers_mut(std::mem::take(&mut writes[gate])), 1, 0);
            let mut y = vec![0f32; n * e.shared];
            ups.run(&by, ffn, reads, &x, &mut y);
            act.write(&y, writes[shared_out]);
        }
        Ok(())
    })?;
    // Of a divided layer the host waits for the choices: the rest belongs to the second half.
    if weights.is_divided() { Ok(()) } else { chosen_up(accel, cx, weights, rows) }
}

/// Activations of the choices whose experts are here, of rows in `x`.
fn chosen_up(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    weights: &ExpertWeights,
    rows: Range<usize>,
) -> Result<()> {
    let (d, ffn, act, n) = (cx.shape.d_model, cx.shape.ffn, Kept::of(cx.shape, cx.shape.act), rows.len());
    let (e, to_rows) = cx.expert_rows(rows.start)?;
    let by = accel.arithmetic(cx.shape);
    let mut io = accel.operands(cx);
    let x = io.read_rows(cx.ws.x, &rows, act.bytes() * d);
    let ids = io.read(to_rows.ids, 4 * n * e.used);
    let gate_up = OfExperts::new(&mut io, &weights.up, weights.up_stride, weights.here);
    let (slots, here) = (Slots::new(&mut io, weights, e.count), weights.here);
    let up_rows = weights.up.n / 2;
    let out = io.write(to_rows.act, act.bytes() * n * e.used * e.d_ff);
    accel.enqueue_function(cx, "experts_up", io, move |reads, writes| {
        let x = act.read(reads[x]);
        let out = std::mem::take(&mut writes[out]);
        for (slot, choices) in slots.choices(reads, numbers(reads[ids]), here) {
            let inputs: Vec<f32> =
                choices.iter().flat_map(|c| &x[c / e.used * d..(c / e.used + 1) * d]).copied().collect();
            let gate = gate_up.matrix(reads, slot, 0..up_rows);
            let up = gate_up.matrix(reads, slot, up_rows..2 * up_rows);
            let mut y = vec![0f32; choices.len() * e.d_ff];
            linear::feed_forward(&by, ffn, Some(&gate), &up, &inputs, &mut y);
            for (choice, y) in choices.iter().zip(y.chunks_exact(e.d_ff)) {
                let bytes = act.bytes() * e.d_ff;
                act.write(y, &mut out[choice * bytes..(choice + 1) * bytes]);
            }
        }
        Ok(())
    })
}

/// See [`RowOp::FfnDown`](crate::device::accelerator::RowOp::FfnDown).
pub(super) fn down(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    weights: &ExpertWeights,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let rows = accel.step(cx).clip(&rows);
    if weights.is_divided() {
        chosen_up(accel, cx, weights, rows.clone())?;
    }
    let (d, act, n) = (cx.shape.d_model, Kept::of(cx.shape, cx.shape.act), rows.len());
    let (e, of_rows) = cx.expert_rows(rows.start)?;
    let by = accel.arithmetic(cx.shape);
    let mut io = accel.operands(cx);
    let ids = io.read(of_rows.ids, 4 * n * e.used);
    let factors = io.read(of_rows.weights, 4 * n * e.used);
    let x = io.read(of_rows.act, act.bytes() * n * e.used * e.d_ff);
    let matrices = OfExperts::new(&mut io, &weights.down, weights.down_stride, weights.here);
    let (slots, here) = (Slots::new(&mut io, weights, e.count), weights.here);
    // With exact results the sum waits for the outputs of the host's experts.
    let later = slots.0.is_some() && cx.shape.exact.is_some();
    let kept = io.write(of_rows.out, if later { 4 * n * e.used * d } else { 0 });
    let shared = weights.shared.as_ref().map(|(mlp, _)| {
        let w = io.weight(&mlp.down);
        (w, io.read(of_rows.shared, act.bytes() * n * e.shared), io.read(of_rows.gate, 4 * n))
    });
    let delta = io.write_rows(cx.ws.delta, &rows, 4 * d);
    accel.enqueue_function(cx, "ffn_down", io, move |reads, writes| {
        let (ids, factors): (&[u32], &[f32]) = (numbers(reads[ids]), numbers(reads[factors]));
        let delta: &mut [f32] = numbers_mut(std::mem::take(&mut writes[delta]));
        match &shared {
            None => delta.fill(0.0),
            Some((w, x, gate)) => {
                by.linear(&w.matrix(reads), false, &act.read(reads[*x]), delta, d, 0);
                for (delta, gate) in delta.chunks_exact_mut(d).zip(numbers::<f32>(reads[*gate])) {
                    let g = 1.0 / (1.0 + (-gate).exp());
                    delta.iter_mut().for_each(|x| *x *= g);
                }
            }
        }
        let x = act.read(reads[x]);
        let choices = slots.choices(reads, ids, here);
        let out = outputs(&by, &e, &choices, n, &x, d, |slot| matrices.matrix(reads, slot, 0..d));
        if later {
            numbers_mut::<f32>(std::mem::take(&mut writes[kept])).copy_from_slice(&out);
            return Ok(());
        }
        for (delta, row) in delta.chunks_exact_mut(d).zip(0..n) {
            for choice in row * e.used..(row + 1) * e.used {
                if slots.of(reads, ids[choice]).is_some() {
                    let y = &out[choice * d..(choice + 1) * d];
                    delta.iter_mut().zip(y).for_each(|(x, y)| *x += factors[choice] * y);
                }
            }
        }
        Ok(())
    })
}

/// See [`RowOp::AddShare`](crate::device::accelerator::RowOp::AddShare).
pub(super) fn add_share(
    accel: &EmulatedAccelerator,
    cx: &StepContext<'_>,
    weights: &ExpertWeights,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    let rows = accel.step(cx).clip(&rows);
    let (d, n, exact) = (cx.shape.d_model, rows.len(), cx.shape.exact.is_some());
    let (e, of_rows) = cx.expert_rows(rows.start)?;
    let mut io = accel.operands(cx);
    let share = io.read(of_rows.share, n * e.share_bytes(cx.shape));
    let ids = io.read(of_rows.ids, 4 * n * e.used);
    let factors = io.read(of_rows.weights, 4 * n * e.used);
    let own = io.read(of_rows.out, if exact { 4 * n * e.used * d } else { 0 });
    let slots = Slots::new(&mut io, weights, e.count);
    let delta = io.write_rows(cx.ws.delta, &rows, 4 * d);
    accel.enqueue_function(cx, "add_share", io, move |reads, writes| {
        let delta: &mut [f32] = numbers_mut(std::mem::take(&mut writes[delta]));
        let share: &[f32] = numbers(reads[share]);
        if !exact {
            delta.iter_mut().zip(share).for_each(|(x, y)| *x += y);
            return Ok(());
        }
        let (ids, factors): (&[u32], &[f32]) = (numbers(reads[ids]), numbers(reads[factors]));
        let own: &[f32] = numbers(reads[own]);
        for (delta, row) in delta.chunks_exact_mut(d).zip(0..n) {
            for choice in row * e.used..(row + 1) * e.used {
                let from = if slots.of(reads, ids[choice]).is_some() { own } else { share };
                let y = &from[choice * d..(choice + 1) * d];
                delta.iter_mut().zip(y).for_each(|(x, y)| *x += factors[choice] * y);
            }
        }
        Ok(())
    })
}

/// What the expert of each choice gives, `[choices][d]`.
fn outputs<'a>(
    by: &Arithmetic,
    e: &ExpertShape,
    choices: &[(usize, Vec<usize>)],
    rows: usize,
    x: &[f32],
    d: usize,
    matrix: impl Fn(usize) -> Matrix<'a>,
) -> Vec<f32> {
    let mut out = vec![0f32; rows * e.used * d];
    for (slot, choices) in choices {
        let inputs: Vec<f32> =
            choices.iter().flat_map(|c| &x[c * e.d_ff..(c + 1) * e.d_ff]).copied().collect();
        let mut y = vec![0f32; choices.len() * d];
        by.linear(&matrix(*slot), false, &inputs, &mut y, d, 0);
        for (choice, y) in choices.iter().zip(y.chunks_exact(d)) {
            out[choice * d..(choice + 1) * d].copy_from_slice(y);
        }
    }
    out
}
