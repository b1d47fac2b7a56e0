//! The AVX-512 tier: the generic kernels, sixteen lanes at a time, and bf16 rounding by instruction where
//! the CPU has it. AMX machines share it: tiles serve linear layers and attention only.

mod bf16;
mod lanes;
mod quantise;

pub(super) use lanes::Avx512;

use super::generic::{activation, convert, embed, map, norm, reduce, rope, softmax};
use super::{Isa, Kernels};
use crate::rope::RopePairing;
use crate::tensor::DType;

/// AVX-512: every operation, in wider vectors.
pub(super) static KERNELS: Kernels = BASE;
/// With AVX512_BF16.
pub(super) static KERNELS_BF16: Kernels = WITH_BF16;
/// AMX.
pub(super) static KERNELS_AMX: Kernels = Kernels { name: "amx", isa: Isa::Amx, ..BASE };
/// AMX with AVX512_BF16: every AMX CPU so far.
pub(super) static KERNELS_AMX_BF16: Kernels = Kernels { name: "amx", isa: Isa::Amx, ..WITH_BF16 };

const WITH_BF16: Kernels = Kernels { f32_to_bf16: bf16::f32_to_bf16, ..BASE };
const BASE: Kernels = Kernels {
    name: "avx512",
    isa: Isa::Avx512,
    rms_norm,
    rms_norm_heads,
    add_rms_norm,
    layer_norm,
    add,
    rope_heads,
    silu_mul_inplace,
    gelu_tanh_mul_inplace,
    clamped_swiglu_inplace,
    relu,
    softcap,
    max_and_logsumexp,
    argmax,
    embed_row,
    f32_to_bf16,
    quantise_row: quantise::quantise_row,
};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    norm::rms_norm(Avx512::token(), x, w, eps, out)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn rms_norm_heads(x: &mut [f32], w: &[f32], eps: f32) {
    norm::rms_norm_heads(Avx512::token(), x, w, eps)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn add_rms_norm(x: &mut [f32], delta: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    norm::add_rms_norm(Avx512::token(), x, delta, w, eps, out)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn layer_norm(x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
    norm::layer_norm(Avx512::token(), x, w, b, eps, out)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn add(x: &mut [f32], delta: &[f32]) {
    map::map2_inplace(Avx512::token(), x, delta, activation::Add)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn rope_heads(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], pairing: RopePairing) {
    rope::rope_heads(Avx512::token(), x, head_dim, cos, sin, pairing)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn silu_mul_inplace(gate: &mut [f32], up: &[f32]) {
    map::map2_inplace(Avx512::token(), gate, up, activation::SiluMul)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn gelu_tanh_mul_inplace(gate: &mut [f32], up: &[f32]) {
    map::map2_inplace(Avx512::token(), gate, up, activation::GeluTanhMul)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn clamped_swiglu_inplace(gate: &mut [f32], up: &[f32]) {
    map::map2_inplace(Avx512::token(), gate, up, activation::ClampedSwiGlu)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn relu(x: &mut [f32]) {
    map::map1(Avx512::token(), x, activation::Relu)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn softcap(x: &mut [f32], cap: f32) {
    map::map1(Avx512::token(), x, activation::Softcap(cap))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn max_and_logsumexp(x: &[f32]) -> (f32, f64) {
    softmax::max_and_logsumexp(Avx512::token(), x)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn argmax(x: &[f32]) -> usize {
    reduce::argmax(Avx512::token(), x)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn embed_row(dtype: DType, row: &[u8], scale: f32, out: &mut [f32]) {
    embed::embed_row(Avx512::token(), dtype, row, scale, out)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn f32_to_bf16(x: &[f32], out: &mut [u16]) {
    convert::f32_to_bf16(Avx512::token(), x, out)
}
