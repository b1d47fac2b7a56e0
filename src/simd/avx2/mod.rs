//! The AVX2 tier: the generic kernels, eight lanes at a time.

mod lanes;
mod quantise;

pub(super) use lanes::Avx2;
pub(super) use quantise::quantise_row;

use super::vector::SimdOp;

/// Runs an operation with this tier's vectors.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn run<O: SimdOp>(op: O) -> O::Output {
    op.vectors(Avx2::token())
}
