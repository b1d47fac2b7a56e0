//! SwiGLU (plain and clamped), GeGLU and ReLU, soft caps and sums: elementwise.

use super::exp::{sigmoid, tanh};
use super::map::{Map1, Map2};
use crate::reference::activation::{self, SWIGLU_GAIN, SWIGLU_LIMIT};
use crate::simd::vector::Simd;

/// a + b.
#[derive(Clone, Copy)]
pub(crate) struct Add;
impl Map2 for Add {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F, b: S::F) -> S::F {
        s.add(a, b)
    }

    fn reference(self, a: &mut [f32], b: &[f32]) {
        activation::add(a, b);
    }
}

/// silu(gate)·up, silu(x) = x / (1 + e^-x). Below -88.7 it is -0: off by less than 3e-37·|up|.
#[derive(Clone, Copy)]
pub(crate) struct SiluMul;
impl Map2 for SiluMul {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        s.mul(s.mul(gate, sigmoid(s, gate)), up)
    }

    fn reference(self, a: &mut [f32], b: &[f32]) {
        activation::silu_mul_inplace(a, b);
    }
}

/// gelu(gate)·up with the tanh approximation: ½x(1 + tanh u) = x·sigmoid(2u), u = √(2/π)(x + 0.044715x³).
/// The right-hand side does not cancel where tanh u is near -1.
#[derive(Clone, Copy)]
pub(crate) struct GeluTanhMul;
impl Map2 for GeluTanhMul {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        let x2 = s.mul(gate, gate);
        const TWO_ROOT: f64 = 1.595_769_121_605_730_8; // 2√(2/π)
        const CUBIC: f32 = (TWO_ROOT * 0.044715) as f32;
        let two_u = s.mul(gate, s.fma(x2, s.splat(CUBIC), s.splat(TWO_ROOT as f32)));
        s.mul(s.mul(gate, sigmoid(s, two_u)), up)
    }

    fn reference(self, a: &mut [f32], b: &[f32]) {
        activation::gelu_tanh_mul_inplace(a, b);
    }
}

/// g·sigmoid(1.702 g)·(u + 1), g = min(gate, 7), u = min(max(up, -7), 7) (gpt-oss).
#[derive(Clone, Copy)]
pub(crate) struct ClampedSwiGlu;
impl Map2 for ClampedSwiGlu {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        // min and max keep their second operand when that is NaN.
        let limit = s.splat(SWIGLU_LIMIT);
        let g = s.min(limit, gate);
        let u = s.max(s.splat(-SWIGLU_LIMIT), s.min(limit, up));
        s.mul(s.mul(g, sigmoid(s, s.mul(g, s.splat(SWIGLU_GAIN)))), s.add(u, s.splat(1.0)))
    }

    fn reference(self, a: &mut [f32], b: &[f32]) {
        activation::clamped_swiglu_inplace(a, b);
    }
}

/// max(x, 0); NaN stays NaN.
#[derive(Clone, Copy)]
pub(crate) struct Relu;
impl Map1 for Relu {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F) -> S::F {
        s.max(s.splat(0.0), a)
    }

    fn reference(self, x: &mut [f32]) {
        activation::relu(x);
    }
}

/// cap·tanh(x / cap).
#[derive(Clone, Copy)]
pub(crate) struct Softcap(pub f32);
impl Map1 for Softcap {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F) -> S::F {
        let cap = s.splat(self.0);
        s.mul(cap, tanh(s, s.div(a, cap)))
    }

    fn reference(self, x: &mut [f32]) {
        activation::softcap(x, self.0);
    }
}
