//! The AVX2 tier: the generic kernels, eight lanes at a time.

mod lanes;
mod quantise;

pub(super) use lanes::Avx2;

use super::generic::{activation, convert, embed, map, norm, reduce, rope, softmax};
use super::{Isa, Kernels};
use crate::rope::RopePairing;
use crate::tensor::DType;

/// AVX2: every operation of the reference tier, replaced.
pub(super) static KERNELS: Kernels = Kernels {
    name: "avx2",
    isa: Isa::Avx2,
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

#[target_feature(enable = "avx2,fma,f16c")]
fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    norm::rms_norm(Avx2::token(), x, w, eps, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rms_norm_heads(x: &mut [f32], w: &[f32], eps: f32) {
    norm::rms_norm_heads(Avx2::token(), x, w, eps)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn add_rms_norm(x: &mut [f32], delta: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    norm::add_rms_norm(Avx2::token(), x, delta, w, eps, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn layer_norm(x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
    norm::layer_norm(Avx2::token(), x, w, b, eps, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn add(x: &mut [f32], delta: &[f32]) {
    map::map2_inplace(Avx2::token(), x, delta, activation::Add)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rope_heads(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], pairing: RopePairing) {
    rope::rope_heads(Avx2::token(), x, head_dim, cos, sin, pairing)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn silu_mul_inplace(gate: &mut [f32], up: &[f32]) {
    map::map2_inplace(Avx2::token(), gate, up, activation::SiluMul)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn gelu_tanh_mul_inplace(gate: &mut [f32], up: &[f32]) {
    map::map2_inplace(Avx2::token(), gate, up, activation::GeluTanhMul)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn clamped_swiglu_inplace(gate: &mut [f32], up: &[f32]) {
    map::map2_inplace(Avx2::token(), gate, up, activation::ClampedSwiGlu)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn relu(x: &mut [f32]) {
    map::map1(Avx2::token(), x, activation::Relu)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn softcap(x: &mut [f32], cap: f32) {
    map::map1(Avx2::token(), x, activation::Softcap(cap))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn max_and_logsumexp(x: &[f32]) -> (f32, f64) {
    softmax::max_and_logsumexp(Avx2::token(), x)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn argmax(x: &[f32]) -> usize {
    reduce::argmax(Avx2::token(), x)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn embed_row(dtype: DType, row: &[u8], scale: f32, out: &mut [f32]) {
    embed::embed_row(Avx2::token(), dtype, row, scale, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn f32_to_bf16(x: &[f32], out: &mut [u16]) {
    convert::f32_to_bf16(Avx2::token(), x, out)
}
