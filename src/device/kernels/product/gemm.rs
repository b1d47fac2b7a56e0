//! Products of many tokens with dense weights (prefill): `cuda/gemm.cu`, and `cuda/gemm_sm90a.cu` on Hopper.
//!
//! [`plan`] picks the tile and the number of splits of K that fill the device best. It sees the matrix and the *bucket*
//! of the token count, never the count itself: within a bucket a row's result does not depend on the other rows.

use super::super::abi::{GemmOutput, GemmParams, GemmSplit, GemmTmaParams, TensorMap};
use super::args::{COUNTER_BYTES, Matrix, ProductArgs};
use super::choose::{gemm_bucket, row_bucket};
use crate::Result;
use crate::device::runtime::{DeviceInfo, Lane, Launch, Params, Runtime};
use crate::tensor::Half;

/// Rows of weights in a tile, the same in every kernel here.
const ROWS: usize = 128;
/// A split sums at least this many columns: in shorter ones, combining the sums costs more than the split saves.
const MIN_SPLIT: usize = 256;

/// The instructions that a kernel multiplies and loads with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// mma.sync, operands through registers (any device; f16 only).
    Sync,
    /// mma.sync, operands by cp.async (sm_80 and up).
    Async,
    /// wgmma, operands by TMA (sm_90a).
    Tma,
}

/// The launch plan of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmPlan {
    /// Which kernel.
    pub path: Path,
    /// Tokens in a tile.
    pub tokens: usize,
    /// Parts of K that are summed separately.
    pub splits: usize,
    /// Columns of a part, a multiple of the tile's depth.
    pub k_per_split: usize,
}

impl Path {
    /// The path for this device.
    pub fn of(rt: &dyn Runtime, dtype: Half) -> Path {
        let info = rt.info();
        let has = |path: Path| path.tokens().iter().all(|&tokens| rt.has_kernel(&path.kernel(dtype, tokens)));
        if info.sm == 90 && has(Path::Tma) {
            Path::Tma
        } else if info.sm >= 80 {
            Path::Async
        } else {
            Path::Sync
        }
    }

    /// The name of this path's kernel.
    pub fn kernel(self, dtype: Half, tokens: usize) -> String {
        let suffix = match self {
            Path::Sync => "_sync",
            Path::Async => "",
            Path::Tma => "_sm90a",
        };
        format!("gemm_{}_{ROWS}x{tokens}{suffix}", dtype.name())
    }

    /// The token counts of this path's tiles.
    pub fn tokens(self) -> [usize; 2] {
        match self {
            Path::Sync | Path::Async => [128, 64],
            Path::Tma => [256, 128],
        }
    }

    /// Columns of a stage.
    pub fn depth(self) -> usize {
        match self {
            Path::Sync | Path::Async => 32,
            Path::Tma => 64,
        }
    }

    /// Bytes of shared memory: the ring, and the barriers of [`Path::Tma`].
    fn shared(self, tokens: usize) -> u32 {
        let stage = (ROWS + tokens) * self.depth() * 2;
        let bytes = match self {
            Path::Sync => 2 * stage,
            Path::Async => 3 * stage,
            Path::Tma => (if tokens == 256 { 4 } else { 6 }) * stage + 128,
        };
        bytes as u32
    }
}

/// The tile and splits with the least estimated time for [`gemm_bucket`]`(m)` tokens.
///
/// A device computes `multiprocessors` tiles at a time. In units of one token by one column of a tile, a tile takes
/// `tokens * k`, plus filling the ring and writing the sums (about 512 columns' worth: f32 sums at the memory
/// bandwidth of one multiprocessor); the last split of a tile reads the sums of all.
pub fn plan(info: &DeviceInfo, path: Path, m: usize, n: usize, k: usize) -> GemmPlan {
    const ENDS: usize = 512;
    const PARTIAL: usize = 128;
    let sms = info.multiprocessors.max(1) as usize;
    let mut best: Option<(usize, GemmPlan)> = None;
    for tokens in path.tokens() {
        let tiles = n.div_ceil(ROWS) * gemm_bucket(m).div_ceil(tokens);
        // Only grids that leave multiprocessors idle are split, so partial sums fit `scratch_bytes`.
        let most = (sms / tiles).min(k / MIN_SPLIT).max(1);
        for splits in 1..=most {
            let k_per_split = k.div_ceil(splits).next_multiple_of(path.depth());
            if k.div_ceil(k_per_split) != splits {
                continue; // rounding left the last splits empty: the same plan as with fewer splits
            }
            let meet = if splits == 1 { 0 } else { PARTIAL * (splits + 1) };
            // A narrow tile reads more shared memory per product.
            let narrow = if tokens == path.tokens()[1] { tokens / 8 } else { 0 };
            let time = (tiles * splits).div_ceil(sms) * (tokens + narrow) * (k_per_split + ENDS + meet);
            if best.is_none_or(|(t, _)| time < t) {
                best = Some((time, GemmPlan { path, tokens, splits, k_per_split }));
            }
        }
    }
    best.expect("one split is always possible").1
}

/// Bytes of scratch that any product needs: counters (zeroed once; every launch leaves them zero), then partial sums of
/// at most one tile per multiprocessor.
pub fn scratch_bytes(info: &DeviceInfo) -> usize {
    COUNTER_BYTES + info.multiprocessors.max(1) as usize * ROWS * 256 * 4
}

/// Enqueues the product, planned by [`plan`].
///
/// # Errors
/// Whatever the runtime reports.
///
/// # Panics
/// If sizes or strides are not as [`ProductArgs`] says.
pub fn gemm(rt: &dyn Runtime, lane: Lane, args: &ProductArgs) -> Result<()> {
    let path = Path::of(rt, args.act);
    let matrix = &args.w.matrix;
    // Few rows come here where their own kernels are missing: then as all of their bucket.
    gemm_as(rt, lane, args, &plan(rt.info(), path, row_bucket(args.m), matrix.n(), matrix.k()))
}

/// Enqueues the product as `plan` says.
///
/// # Errors
/// Whatever the runtime reports.
///
/// # Panics
/// If sizes or strides are not as [`ProductArgs`] says, or the plan's parts do not make up K.
pub fn gemm_as(rt: &dyn Runtime, lane: Lane, args: &ProductArgs, plan: &GemmPlan) -> Result<()> {
    gemm_by(rt, lane, args, plan, &plan.path.kernel(args.act, plan.tokens))
}

/// Enqueues the product as `plan` says, with another kernel (tests use one with a planted mistake).
///
/// # Errors
/// Whatever the runtime reports.
///
/// # Panics
/// As [`gemm_as`].
#[doc(hidden)]
pub fn gemm_by(
    rt: &dyn Runtime,
    lane: Lane,
    args: &ProductArgs,
    plan: &GemmPlan,
    kernel: &str,
) -> Result<()> {
    let ProductArgs { m, ldx, ldy, .. } = *args;
    let Matrix::Dense { n, k } = args.w.matrix else { panic!("gemm: quantised weights are decoded first") };
    assert!(k.is_multiple_of(8) && k > 0, "gemm: k = {k}, wanted a positive multiple of 8");
    args.check("gemm");
    assert_eq!(k.div_ceil(plan.k_per_split), plan.splits, "gemm: {plan:?} with k = {k}");
    assert!(plan.k_per_split.is_multiple_of(plan.path.depth()), "gemm: {plan:?}");
    if m == 0 || n == 0 {
        return Ok(());
    }
    let tiles = n.div_ceil(ROWS) * m.div_ceil(plan.tokens);
    if plan.splits > 1 {
        let sums = tiles * plan.splits * ROWS * plan.tokens * 4;
        assert!(
            COUNTER_BYTES + sums <= scratch_bytes(rt.info()) && tiles * 4 <= COUNTER_BYTES,
            "gemm: {plan:?} of {m} x {n} needs {sums} bytes of partial sums"
        );
    }
    let out = GemmOutput {
        y: args.y,
        bias: args.w.bias,
        ldy: ldy as u64,
        m: m as u32,
        n: n as u32,
        epilogue: args.epilogue.code(),
        pad: 0,
    };
    let split = GemmSplit {
        partial: args.scratch.add(COUNTER_BYTES),
        arrived: args.scratch,
        splits: plan.splits as u32,
        k_per_split: plan.k_per_split as u32,
    };
    let shared = plan.path.shared(plan.tokens);
    if plan.path == Path::Tma {
        let map = |base, rows: usize, stride: usize, box_rows: usize| {
            let bytes = rt.tensor_map_2d(base, rows as u64, k as u64, stride as u64, box_rows as u32, 64)?;
            Ok::<_, crate::Error>(TensorMap { bytes })
        };
        let params = GemmTmaParams {
            w: map(args.w.ptr, n, k, ROWS)?,
            x: map(args.x, m, ldx, plan.tokens)?,
            out,
            split,
            k: k as u32,
            ..Default::default()
        };
        // The kernel is persistent: one block per multiprocessor takes items in turn.
        let blocks = (tiles * plan.splits).min(rt.info().multiprocessors.max(1) as usize);
        return rt.launch(
            lane,
            &Launch {
                kernel,
                grid: [blocks as u32, 1, 1],
                block: [384, 1, 1],
                shared,
                params: params.bytes(),
            },
        );
    }
    let params = GemmParams {
        out,
        split,
        w: args.w.ptr,
        x: args.x,
        ldx: ldx as u64,
        k: k as u32,
        ..Default::default()
    };
    let grid = [tiles as u32, plan.splits as u32, 1];
    rt.launch(lane, &Launch { kernel, grid, block: [128, 1, 1], shared, params: params.bytes() })
}
