//! The maximum and log Σ e^x of a row of logits, for sampling.

use super::exp::exp;
use super::reduce::max;
use crate::reference;
use crate::simd::vector::{Simd, SimdOp};

/// Elements whose exponentials are summed in f32 before the sum moves to f64: a vocabulary has
/// 10^5 terms, too many to add in single precision.
const BLOCK: usize = 2048;

/// Σ e^(x - shift), in blocks.
#[inline(always)]
fn sum_exp<S: Simd>(s: S, x: &[f32], shift: f32) -> f64 {
    let m = s.splat(shift);
    let l = S::LANES;
    let mut total = 0f64;
    for block in x.chunks(BLOCK) {
        let (n, p) = (block.len(), block.as_ptr());
        let (mut a0, mut a1) = (s.splat(0.0), s.splat(0.0));
        let mut i = 0;
        // SAFETY: every access is at i..i + k·LANES <= n, or a tail of n - i elements, within `block`.
        unsafe {
            while i + 2 * l <= n {
                a0 = s.add(a0, exp(s, s.sub(s.load(p.add(i)), m)));
                a1 = s.add(a1, exp(s, s.sub(s.load(p.add(i + l)), m)));
                i += 2 * l;
            }
            while i < n {
                let v = if i + l <= n {
                    s.load(p.add(i))
                } else {
                    s.load_tail(p.add(i), n - i, f32::NEG_INFINITY)
                };
                a0 = s.add(a0, exp(s, s.sub(v, m)));
                i += l;
            }
        }
        total += s.reduce_sum(s.add(a0, a1)) as f64;
    }
    total
}

/// max x (NaN ignored) and log Σ e^x (NaN if any is).
pub(crate) struct MaxAndLogsumexp<'a> {
    pub x: &'a [f32],
}

impl SimdOp for MaxAndLogsumexp<'_> {
    type Output = (f32, f64);

    fn reference(self) -> (f32, f64) {
        reference::softmax::max_and_logsumexp(self.x)
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) -> (f32, f64) {
        let MaxAndLogsumexp { x } = self;
        let m = max(s, x);
        if m.is_infinite() {
            let any_nan = x.iter().any(|v| v.is_nan());
            return (m, if any_nan { f64::NAN } else { m as f64 });
        }
        (m, m as f64 + sum_exp(s, x, m).ln())
    }
}
