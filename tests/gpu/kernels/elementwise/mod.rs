//! Row-wise kernels of accelerators (embedding, norms, RoPE with append, activations) against the definition.
//!
//! Exact where the arithmetic is: dequantisation, sums of two, rounding to 16 bits, copies. Elsewhere each test says
//! where its tolerance comes from, in u = 2^-24, the rounding of one f32 operation.

mod activation;
mod embed;
mod norm;
mod rope;

use std::sync::Arc;

use crate::support::gpu::memory::*;
use crate::support::gpu::{self, Rng};
use proptest::prelude::*;
use tandem::cache::KvType;
use tandem::device::kernels::elementwise::*;
use tandem::device::{DevPtr, NormWeight, Runtime};
use tandem::model::{Ffn, Norm, QkNorm, RopePairing};
use tandem::reference;
use tandem::tensor::{DType, Half, set_scales};

const U: f64 = 1.0 / (1u64 << 24) as f64;

fn normals(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.normal()).collect()
}

/// Checks `got` against `want` within `error`, element by element; NaN never passes.
#[track_caller]
fn close(what: &str, i: usize, got: f64, want: f64, error: f64) {
    assert!((got - want).abs() <= error, "{what}, element {i}: {got} instead of {want} (within {error:e})");
}

fn half_type() -> impl Strategy<Value = Half> {
    prop_oneof![Just(Half::F16), Just(Half::BF16)]
}

#[test]
fn every_order_of_threads_gives_the_same() {
    gpu::for_schedules(|rt, _| {
        let act = Half::F16;
        let tokens = Some(vec![1, u32::MAX, 0]);
        let scale = 2.0;
        let dtype = DType::Q5_K;
        embed::check(rt, &embed::Case { dtype, d: 512, vocab: 2, tokens, scale, positions: None, seed: 1 });
        for d in [36, 1540] {
            let c = norm::Case { post: true, layer: true, bias: true, ..norm::Case::plain(act, 3, d) };
            norm::check(rt, &c);
        }
        for norms in [QkNorm::PerHead, QkNorm::Whole] {
            let norms = Some(norms);
            rope::check(rt, &rope::Case { publish: true, norms, ..rope::Case::plain(act, 3, 80) });
        }
        activation::check(rt, Ffn::GeGlu, act, 2, 12, true);
    });
}
