//! `y = x·Wᵀ + b` on rows of any dtype, decoded one by one; sums in f32.

use super::cpu::CpuKernels;
use super::matrix::Matrix;
use crate::model::Ffn;
use crate::simd::Kernels;

impl Matrix<'_> {
    /// Calls `out(row of x, row of W, sum)`; `x` is `[m][k]`.
    fn each(&self, kernels: &Kernels, x: &[f32], mut out: impl FnMut(usize, usize, f32)) {
        let dot = dot();
        let mut row = vec![0f32; self.k];
        for (n, bytes) in self.data.chunks_exact(self.row_bytes()).enumerate() {
            kernels.embed_row(self.dtype, bytes, 1.0, &mut row);
            let bias = self.bias.get(n).copied().unwrap_or(0.0);
            for (m, x) in x.chunks_exact(self.k).enumerate() {
                out(m, n, dot(&row, x) + bias);
            }
        }
    }
}

/// How products are computed.
#[derive(Clone)]
pub struct Arithmetic {
    /// The kernels that decode rows and apply activations.
    pub kernels: &'static Kernels,
    /// The CPU kernels that multiply, if results are exact; otherwise the dot products below do.
    pub cpu: Option<CpuKernels>,
}

impl Arithmetic {
    /// Writes `y[m][column + n]`; rows of `y` are `ldy` long. `fine` marks the projections of queries, keys and values,
    /// whose input the CPU quantises finely.
    pub fn linear(&self, w: &Matrix<'_>, fine: bool, x: &[f32], y: &mut [f32], ldy: usize, column: usize) {
        match &self.cpu {
            Some(cpu) => cpu.linear(w, fine, x, y, ldy, column),
            None => w.each(self.kernels, x, |m, n, sum| y[m * ldy + column + n] = sum),
        }
    }
}

/// `y[m][ff] = activation(gate·x)·(up·x)`, or `relu(up·x)` where there is no gate.
pub fn feed_forward(
    by: &Arithmetic,
    ffn: Ffn,
    gate: Option<&Matrix<'_>>,
    up: &Matrix<'_>,
    x: &[f32],
    y: &mut [f32],
) {
    let (ff, kernels) = (up.n(), by.kernels);
    let Some(gate) = gate else {
        assert_eq!(ffn, Ffn::Relu, "a feed-forward without a gate");
        by.linear(up, false, x, y, ff, 0);
        return kernels.relu(y);
    };
    let mut ups = vec![0f32; y.len()];
    by.linear(gate, false, x, y, ff, 0);
    by.linear(up, false, x, &mut ups, ff, 0);
    match ffn {
        Ffn::SwiGlu => kernels.silu_mul_inplace(y, &ups),
        Ffn::ClampedSwiGlu => kernels.clamped_swiglu_inplace(y, &ups),
        Ffn::GeGlu => kernels.gelu_tanh_mul_inplace(y, &ups),
        Ffn::Relu => panic!("a gate in a feed-forward of ReLU"),
    }
}

/// Sums products in 32 interleaved parts and adds these in order, so a row's result does not depend on the other rows.
#[inline(always)]
fn dot_body(a: &[f32], b: &[f32], fused: impl Fn(f32, f32, f32) -> f32) -> f32 {
    const PARTS: usize = 32;
    let mut parts = [0f32; PARTS];
    let (a, a_rest) = a.as_chunks::<PARTS>();
    let (b, b_rest) = b.as_chunks::<PARTS>();
    for (a, b) in a.iter().zip(b) {
        for i in 0..PARTS {
            parts[i] = fused(a[i], b[i], parts[i]);
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    parts.iter().sum::<f32>() + rest
}

/// The fastest dot product that this CPU supports.
pub(super) fn dot() -> fn(&[f32], &[f32]) -> f32 {
    fn plain(a: &[f32], b: &[f32]) -> f32 {
        dot_body(a, b, |a, b, sum| a * b + sum)
    }
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2(a: &[f32], b: &[f32]) -> f32 {
            dot_body(a, b, f32::mul_add)
        }
        if crate::simd::Caps::get().avx2 {
            // SAFETY: this CPU has AVX2 and FMA.
            return |a, b| unsafe { avx2(a, b) };
        }
    }
    plain
}
