//! Launching `cuda/norm.cu`.

use super::super::abi::NormParams;
use crate::Result;
use crate::device::accelerator::NormWeight;
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::model::Norm;
use crate::tensor::Half;

/// A warp takes a row of up to this many elements, a block takes a longer one.
const WARP_ROW: usize = 1024;
/// Rows of a block where a warp takes a row.
const WARPS: usize = 4;
/// The longest row: 1024 threads with 16 elements each.
const MAX_D: usize = 16384;

/// Operands of [`norm`]. Optional addresses may be NULL.
#[derive(Debug, Clone, Copy)]
pub struct NormRows {
    /// Which norm.
    pub norm: Norm,
    /// f32 `[..][d]`.
    pub hidden: DevPtr,
    /// Rows added to hidden, f32 `[..][ld_delta]`; optional.
    pub delta: DevPtr,
    /// f32 `[d]`, added to delta; optional.
    pub delta_bias: DevPtr,
    /// f32 `[d]`: weights of an RMS norm of delta before it is added; optional.
    pub post: DevPtr,
    /// Weights of the norm; without them x is the sum itself. Not read without `x`.
    pub weight: NormWeight,
    /// Where hidden + delta is written, f32 `[rows][d]`: `hidden` itself unless `row_list` is given; optional.
    pub sum: DevPtr,
    /// Where the norm is written, `[rows][ld_x]` of `act`; optional.
    pub x: DevPtr,
    /// Type of `x`.
    pub act: Half,
    /// u32 `[rows]` in device memory: the rows of hidden and delta to take, in order (`u32::MAX` stands for a row of
    /// zeros); optional.
    pub row_list: DevPtr,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub d: usize,
    /// Distance of delta's rows.
    pub ld_delta: usize,
    /// Distance of x's rows.
    pub ld_x: usize,
}

/// sum = hidden + post(delta), x = norm(sum), or the sum itself without weights.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If a row length is no multiple of four or exceeds 16384.
pub fn norm(runtime: &dyn Runtime, lane: Lane, args: &NormRows) -> Result<()> {
    let d = args.d;
    assert!(
        d.is_multiple_of(4) && args.ld_delta.is_multiple_of(4) && args.ld_x.is_multiple_of(4) && d <= MAX_D,
        "norm: d {d}, ld_delta {}, ld_x {}: wanted multiples of 4, d up to {MAX_D}",
        args.ld_delta,
        args.ld_x
    );
    assert!(
        args.row_list.is_null() || args.sum != args.hidden,
        "norm: listed rows cannot be summed in place: a row might be listed after its place was overwritten"
    );
    let (kind, eps) = match args.norm {
        Norm::Rms { eps } => ("rms", eps),
        Norm::Layer { eps } => ("layer", eps),
    };
    let params = NormParams {
        hidden: args.hidden,
        delta: args.delta,
        delta_bias: args.delta_bias,
        post_w: args.post,
        w: args.weight.w,
        b: args.weight.b,
        sum: args.sum,
        x: args.x,
        row_list: args.row_list,
        rows: args.rows as u32,
        d: d as u32,
        ld_delta: args.ld_delta as u32,
        ld_x: args.ld_x as u32,
        eps,
        post_eps: eps,
    };
    let (tile, grid, block, shared) = if d <= WARP_ROW {
        ("warp", args.rows.div_ceil(WARPS), 32 * WARPS, 0)
    } else {
        // Two vectors of four elements per thread as long as 1024 threads cover the row.
        let vectors = if d <= MAX_D / 2 { 2 } else { 4 };
        let threads = d.div_ceil(4 * vectors).next_multiple_of(32);
        (if vectors == 2 { "block2" } else { "block4" }, args.rows, threads, 128)
    };
    let kernel = format!("norm_{kind}_{}_{tile}", args.act.name());
    super::launch(runtime, lane, &kernel, [grid, 1], block, shared, &params)
}
