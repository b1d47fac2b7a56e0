//! Products of up to [`DECODE_ROWS`](super::choose::DECODE_ROWS) rows (tests and benches go beyond): one launch of a kernel that reads
//! the weights once per tile of tokens.
//!
//! How k is divided among warps and blocks follows from the weight's shape, the kernel and the device alone,
//! so a token's result has the same bits in every batch that runs the same kernel ([`DecodePlan::kernel`]).
//!
//! Partial sums of split k live in a scratch buffer: [`COUNTER_BYTES`](super::COUNTER_BYTES) of arrival counters,
//! zeroed once (every launch leaves them zero). The rest of the [`scratch_bytes`] holds partial sums and needs no
//! initialisation.

use super::super::abi::{LinearParams, QuantLinearParams};
use super::args::{Matrix, ProductArgs};
use super::choose::{DENSE_TILES_ROWS, GEMV_ROWS, QUANT_TILES_ROWS};
use super::plan::DecodePlan;
use super::{gemv, quant, tiles};
use crate::Result;
use crate::device::runtime::{DeviceInfo, Lane, Launch, Params, Runtime};
use crate::tensor::Half;

impl DecodePlan {
    /// Plans the product of `m` tokens with a matrix.
    ///
    /// # Panics
    /// If no kernel takes this many tokens or this matrix.
    pub fn new(info: &DeviceInfo, matrix: &Matrix, act: Half, m: usize) -> DecodePlan {
        match matrix {
            Matrix::Dense { n, k } => {
                let (n, k) = (*n, *k);
                assert!(
                    (1..=DENSE_TILES_ROWS).contains(&m),
                    "linear of {m} tokens, takes 1 to {DENSE_TILES_ROWS}"
                );
                assert!(
                    n >= 1 && k >= 8 && k.is_multiple_of(8),
                    "linear by a {n} x {k} weight: k is a multiple of 8"
                );
                if m <= GEMV_ROWS { gemv::dense(info, act, m, n, k) } else { tiles::plan(info, act, m, n, k) }
            }
            Matrix::Quantised(layout) => {
                assert!(
                    (1..=QUANT_TILES_ROWS).contains(&m),
                    "quantised linear of {m} tokens, takes 1 to {QUANT_TILES_ROWS}"
                );
                if m <= GEMV_ROWS {
                    gemv::quantised(layout, act, gemv::k_split(info, layout))
                } else {
                    quant::plan(info, layout, act, m)
                }
            }
        }
    }
}

/// Bytes of scratch that a matrix needs for up to `max_m` tokens (counters included).
pub fn scratch_bytes(info: &DeviceInfo, matrix: &Matrix, max_m: usize) -> usize {
    // The largest number of tokens up to max_m of each kernel.
    let largest: &[usize] = match matrix {
        Matrix::Dense { .. } => &tiles::TOKENS,
        Matrix::Quantised(_) => &quant::TOKENS,
    };
    let largest = largest.iter().map(|&tokens| tokens.min(max_m)).chain([max_m]);
    let bytes = largest.map(|m| DecodePlan::new(info, matrix, Half::F16, m.max(1)).scratch_bytes());
    bytes.max().expect("there are kernels")
}

/// Enqueues a product.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If sizes or strides are not as [`ProductArgs`] says.
pub fn decode(rt: &dyn Runtime, lane: Lane, args: &ProductArgs) -> Result<()> {
    decode_as(rt, lane, args, &DecodePlan::new(rt.info(), &args.w.matrix, args.act, args.m))
}

/// [`decode`] with a given [`DecodePlan`] for the same shape, for tests and measurements.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// As [`decode`].
pub fn decode_as(rt: &dyn Runtime, lane: Lane, args: &ProductArgs, plan: &DecodePlan) -> Result<()> {
    let (k_split, stages) = (plan.k_split as u32, plan.stages as u32);
    let launch = |params: &[u8]| {
        let block = [256, 1, 1];
        rt.launch(lane, &Launch { kernel: &plan.kernel, grid: plan.grid, block, shared: plan.shared, params })
    };
    match args.w.matrix {
        Matrix::Dense { .. } => {
            let params = args.params("linear");
            launch(LinearParams { k_warps_log2: plan.k_warps_log2, stages, k_split, ..params }.bytes())
        }
        Matrix::Quantised(_) => {
            let linear = LinearParams { k_split, ..args.params("quantised linear") };
            launch(QuantLinearParams { linear, stages, ..Default::default() }.bytes())
        }
    }
}
