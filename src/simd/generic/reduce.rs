//! Sums and maxima over a row, in an order that depends on its length alone.
//!
//! Four accumulators hide the latency of an add or FMA (4 cycles); they are folded as
//! (0 + 1) + (2 + 3), then lane halves. Rounding is at most (n / (4·LANES) + 2 + log2 LANES) adds deep.

use crate::reference;
use crate::simd::vector::{Simd, SimdOp};

/// A sum over terms t(x).
pub(crate) trait Term<S: Simd>: Copy {
    /// acc + t(x); must leave `acc` unchanged for the fill of a tail.
    fn add_to(self, s: S, acc: S::F, x: S::F) -> S::F;
    /// The value of lanes beyond the end, chosen so that their term adds nothing.
    fn fill(self) -> f32;
}

/// x.
#[derive(Clone, Copy)]
pub(crate) struct Value;
impl<S: Simd> Term<S> for Value {
    #[inline(always)]
    fn add_to(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.add(acc, x)
    }
    #[inline(always)]
    fn fill(self) -> f32 {
        0.0
    }
}

/// (x - centre)².
#[derive(Clone, Copy)]
pub(crate) struct Square {
    /// Subtracted first.
    pub centre: f32,
}
impl<S: Simd> Term<S> for Square {
    #[inline(always)]
    fn add_to(self, s: S, acc: S::F, x: S::F) -> S::F {
        let d = s.sub(x, s.splat(self.centre));
        s.fma(d, d, acc)
    }
    #[inline(always)]
    fn fill(self) -> f32 {
        self.centre
    }
}

/// Σ t(x).
#[inline(always)]
pub(crate) fn sum<S: Simd>(s: S, x: &[f32], t: impl Term<S>) -> f32 {
    let (n, l) = (x.len(), S::LANES);
    let p = x.as_ptr();
    let zero = s.splat(0.0);
    let (mut a0, mut a1, mut a2, mut a3) = (zero, zero, zero, zero);
    let mut i = 0;
    // SAFETY: every access is at i..i + k·LANES <= n, or a tail of n - i elements, within `x`.
    unsafe {
        while i + 4 * l <= n {
            a0 = t.add_to(s, a0, s.load(p.add(i)));
            a1 = t.add_to(s, a1, s.load(p.add(i + l)));
            a2 = t.add_to(s, a2, s.load(p.add(i + 2 * l)));
            a3 = t.add_to(s, a3, s.load(p.add(i + 3 * l)));
            i += 4 * l;
        }
        while i + l <= n {
            a0 = t.add_to(s, a0, s.load(p.add(i)));
            i += l;
        }
        if i < n {
            a1 = t.add_to(s, a1, s.load_tail(p.add(i), n - i, t.fill()));
        }
    }
    s.reduce_sum(s.add(s.add(a0, a1), s.add(a2, a3)))
}

/// The greatest element that is not NaN; -inf if there is none.
#[inline(always)]
pub(crate) fn max<S: Simd>(s: S, x: &[f32]) -> f32 {
    let (n, l) = (x.len(), S::LANES);
    let p = x.as_ptr();
    let low = s.splat(f32::NEG_INFINITY);
    let (mut a0, mut a1, mut a2, mut a3) = (low, low, low, low);
    let mut i = 0;
    // The accumulator is the second operand: a NaN element yields the accumulator.
    // SAFETY: every access is at i..i + k·LANES <= n, or a tail of n - i elements, within `x`.
    unsafe {
        while i + 4 * l <= n {
            a0 = s.max(s.load(p.add(i)), a0);
            a1 = s.max(s.load(p.add(i + l)), a1);
            a2 = s.max(s.load(p.add(i + 2 * l)), a2);
            a3 = s.max(s.load(p.add(i + 3 * l)), a3);
            i += 4 * l;
        }
        while i + l <= n {
            a0 = s.max(s.load(p.add(i)), a0);
            i += l;
        }
        if i < n {
            a1 = s.max(s.load_tail(p.add(i), n - i, f32::NEG_INFINITY), a1);
        }
    }
    s.reduce_max(s.max(s.max(a0, a1), s.max(a2, a3)))
}

/// The lowest index of the greatest element. NaN is never chosen; if all elements are NaN the result is 0.
pub(crate) struct Argmax<'a> {
    pub x: &'a [f32],
}

impl SimdOp for Argmax<'_> {
    type Output = usize;

    fn reference(self) -> usize {
        reference::reduce::argmax(self.x)
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) -> usize {
        let Argmax { x } = self;
        // Two passes: the second stops at the winner, and neither carries indices in lanes.
        let best = max(s, x);
        let want = s.splat(best);
        let (n, p) = (x.len(), x.as_ptr());
        let mut i = 0;
        // SAFETY: every access is at i..i + LANES <= n, or a tail of n - i elements, within `x`.
        unsafe {
            while i + S::LANES <= n {
                let hit = s.eq_mask(s.load(p.add(i)), want);
                if hit != 0 {
                    return i + hit.trailing_zeros() as usize;
                }
                i += S::LANES;
            }
            if i < n {
                let hit = s.eq_mask(s.load_tail(p.add(i), n - i, f32::NAN), want);
                if hit != 0 {
                    return i + hit.trailing_zeros() as usize;
                }
            }
        }
        0
    }
}
