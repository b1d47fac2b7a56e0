//! e^x and tanh, lane by lane: the exponentials of `simd/exp.rs` in vectors.
//!
//! error      <= 2 ulp where the result is normal (tests/kernels/elementwise.rs walks the whole range)

use crate::simd::exp::{LN2_HI, LN2_LO, MIN, POLY};
use crate::simd::vector::Simd;

/// e^r and n, where x = n ln 2 + r.
#[inline(always)]
fn reduced<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-LN2_HI), x);
    let r = s.fma(n, s.splat(-LN2_LO), r);
    let mut p = s.splat(POLY[0]);
    for &k in &POLY[1..] {
        p = s.fma(p, r, s.splat(k));
    }
    (s.add(s.fma(p, s.mul(r, r), r), s.splat(1.0)), n)
}

/// e^x: +inf above 88.7228, 0 below -103.98, subnormals in between, NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // Beyond these the result is 0 or infinite whatever x is; NaN passes, as the second operand.
    let x = s.max(s.splat(-105.0), s.min(s.splat(89.0), x));
    let (p, n) = reduced(s, x);
    s.scale2(p, n)
}

/// e^x for x <= 0: exactly 1 at 0; exactly 0 below −87 (and at −∞); NaN stays NaN. Fewer instructions than [`exp`] where
/// scaling by powers of two has none of its own.
#[inline(always)]
pub(crate) fn exp_nonpositive<S: Simd>(s: S, x: S::F) -> S::F {
    // max keeps its second operand when that is NaN.
    let (p, n) = reduced(s, s.max(s.splat(MIN), x));
    s.select_lt(x, s.splat(MIN), s.splat(0.0), s.scale2_normal(p, n))
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

#[cfg(test)]
mod tests {
    use crate::simd::Caps;
    use crate::simd::avx2::Avx2;
    use crate::simd::avx512::Avx512;
    use crate::simd::exp::exp1;
    use crate::simd::generic::exp::exp_nonpositive;
    use crate::simd::vector::Simd;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn exp_avx512(x: &mut [f32; 16]) {
        let s = Avx512::token();
        // SAFETY: 16 elements.
        unsafe { s.store(x.as_mut_ptr(), exp_nonpositive(s, s.load(x.as_ptr()))) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn exp_avx2(x: &mut [f32; 16]) {
        let s = Avx2::token();
        for half in x.chunks_exact_mut(8) {
            // SAFETY: 8 elements.
            unsafe { s.store(half.as_mut_ptr(), exp_nonpositive(s, s.load(half.as_ptr()))) }
        }
    }

    #[test]
    fn exp_is_within_two_ulp_exact_at_zero_and_clean_at_the_ends() {
        let mut evals: Vec<(&str, Box<dyn Fn(f32) -> f32>)> = vec![("scalar", Box::new(exp1))];
        let one = |f: unsafe fn(&mut [f32; 16])| {
            move |x: f32| {
                let mut v = [x; 16];
                // SAFETY: only added below where the CPU has the features.
                unsafe { f(&mut v) };
                assert!(v.iter().all(|y| y.to_bits() == v[0].to_bits()), "lanes differ");
                v[0]
            }
        };
        if Caps::get().avx512 {
            evals.push(("avx512", Box::new(one(exp_avx512))));
        } else {
            println!("skipped: avx512 exp, this CPU lacks it");
        }
        if Caps::get().avx2 {
            evals.push(("avx2", Box::new(one(exp_avx2))));
        } else {
            println!("skipped: avx2 exp, this CPU lacks it");
        }
        for (name, exp) in evals {
            assert_eq!(exp(0.0), 1.0, "{name}");
            assert_eq!(exp(-0.0), 1.0, "{name}");
            for x in [f32::NEG_INFINITY, -1e30, -88.0, f32::MIN] {
                assert_eq!(exp(x), 0.0, "{name} {x}");
            }
            assert!(exp(f32::NAN).is_nan(), "{name}");
            for i in 0..87_000 {
                let x = -(i as f32) * 1e-3 - 1e-7;
                let want = (x as f64).exp();
                let ulp = f32::EPSILON as f64 * want;
                assert!(
                    (exp(x) as f64 - want).abs() <= 2.0 * ulp,
                    "{name}: exp({x}) = {}, want {want}",
                    exp(x)
                );
            }
        }
    }
}
