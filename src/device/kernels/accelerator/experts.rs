//! The feed-forward of a layer of experts: choices and places stay on the device, and what is launched follows from the number of
//! rows alone, so that steps can be recorded.

use std::ops::Range;

use super::super::experts::{
    ChooseArgs, CombineArgs, ExpertMatrices, ExpertProductArgs, GatherArgs, MOST_CHOICES, RouteArgs,
    SortArgs, choose, combine, experts_product, gather, most_tokens, route_logits, sort, tokens_of,
};
use super::super::product::grouped::{TOKENS, plan};
use super::super::product::{Epilogue, Matrix, ProductArgs, product};
use super::ffn::epilogue;
use super::lists::linear_scratch;
use super::qkv::{add_rows, norm_rows};
use crate::device::accelerator::{
    ExpertShape, ExpertWeights, LayerWeights, LinearWeight, Residual, StepContext, UpWeight,
};
use crate::device::runtime::{DevPtr, Runtime};
use crate::tensor::{DType, Half};
use crate::{Error, Result};

/// Whether the device has all kernels of experts of this type: one that failed its self-test is missing.
pub(super) fn has_kernels(rt: &dyn Runtime, dtype: DType) -> bool {
    let halves: &[Half] = if rt.info().sm >= 80 { &[Half::F16, Half::BF16] } else { &[Half::F16] };
    // Some sizes: the kernels of a type do not depend on them.
    let matrix = Matrix::of(dtype, 256, 256);
    let of_half = |&act: &Half| {
        let logits = ["few", "many"].map(|size| format!("experts_logits_{}_{size}", act.name()));
        let products = TOKENS.iter().filter_map(move |&tokens| plan(rt.info(), &matrix, act, tokens, 1));
        products.map(|plan| plan.kernel).chain(logits)
    };
    let choices = ["choose_128", "choose_256", "choose_1024", "sort", "gather", "combine"];
    let mut names =
        choices.map(|name| format!("experts_{name}")).into_iter().chain(halves.iter().flat_map(of_half));
    names.all(|name| rt.has_kernel(&name))
}

/// The matrix of gate and up in one.
fn fused(up: &UpWeight) -> Result<&LinearWeight> {
    match up {
        UpWeight::GateUp(w) => Ok(w),
        other => Err(Error::usage(format!("experts with {other:?}"))),
    }
}

fn matrices(w: &LinearWeight, stride: usize) -> ExpertMatrices {
    ExpertMatrices { ptr: w.ptr, bias: w.bias, stride, matrix: Matrix::of(w.dtype, w.n, w.k) }
}

/// Most rows of a group: the same for all products of a layer.
fn tokens(rt: &dyn Runtime, e: &ExpertShape, w: &ExpertWeights, rows: usize) -> usize {
    let most = |w: &LinearWeight| most_tokens(rt.info(), &Matrix::of(w.dtype, w.n, w.k));
    let most = most(&w.up).min(most(&w.down));
    tokens_of(rows, e.used, e.count).min(most)
}

/// See [`RowOp::FfnUp`](crate::device::accelerator::RowOp::FfnUp).
pub(super) fn up(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    layer: &LayerWeights,
    w: &ExpertWeights,
    residual: Residual,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    norm_rows(rt, cx, layer.ffn_norm, residual, &rows)?;
    // Of a divided layer the host waits for the choices: what follows them belongs to the second half.
    pieces(cx, rows)?.try_for_each(|rows| {
        route_of(rt, cx, w, rows.clone())?;
        if w.is_divided() { Ok(()) } else { up_of(rt, cx, w, rows) }
    })
}

/// Rows whose choices one launch sorts.
fn pieces(cx: &StepContext<'_>, rows: Range<usize>) -> Result<impl Iterator<Item = Range<usize>>> {
    let (e, _) = cx.expert_rows(rows.start)?;
    let most = (MOST_CHOICES / e.used).max(1);
    Ok(rows.clone().step_by(most).map(move |first| first..(first + most).min(rows.end)))
}

/// The choices of rows, and the activations of the shared expert.
fn route_of(rt: &dyn Runtime, cx: &StepContext<'_>, w: &ExpertWeights, rows: Range<usize>) -> Result<()> {
    let (shape, lane, n) = (cx.shape, cx.lane, rows.len());
    let (e, to) = cx.expert_rows(rows.start)?;
    let ws = cx.ws.at_row(shape, rows.start);
    let (d, act) = (shape.d_model, shape.act);
    let gate_w = w.shared.as_ref().map_or(DevPtr::NULL, |(_, gate)| *gate);
    let route = RouteArgs {
        router: w.router,
        gate_w,
        act,
        x: ws.x,
        ldx: d,
        logits: to.logits,
        gate: to.gate,
        bias: w.router_bias,
        rows: n,
        experts: e.count,
        d,
    };
    route_logits(rt, lane, &route)?;
    let chosen = ChooseArgs {
        logits: to.logits,
        ids: to.ids,
        weights: to.weights,
        rows: n,
        experts: e.count,
        used: e.used,
        of: e.weights,
    };
    choose(rt, lane, &chosen)?;
    let Some((mlp, _)) = &w.shared else { return Ok(()) };
    let shared = ProductArgs {
        w: fused(&mlp.up)?.into(),
        act,
        x: ws.x,
        ldx: d,
        y: to.shared,
        ldy: e.shared,
        m: n,
        epilogue: epilogue(shape.ffn),
        scratch: linear_scratch(cx),
    };
    product(rt, lane, &shared)
}

/// Activations of the choices whose experts are here.
fn up_of(rt: &dyn Runtime, cx: &StepContext<'_>, w: &ExpertWeights, rows: Range<usize>) -> Result<()> {
    let (shape, lane, n) = (cx.shape, cx.lane, rows.len());
    let (e, to) = cx.expert_rows(rows.start)?;
    let ws = cx.ws.at_row(shape, rows.start);
    let (d, act, tokens) = (shape.d_model, shape.act, tokens(rt, &e, w, n));
    let epilogue = epilogue(shape.ffn);
    let sorted = SortArgs {
        ids: to.ids,
        slots: w.slots,
        places: to.places,
        rows_of: to.rows,
        groups: to.groups,
        rows: n,
        used: e.used,
        experts: e.count,
        tokens,
    };
    sort(rt, lane, &sorted)?;
    gather(rt, lane, &GatherArgs { rows_of: to.rows, x: ws.x, ldx: d, xs: to.x, places: n * e.used, d })?;
    let product_of_experts = ExpertProductArgs {
        w: matrices(&w.up, w.up_stride),
        act,
        x: to.x,
        ldx: d,
        y: to.act,
        ldy: e.d_ff,
        groups: to.groups,
        rows: n,
        used: e.used,
        experts: e.count,
        tokens,
        epilogue,
    };
    experts_product(rt, lane, &product_of_experts)
}

/// See [`RowOp::FfnDown`](crate::device::accelerator::RowOp::FfnDown).
pub(super) fn down(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    w: &ExpertWeights,
    rows: Range<usize>,
) -> Result<()> {
    cx.check(&rows)?;
    pieces(cx, rows)?.try_for_each(|rows| {
        if w.is_divided() {
            up_of(rt, cx, w, rows.clone())?;
        }
        down_of(rt, cx, w, rows)
    })
}

fn down_of(rt: &dyn Runtime, cx: &StepContext<'_>, w: &ExpertWeights, rows: Range<usize>) -> Result<()> {
    let (shape, lane, n) = (cx.shape, cx.lane, rows.len());
    let (e, of) = cx.expert_rows(rows.start)?;
    let (d, act, tokens) = (shape.d_model, shape.act, tokens(rt, &e, w, n));
    let delta = cx.ws.at_row(shape, rows.start).delta;
    if let Some((mlp, _)) = &w.shared {
        let shared = ProductArgs {
            w: (&mlp.down).into(),
            act,
            x: of.shared,
            ldx: e.shared,
            y: delta,
            ldy: d,
            m: n,
            epilogue: Epilogue::F32,
            scratch: linear_scratch(cx),
        };
        product(rt, lane, &shared)?;
    }
    let product_of_experts = ExpertProductArgs {
        w: matrices(&w.down, w.down_stride),
        act,
        x: of.act,
        ldx: e.d_ff,
        y: of.out,
        ldy: d,
        groups: of.groups,
        rows: n,
        used: e.used,
        experts: e.count,
        tokens,
        epilogue: Epilogue::F32,
    };
    experts_product(rt, lane, &product_of_experts)?;
    let sum = CombineArgs {
        out: of.out,
        places: of.places,
        weights: of.weights,
        shared: if w.shared.is_some() { delta } else { DevPtr::NULL },
        gate: of.gate,
        delta,
        rows: n,
        used: e.used,
        d,
    };
    combine(rt, lane, &sum)
}

/// See [`RowOp::AddShare`](crate::device::accelerator::RowOp::AddShare).
pub(super) fn add_share(rt: &dyn Runtime, cx: &StepContext<'_>, rows: &Range<usize>) -> Result<()> {
    cx.check(rows)?;
    let (_, of) = cx.expert_rows(rows.start)?;
    let delta = cx.ws.at_row(cx.shape, rows.start).delta;
    add_rows(rt, cx, delta, (of.share, DevPtr::NULL), rows.len())
}
