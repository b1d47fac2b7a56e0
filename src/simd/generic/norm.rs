//! RMS norm and layer norm of one row.
//!
//!   rms    out = x · w / √(mean(x²) + eps)
//!   layer  out = (x - mean) · w / √(mean((x - mean)²) + eps) + b
//!
//! A row (2-32 KiB) stays in L1 between the passes, so their number costs little.

use super::reduce::{Square, Value, sum};
use crate::reference;
use crate::simd::vector::{Simd, SimdOp};

/// 1 / √(total / n + eps), in double precision so that only the sum's own rounding remains.
#[inline(always)]
fn inverse_root(total: f32, n: usize, eps: f32) -> f32 {
    (1.0 / (total as f64 / n as f64 + eps as f64).sqrt()) as f32
}

/// `out = (x - mean)·scale·w (+ b)`.
///
/// # Safety
/// `x`, `w` (and `b`, if any) are readable and `out` is writable for `n` elements; `out` may be exactly `x`.
#[inline(always)]
unsafe fn apply<S: Simd>(
    s: S,
    x: *const f32,
    w: *const f32,
    b: Option<*const f32>,
    out: *mut f32,
    n: usize,
    (mean, scale): (f32, f32),
) {
    let (mean, scale) = (s.splat(mean), s.splat(scale));
    let mut i = 0;
    // SAFETY: every access is at i..i + LANES <= n, or a tail of n - i elements.
    unsafe {
        while i + S::LANES <= n {
            let y = s.mul(s.sub(s.load(x.add(i)), mean), scale);
            let v = match b {
                Some(b) => s.fma(y, s.load(w.add(i)), s.load(b.add(i))),
                None => s.mul(y, s.load(w.add(i))),
            };
            s.store(out.add(i), v);
            i += S::LANES;
        }
        if i < n {
            let k = n - i;
            let y = s.mul(s.sub(s.load_tail(x.add(i), k, 0.0), mean), scale);
            let wt = s.load_tail(w.add(i), k, 0.0);
            let v = match b {
                Some(b) => s.fma(y, wt, s.load_tail(b.add(i), k, 0.0)),
                None => s.mul(y, wt),
            };
            s.store_tail(out.add(i), k, v);
        }
    }
}

/// `out = x·w / √(mean(x²) + eps)`.
pub(crate) struct RmsNorm<'a> {
    pub x: &'a [f32],
    pub w: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl SimdOp for RmsNorm<'_> {
    type Output = ();

    fn reference(self) {
        reference::norm::rms_norm(self.x, self.w, self.eps, self.out)
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) {
        let RmsNorm { x, w, eps, out } = self;
        let n = x.len();
        assert!(w.len() == n && out.len() == n);
        let scale = inverse_root(sum(s, x, Square { centre: 0.0 }), n, eps);
        // SAFETY: three slices of n elements.
        unsafe { apply(s, x.as_ptr(), w.as_ptr(), None, out.as_mut_ptr(), n, (0.0, scale)) }
    }
}

/// Each run of `w.len()` elements of `x` normalised in place: the heads of queries or keys, or one row.
pub(crate) struct RmsNormHeads<'a> {
    pub x: &'a mut [f32],
    pub w: &'a [f32],
    pub eps: f32,
}

impl SimdOp for RmsNormHeads<'_> {
    type Output = ();

    fn reference(self) {
        reference::norm::rms_norm_heads(self.x, self.w, self.eps)
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) {
        let RmsNormHeads { x, w, eps } = self;
        let n = w.len();
        for head in x.chunks_exact_mut(n.max(1)) {
            let scale = inverse_root(sum(s, head, Square { centre: 0.0 }), n, eps);
            let p = head.as_mut_ptr();
            // SAFETY: `head` and `w` have n elements; the output is exactly the input.
            unsafe { apply(s, p, w.as_ptr(), None, p, n, (0.0, scale)) }
        }
    }
}

/// `x += delta`, then `out = rms_norm(x)`: the sum is squared while it is in registers.
pub(crate) struct AddRmsNorm<'a> {
    pub x: &'a mut [f32],
    pub delta: &'a [f32],
    pub w: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl SimdOp for AddRmsNorm<'_> {
    type Output = ();

    fn reference(self) {
        reference::norm::add_rms_norm(self.x, self.delta, self.w, self.eps, self.out)
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) {
        let AddRmsNorm { x, delta, w, eps, out } = self;
        let (n, l) = (x.len(), S::LANES);
        assert!(delta.len() == n && w.len() == n && out.len() == n);
        let (px, pd) = (x.as_mut_ptr(), delta.as_ptr());
        let zero = s.splat(0.0);
        let mut acc = [zero; 4];
        let mut i = 0;
        // Same accumulators and folding as `sum`, so that fused and separate give the same bits.
        // SAFETY: every access is at i..i + k·LANES <= n, or a tail of n - i elements, in slices of n.
        unsafe {
            while i + 4 * l <= n {
                for (k, a) in acc.iter_mut().enumerate() {
                    let at = i + k * l;
                    let v = s.add(s.load(px.add(at)), s.load(pd.add(at)));
                    s.store(px.add(at), v);
                    *a = s.fma(v, v, *a);
                }
                i += 4 * l;
            }
            while i + l <= n {
                let v = s.add(s.load(px.add(i)), s.load(pd.add(i)));
                s.store(px.add(i), v);
                acc[0] = s.fma(v, v, acc[0]);
                i += l;
            }
            if i < n {
                let k = n - i;
                let v = s.add(s.load_tail(px.add(i), k, 0.0), s.load_tail(pd.add(i), k, 0.0));
                s.store_tail(px.add(i), k, v);
                acc[1] = s.fma(v, v, acc[1]);
            }
        }
        let total = s.reduce_sum(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])));
        let scale = inverse_root(total, n, eps);
        // SAFETY: three slices of n elements.
        unsafe { apply(s, x.as_ptr(), w.as_ptr(), None, out.as_mut_ptr(), n, (0.0, scale)) }
    }
}

/// `out = (x - mean)·w / √(var + eps) + b`.
pub(crate) struct LayerNorm<'a> {
    pub x: &'a [f32],
    pub w: &'a [f32],
    pub b: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl SimdOp for LayerNorm<'_> {
    type Output = ();

    fn reference(self) {
        reference::norm::layer_norm(self.x, self.w, self.b, self.eps, self.out)
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) {
        let LayerNorm { x, w, b, eps, out } = self;
        let n = x.len();
        assert!(w.len() == n && b.len() == n && out.len() == n);
        let mean = (sum(s, x, Value) as f64 / n as f64) as f32;
        let scale = inverse_root(sum(s, x, Square { centre: mean }), n, eps);
        // SAFETY: four slices of n elements.
        unsafe { apply(s, x.as_ptr(), w.as_ptr(), Some(b.as_ptr()), out.as_mut_ptr(), n, (mean, scale)) }
    }
}
