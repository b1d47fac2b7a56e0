//! Elementwise loops: full vectors, then one masked tail.
//!
//! The body is a value of a type that implements [`Map1`] or [`Map2`], not a closure: a closure would
//! be compiled without the target features of the tier. Lanes are independent, so an element's result
//! does not depend on where in the vector it falls, nor on the length.

use crate::simd::vector::Simd;

/// y = f(a).
pub(crate) trait Map1<S: Simd>: Copy {
    /// One vector of it.
    fn apply(self, s: S, a: S::F) -> S::F;
}

/// y = f(a, b).
pub(crate) trait Map2<S: Simd>: Copy {
    /// One vector of it.
    fn apply(self, s: S, a: S::F, b: S::F) -> S::F;
}

/// `x[i] = f(x[i])`.
#[inline(always)]
pub(crate) fn map1<S: Simd>(s: S, x: &mut [f32], f: impl Map1<S>) {
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

/// `out[i] = f(a[i], b[i])`; lengths are equal (the table asserts it, and so does this).
#[inline(always)]
pub(crate) fn map2<S: Simd>(s: S, a: &[f32], b: &[f32], out: &mut [f32], f: impl Map2<S>) {
    assert!(a.len() == out.len() && b.len() == out.len());
    // SAFETY: three slices of the same length.
    unsafe { map2_raw(s, a.as_ptr(), b.as_ptr(), out.as_mut_ptr(), out.len(), f) }
}

/// `a[i] = f(a[i], b[i])`.
#[inline(always)]
pub(crate) fn map2_inplace<S: Simd>(s: S, a: &mut [f32], b: &[f32], f: impl Map2<S>) {
    assert!(a.len() == b.len());
    let p = a.as_mut_ptr();
    // SAFETY: two slices of the same length; `out` is exactly `a`.
    unsafe { map2_raw(s, p, b.as_ptr(), p, a.len(), f) }
}

/// # Safety
/// `a` and `b` are readable and `out` is writable for `n` elements; `out` may be exactly `a` or `b`,
/// since each vector is read before it is written, but must not overlap them otherwise.
#[inline(always)]
unsafe fn map2_raw<S: Simd>(s: S, a: *const f32, b: *const f32, out: *mut f32, n: usize, f: impl Map2<S>) {
    let mut i = 0;
    // SAFETY: every access is at i..i + LANES <= n, or a tail of n - i elements.
    unsafe {
        while i + S::LANES <= n {
            s.store(out.add(i), f.apply(s, s.load(a.add(i)), s.load(b.add(i))));
            i += S::LANES;
        }
        if i < n {
            let (va, vb) = (s.load_tail(a.add(i), n - i, 0.0), s.load_tail(b.add(i), n - i, 0.0));
            s.store_tail(out.add(i), n - i, f.apply(s, va, vb));
        }
    }
}
