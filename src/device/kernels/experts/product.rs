//! Grouped products: each group of places by the matrix of its expert.

use super::super::abi::{ExpertLinearParams, ExpertQuantLinearParams, LinearParams, QuantLinearParams};
use super::super::product::grouped::{TOKENS, plan};
use super::super::product::{DecodePlan, Epilogue, Matrix, ProductArgs, Weight};
use super::sort::group_capacity;
use crate::Result;
use crate::device::runtime::{DevPtr, DeviceInfo, Lane, Launch, Params, Runtime};
use crate::tensor::Half;

/// One matrix of each expert that is on the device, all of one layout.
#[derive(Debug, Clone, Copy)]
pub struct ExpertMatrices {
    /// The matrix of slot 0, 16-byte aligned.
    pub ptr: DevPtr,
    /// f32 `[n]`, the bias of slot 0 in the order of the matrix's rows, or NULL.
    pub bias: DevPtr,
    /// Bytes from slot to slot, of matrices and of biases, a multiple of 16.
    pub stride: usize,
    /// Layout and shape of each.
    pub matrix: Matrix,
}

/// y\[place\] = W_slot·x\[place\] for the places of each group.
#[derive(Debug, Clone, Copy)]
pub struct ExpertProductArgs {
    /// W.
    pub w: ExpertMatrices,
    /// Type of the activations.
    pub act: Half,
    /// `[places][ldx]` of `act`, 16-byte aligned.
    pub x: DevPtr,
    /// Elements between places of x, a multiple of 8.
    pub ldx: usize,
    /// `[places][ldy]` of the type that [`Epilogue`] says. What belongs to no group is not written.
    pub y: DevPtr,
    /// Elements between places of y.
    pub ldy: usize,
    /// The list that [`sort`](super::sort()) made for `tokens`, of [`group_capacity`] entries.
    pub groups: DevPtr,
    /// Rows.
    pub rows: usize,
    /// k.
    pub used: usize,
    /// E.
    pub experts: usize,
    /// M, most places of a group: at most [`most_tokens`] of the matrix.
    pub tokens: usize,
    /// What becomes of the sums.
    pub epilogue: Epilogue,
}

impl ExpertProductArgs {
    /// The launch for one group, by the smallest kernel that holds one.
    ///
    /// # Panics
    /// If the device has none.
    pub fn plan(&self, info: &DeviceInfo) -> DecodePlan {
        let wide = TOKENS.into_iter().filter(|&tokens| tokens >= self.tokens);
        let found = wide.filter_map(|tokens| plan(info, &self.w.matrix, self.act, tokens, self.used)).next();
        found.unwrap_or_else(|| {
            panic!("{}: no kernel for groups of {} rows by {:?}", info.name, self.tokens, self.w.matrix)
        })
    }
}

/// The most rows of a group that the device has a kernel for with such matrices: 64, or 32 where a block has little shared memory.
///
/// M is the least of this for all matrices of a layer and of [`tokens_of`](super::tokens_of).
pub fn most_tokens(info: &DeviceInfo, matrix: &Matrix) -> usize {
    let fits = |tokens: &usize| plan(info, matrix, Half::F16, *tokens, 1).is_some();
    TOKENS.into_iter().rfind(fits).expect("few rows take little shared memory")
}

/// Enqueues a grouped product. A place's bits depend on the kernel and on no other place.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If sizes, strides or addresses are not as [`ExpertProductArgs`] says, or the device has no kernel for such groups.
pub fn experts_product(rt: &dyn Runtime, lane: Lane, args: &ExpertProductArgs) -> Result<()> {
    let places = args.rows * args.used;
    if places == 0 {
        return Ok(());
    }
    let ExpertMatrices { ptr, bias, stride, matrix } = args.w;
    assert!(
        stride.is_multiple_of(16) && args.groups.0.is_multiple_of(16),
        "experts' matrices {stride} bytes apart: matrices and groups lie on 16 bytes"
    );
    let plan = args.plan(rt.info());
    let one = ProductArgs {
        w: Weight { ptr, matrix, bias },
        act: args.act,
        x: args.x,
        ldx: args.ldx,
        y: args.y,
        ldy: args.ldy,
        m: places,
        epilogue: args.epilogue,
        scratch: DevPtr::NULL,
    };
    let linear = LinearParams {
        partials: DevPtr::NULL,
        k_warps_log2: plan.k_warps_log2,
        stages: plan.stages as u32,
        k_split: plan.k_split as u32,
        ..one.params("product of experts")
    };
    let launch = |params: &[u8]| {
        let grid = [plan.grid[0], group_capacity(places, args.experts, args.tokens) as u32, 1];
        let block = [256, 1, 1];
        rt.launch(lane, &Launch { kernel: &plan.kernel, grid, block, shared: plan.shared, params })
    };
    let (groups, stride) = (args.groups, stride as u64);
    match matrix {
        Matrix::Dense { .. } => launch(ExpertLinearParams { linear, groups, stride }.bytes()),
        Matrix::Quantised(_) => {
            let quant = QuantLinearParams { linear, stages: plan.stages as u32, ..Default::default() };
            launch(ExpertQuantLinearParams { quant, groups, stride }.bytes())
        }
    }
}
