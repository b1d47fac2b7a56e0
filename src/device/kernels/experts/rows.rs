//! Launching `cuda/experts_rows.cu`.

use super::super::abi::{ExpertCombineParams, ExpertGatherParams};
use super::super::elementwise::launch;
use crate::Result;
use crate::device::runtime::{DevPtr, Lane, Runtime};

/// Elements of 16 bits in 16 bytes.
const VECTOR: usize = 8;

/// Operands of [`gather`].
#[derive(Debug, Clone, Copy)]
pub struct GatherArgs {
    /// u32 `[places]`: the row of each place, or [`NONE`](super::NONE): nothing is copied.
    pub rows_of: DevPtr,
    /// `[..][ldx]` of a 16-bit type, 16-byte aligned.
    pub x: DevPtr,
    /// Elements between rows of x, a multiple of 8.
    pub ldx: usize,
    /// `[places][d]`, 16-byte aligned.
    pub xs: DevPtr,
    /// Places: rows times k.
    pub places: usize,
    /// Elements of a row, a multiple of 8.
    pub d: usize,
}

/// Enqueues xs\[place\] = x\[rows_of\[place\]\].
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If sizes or addresses are not as [`GatherArgs`] says.
pub fn gather(rt: &dyn Runtime, lane: Lane, args: &GatherArgs) -> Result<()> {
    let (d, ldx) = (args.d, args.ldx);
    assert!(
        d.is_multiple_of(VECTOR) && ldx.is_multiple_of(VECTOR) && ldx >= d,
        "gathering rows of {d} elements, {ldx} apart: multiples of {VECTOR}"
    );
    assert!(args.x.0.is_multiple_of(16) && args.xs.0.is_multiple_of(16), "gathered rows lie on 16 bytes");
    let params = ExpertGatherParams {
        rows: args.rows_of,
        x: args.x,
        xs: args.xs,
        places: args.places as u32,
        d: (d / VECTOR) as u32,
        ldx: (ldx / VECTOR) as u32,
        ..Default::default()
    };
    launch(rt, lane, "experts_gather", [args.places, 1], 128, 0, &params)
}

/// Operands of [`combine`].
#[derive(Debug, Clone, Copy)]
pub struct CombineArgs {
    /// f32 `[places][d]`, 16-byte aligned.
    pub out: DevPtr,
    /// u32 `[rows][used]`: the place of each choice, or [`NONE`](super::NONE): it adds nothing.
    pub places: DevPtr,
    /// f32 `[rows][used]`.
    pub weights: DevPtr,
    /// f32 `[rows][d]`, 16-byte aligned, what the shared expert gives; it may be `delta`; NULL: there is none.
    pub shared: DevPtr,
    /// f32 `[rows]`, logits of the shared expert's gate; only read with `shared`.
    pub gate: DevPtr,
    /// f32 `[rows][d]`, 16-byte aligned.
    pub delta: DevPtr,
    /// Rows.
    pub rows: usize,
    /// k.
    pub used: usize,
    /// Elements of a row, a multiple of 4.
    pub d: usize,
}

/// Enqueues delta\[row\] = σ(gate\[row\])·shared\[row\] + Σ_j weights\[row\]\[j\]·out\[places\[row\]\[j\]\], in this order.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If sizes or addresses are not as [`CombineArgs`] says.
pub fn combine(rt: &dyn Runtime, lane: Lane, args: &CombineArgs) -> Result<()> {
    assert!(args.d.is_multiple_of(4), "combining rows of {} elements: a multiple of 4", args.d);
    let aligned = [args.out, args.shared, args.delta].iter().all(|at| at.0.is_multiple_of(16));
    assert!(aligned, "combined rows lie on 16 bytes");
    let params = ExpertCombineParams {
        out: args.out,
        places: args.places,
        weights: args.weights,
        shared: args.shared,
        gate: args.gate,
        delta: args.delta,
        rows: args.rows as u32,
        used: args.used as u32,
        d: args.d as u32,
        ..Default::default()
    };
    launch(rt, lane, "experts_combine", [args.rows, args.d.div_ceil(1024)], 256, 0, &params)
}
