//! Elementwise loops: full vectors, then one masked tail.
//!
//! The body is a value of a type that implements [`Map1`] or [`Map2`], not a closure: a closure would
//! be compiled without the target features of the tier. Lanes are independent, so an element's result
//! does not depend on where in the vector it falls, nor on the length.

use crate::simd::vector::{Simd, SimdOp};

/// y = f(a).
pub(crate) trait Map1: Copy {
    /// One vector of it.
    fn apply<S: Simd>(self, s: S, a: S::F) -> S::F;
    /// All of `x`, by the reference tier.
    fn reference(self, x: &mut [f32]);
}

/// y = f(a, b).
pub(crate) trait Map2: Copy {
    /// One vector of it.
    fn apply<S: Simd>(self, s: S, a: S::F, b: S::F) -> S::F;
    /// All of `a`, by the reference tier.
    fn reference(self, a: &mut [f32], b: &[f32]);
}

/// `x[i] = f(x[i])`.
pub(crate) struct InPlace1<'a, F> {
    pub x: &'a mut [f32],
    pub f: F,
}

impl<F: Map1> SimdOp for InPlace1<'_, F> {
    type Output = ();

    fn reference(self) {
        self.f.reference(self.x);
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) {
        let InPlace1 { x, f } = self;
        let n = x.len();
        let p = x.as_mut_ptr();
        let mut i = 0;
        // SAFETY: every access is at i..i + LANES <= n, or a tail of n - i elements, within `x`.
        unsafe {
            while i + S::LANES <= n {
                s.store(p.add(i), f.apply(s, s.load(p.add(i))));
                i += S::LANES;
            }
            if i < n {
                s.store_tail(p.add(i), n - i, f.apply(s, s.load_tail(p.add(i), n - i, 0.0)));
            }
        }
    }
}

/// `a[i] = f(a[i], b[i])`; lengths are equal (the table asserts it, and so does this).
pub(crate) struct InPlace2<'a, F> {
    pub a: &'a mut [f32],
    pub b: &'a [f32],
    pub f: F,
}

impl<F: Map2> SimdOp for InPlace2<'_, F> {
    type Output = ();

    fn reference(self) {
        self.f.reference(self.a, self.b);
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) {
        let InPlace2 { a, b, f } = self;
        assert!(a.len() == b.len());
        let (n, a, b) = (a.len(), a.as_mut_ptr(), b.as_ptr());
        let mut i = 0;
        // SAFETY: every access is at i..i + LANES <= n, or a tail of n - i elements, of two slices of n.
        unsafe {
            while i + S::LANES <= n {
                s.store(a.add(i), f.apply(s, s.load(a.add(i)), s.load(b.add(i))));
                i += S::LANES;
            }
            if i < n {
                let (va, vb) = (s.load_tail(a.add(i), n - i, 0.0), s.load_tail(b.add(i), n - i, 0.0));
                s.store_tail(a.add(i), n - i, f.apply(s, va, vb));
            }
        }
    }
}
