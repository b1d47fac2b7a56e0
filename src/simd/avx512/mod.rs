//! The AVX-512 tier: the generic kernels, sixteen lanes at a time, and bf16 rounding by instruction where
//! the CPU has it. AMX machines share it: tiles serve linear layers and attention only.

mod bf16;
mod lanes;
mod quantise;

pub(super) use bf16::f32_to_bf16;
pub(super) use lanes::Avx512;
pub(super) use quantise::quantise_row;

use super::vector::SimdOp;

/// Runs an operation with this tier's vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) fn run<O: SimdOp>(op: O) -> O::Output {
    op.vectors(Avx512::token())
}
