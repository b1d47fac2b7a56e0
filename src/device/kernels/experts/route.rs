//! Launching `cuda/experts_route.cu`.

use super::super::abi::{ExpertChooseParams, ExpertRouteParams};
use super::super::elementwise::launch;
use crate::Result;
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::model::RouterWeights;
use crate::tensor::Half;

/// Most experts of a layer: a warp holds a row's logits in registers.
pub const MOST_EXPERTS: usize = 1024;

/// Most rows for the kernel whose blocks take one expert each, so that few rows fill the device; beyond, weights of the
/// router are used for 32 rows at a time. The largest number of a row bucket.
const FEW_ROWS: usize = 16;
const THREADS: usize = 256;

/// Operands of [`route_logits`].
#[derive(Debug, Clone, Copy)]
pub struct RouteArgs {
    /// R, f32 `[experts][d]`, 16-byte aligned.
    pub router: DevPtr,
    /// Weights of a shared expert's gate, f32 `[d]`, 16-byte aligned; NULL: there is none.
    pub gate_w: DevPtr,
    /// Type of `x`.
    pub act: Half,
    /// `[rows][ldx]` of `act`, 8-byte aligned.
    pub x: DevPtr,
    /// Elements between rows of x, a multiple of 4.
    pub ldx: usize,
    /// f32 `[rows][experts]`: R·x, and the bias.
    pub logits: DevPtr,
    /// f32 `[rows]`: gate_w·x; only written with `gate_w`.
    pub gate: DevPtr,
    /// f32 `[experts]`, added to the logits; NULL: none.
    pub bias: DevPtr,
    /// Rows.
    pub rows: usize,
    /// E.
    pub experts: usize,
    /// Elements of a row, a multiple of 4.
    pub d: usize,
}

/// Enqueues the logits of a router. A row's bits depend on no other row, but on whether there are more than 16.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If sizes or addresses are not as [`RouteArgs`] says.
pub fn route_logits(rt: &dyn Runtime, lane: Lane, args: &RouteArgs) -> Result<()> {
    let (rows, experts, d, ldx) = (args.rows, args.experts, args.d, args.ldx);
    assert!(
        experts > 0 && d > 0 && d.is_multiple_of(4) && ldx >= d && ldx.is_multiple_of(4),
        "router of {experts} experts by x [{rows}][{ldx}] of {d} elements: multiples of 4"
    );
    let aligned = args.router.0.is_multiple_of(16) && args.gate_w.0.is_multiple_of(16);
    assert!(aligned && args.x.0.is_multiple_of(8), "router: weights lie on 16 bytes, x on 8");
    let params = ExpertRouteParams {
        router: args.router,
        gate_w: args.gate_w,
        x: args.x,
        logits: args.logits,
        gate: args.gate,
        bias: args.bias,
        rows: rows as u32,
        experts: experts as u32,
        d: d as u32,
        ldx: ldx as u32,
    };
    let products = experts + usize::from(!args.gate_w.is_null());
    // Sums of 4 rows and 8 warps.
    let (size, grid, shared) = match rows <= FEW_ROWS {
        true => ("few", [products, rows.div_ceil(4)], 4 * 8 * 4),
        false => ("many", [products.div_ceil(8), rows.div_ceil(32)], 0),
    };
    launch(rt, lane, &format!("experts_logits_{}_{size}", args.act.name()), grid, THREADS, shared, &params)
}

/// Operands of [`choose`].
#[derive(Debug, Clone, Copy)]
pub struct ChooseArgs {
    /// f32 `[rows][experts]`.
    pub logits: DevPtr,
    /// u32 `[rows][used]`: the experts with the largest logits, the largest first, the lowest index first among equals.
    pub ids: DevPtr,
    /// f32 `[rows][used]`: their weights.
    pub weights: DevPtr,
    /// Rows.
    pub rows: usize,
    /// E, up to [`MOST_EXPERTS`].
    pub experts: usize,
    /// k, from 1 to E.
    pub used: usize,
    /// What the weights are a softmax of.
    pub of: RouterWeights,
}

/// Enqueues the choice of experts. A logit that is no number is chosen last, and makes weights that are none.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If there are too many experts, or `used` is 0 or more than there are.
pub fn choose(rt: &dyn Runtime, lane: Lane, args: &ChooseArgs) -> Result<()> {
    let (used, experts) = (args.used, args.experts);
    assert!(
        (1..=MOST_EXPERTS).contains(&experts) && (1..=experts).contains(&used),
        "choice of {used} of {experts} experts: of at most {MOST_EXPERTS}"
    );
    let params = ExpertChooseParams {
        logits: args.logits,
        ids: args.ids,
        weights: args.weights,
        rows: args.rows as u32,
        experts: experts as u32,
        used: used as u32,
        of_all: u32::from(args.of == RouterWeights::OfAll),
    };
    let kernel = match experts {
        ..=128 => "experts_choose_128",
        129..=256 => "experts_choose_256",
        _ => "experts_choose_1024",
    };
    launch(rt, lane, kernel, [args.rows.div_ceil(4), 1], 128, 0, &params)
}
