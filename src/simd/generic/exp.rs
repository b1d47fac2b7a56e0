//! e^x and tanh, lane by lane.
//!
//!   x = n ln2 + r, |r| <= ln2 / 2       e^x = 2^n e^r       n ln2 is subtracted in two parts
//!   e^r by its Taylor polynomial of degree 7 (remainder r^8/8! < 5.2e-9 e^r, a twelfth of an ulp)
//!
//! error      <= 2 ulp where the result is normal (tests/kernels/elementwise.rs walks the whole range);
//!            +inf above 88.7228, 0 below -103.98, subnormals in between, NaN stays NaN

use crate::simd::vector::Simd;

/// e^x.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // Beyond these the result is 0 or infinite whatever x is; NaN passes, as the second operand.
    let x = s.max(s.splat(-105.0), s.min(s.splat(89.0), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    // ln2 = 0x3f317200 (its low 9 bits are zero, so n * LN2_HI is exact) + the rest.
    let r = s.fma(n, s.splat(-0.693_145_75), x);
    let r = s.fma(n, s.splat(-1.428_606_8e-6), r);
    let mut p = s.splat(1.0 / 5040.0);
    p = s.fma(p, r, s.splat(1.0 / 720.0));
    p = s.fma(p, r, s.splat(1.0 / 120.0));
    p = s.fma(p, r, s.splat(1.0 / 24.0));
    p = s.fma(p, r, s.splat(1.0 / 6.0));
    p = s.fma(p, r, s.splat(0.5));
    p = s.fma(p, r, s.splat(1.0));
    p = s.fma(p, r, s.splat(1.0));
    s.scale2(p, n)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let e = exp(s, s.sub(s.splat(0.0), x));
    s.div(s.splat(1.0), s.add(s.splat(1.0), e))
}

/// tanh x. Below 0.625 by an odd polynomial, since 1 - 2 / (e^2x + 1) cancels there.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let a = s.abs(x);
    let e = exp(s, s.add(a, a));
    let large = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(e, s.splat(1.0))));
    // Cephes' tanhf: x + x z P(z), z = x^2 (Moshier, single precision, 1.3e-7 relative).
    let z = s.mul(a, a);
    let mut p = s.splat(-5.704_988_7e-3);
    p = s.fma(p, z, s.splat(2.063_909e-2));
    p = s.fma(p, z, s.splat(-5.373_971_6e-2));
    p = s.fma(p, z, s.splat(1.333_144_2e-1));
    p = s.fma(p, z, s.splat(-3.333_328e-1));
    let small = s.fma(s.mul(p, z), a, a);
    s.with_sign(s.select_lt(a, s.splat(0.625), small, large), x)
}
