//! The few vector operations that attention needs, so that its f32 bodies are written once.
//!
//! Everything is `#[inline(always)]`: the bodies are instantiated inside `#[target_feature]` functions,
//! which is where the instructions become legal.

#![allow(clippy::missing_safety_doc)] // one contract for the whole trait, stated on it

use std::arch::x86_64::*;

use super::exp::{LN2_HI, LN2_LO, MIN, POLY};

/// A vector of `N` f32.
///
/// # Safety
/// All functions need the CPU features of the implementing type; loads and stores need `N` (or as
/// documented) accessible elements, of any alignment.
pub(super) unsafe trait Simd {
    /// Lanes; divides 16.
    const N: usize;
    /// Rows per register tile: with 2 vectors each they fill the registers.
    const ROWS: usize;
    /// The same where each row and vector needs two accumulators.
    const WIDE_F16_ROWS: usize;
    /// How often keys and values are asked for ahead of time.
    const AHEAD: usize;
    type F: Copy;
    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// a·b + c, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; `b` where either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The largest lane.
    unsafe fn hmax(a: Self::F) -> f32;
    /// `x` in the lanes with lo <= base + lane < hi, −∞ in the others.
    unsafe fn keep(x: Self::F, base: usize, lo: usize, hi: usize) -> Self::F;
    /// 2^n for integral n in [−126, 127], as f32 lanes; and the nearest integer.
    unsafe fn round(x: Self::F) -> Self::F;
    unsafe fn pow2(n: Self::F) -> Self::F;
    /// `y` where !(x < bound), else 0: NaN in `x` keeps `y`.
    unsafe fn zero_below(x: Self::F, bound: f32, y: Self::F) -> Self::F;
    /// `N` pairs of 16-bit elements: the first elements and the second ones, as f32.
    unsafe fn bf16_pairs(p: *const u16) -> (Self::F, Self::F);
    /// `N` f16 elements, as f32.
    unsafe fn f16(p: *const u16) -> Self::F;
    /// The two f32 at `p` in turns.
    unsafe fn splat_pair(p: *const f32) -> Self::F;
    /// The sums of neighbours: those of `a`, then those of `b`.
    unsafe fn add_pairs(a: Self::F, b: Self::F) -> Self::F;
    /// 0 in every other lane, beginning with the second.
    unsafe fn first_of_pairs(x: Self::F) -> Self::F;

    /// e^x for x <= 0: |error| < 2 ulp; exactly 1 at 0; exactly 0 below −87 (and at −∞); NaN stays NaN.
    ///
    /// Cody-Waite reduction by ln 2 in two parts, degree-6 polynomial (Cephes).
    #[inline(always)]
    unsafe fn exp(x: Self::F) -> Self::F {
        // SAFETY: the trait's contract: the caller has this type's CPU features.
        unsafe {
            // max keeps its second operand when that is NaN.
            let c = Self::max(Self::splat(MIN), x);
            let n = Self::round(Self::mul(c, Self::splat(std::f32::consts::LOG2_E)));
            let r = Self::fma(n, Self::splat(-LN2_HI), c);
            let r = Self::fma(n, Self::splat(-LN2_LO), r);
            let mut p = Self::splat(POLY[0]);
            for &k in &POLY[1..] {
                p = Self::fma(p, r, Self::splat(k));
            }
            let r2 = Self::mul(r, r);
            let p = Self::add(Self::fma(p, r2, r), Self::splat(1.0));
            Self::zero_below(x, MIN, Self::mul(p, Self::pow2(n)))
        }
    }
}

/// 16 lanes.
pub(super) struct Avx512;

// SAFETY: each function uses only AVX-512 F/BW/DQ/VL and below, which the trait's caller guarantees.
#[allow(clippy::undocumented_unsafe_blocks)] // the impl's argument holds for each of them
unsafe impl Simd for Avx512 {
    const N: usize = 16;
    const ROWS: usize = 6;
    const WIDE_F16_ROWS: usize = 6;
    const AHEAD: usize = 3;
    type F = __m512;
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn hmax(a: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(a) }
    }
    #[inline(always)]
    unsafe fn keep(x: __m512, base: usize, lo: usize, hi: usize) -> __m512 {
        let below = |n: usize| (1u32 << n.saturating_sub(base).min(16)) - 1;
        let mask = (below(hi) & !below(lo)) as __mmask16;
        unsafe { _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), mask, x) }
    }
    #[inline(always)]
    unsafe fn round(x: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }
    #[inline(always)]
    unsafe fn pow2(n: __m512) -> __m512 {
        unsafe {
            let i = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(i))
        }
    }
    #[inline(always)]
    unsafe fn zero_below(x: __m512, bound: f32, y: __m512) -> __m512 {
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(bound)), y) }
    }
    #[inline(always)]
    unsafe fn bf16_pairs(p: *const u16) -> (__m512, __m512) {
        unsafe {
            let x = _mm512_loadu_si512(p.cast());
            let hi = _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)), _mm512_castsi512_ps(hi))
        }
    }
    #[inline(always)]
    unsafe fn f16(p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn splat_pair(p: *const f32) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_set1_epi64(p.cast::<i64>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn add_pairs(a: __m512, b: __m512) -> __m512 {
        unsafe {
            let first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let second = _mm512_or_si512(first, _mm512_set1_epi32(1));
            _mm512_add_ps(_mm512_permutex2var_ps(a, first, b), _mm512_permutex2var_ps(a, second, b))
        }
    }
    #[inline(always)]
    unsafe fn first_of_pairs(x: __m512) -> __m512 {
        unsafe { _mm512_maskz_mov_ps(0x5555, x) }
    }
}

/// 8 lanes, with FMA and F16C.
pub(super) struct Avx2;

// SAFETY: each function uses only AVX2, FMA and F16C, which the trait's caller guarantees.
#[allow(clippy::undocumented_unsafe_blocks)] // the impl's argument holds for each of them
unsafe impl Simd for Avx2 {
    const N: usize = 8;
    const ROWS: usize = 4;
    const WIDE_F16_ROWS: usize = 2;
    const AHEAD: usize = 1;
    type F = __m256;
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m256) {
        unsafe { _mm256_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn hmax(a: __m256) -> f32 {
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
    #[inline(always)]
    unsafe fn keep(x: __m256, base: usize, lo: usize, hi: usize) -> __m256 {
        unsafe {
            let lane =
                _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(base as i32));
            let in_hi = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi as i32), lane);
            let in_lo = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(lo as i32 - 1));
            let mask = _mm256_castsi256_ps(_mm256_and_si256(in_hi, in_lo));
            _mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), x, mask)
        }
    }
    #[inline(always)]
    unsafe fn round(x: __m256) -> __m256 {
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }
    #[inline(always)]
    unsafe fn pow2(n: __m256) -> __m256 {
        unsafe {
            let i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(i))
        }
    }
    #[inline(always)]
    unsafe fn zero_below(x: __m256, bound: f32, y: __m256) -> __m256 {
        unsafe { _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(bound)), y) }
    }
    #[inline(always)]
    unsafe fn bf16_pairs(p: *const u16) -> (__m256, __m256) {
        unsafe {
            let x = _mm256_loadu_si256(p.cast());
            let hi = _mm256_and_si256(x, _mm256_set1_epi32(0xffff_0000u32 as i32));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)), _mm256_castsi256_ps(hi))
        }
    }
    #[inline(always)]
    unsafe fn f16(p: *const u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn splat_pair(p: *const f32) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_set1_epi64x(p.cast::<i64>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn add_pairs(a: __m256, b: __m256) -> __m256 {
        unsafe {
            // Pairs of a and of b take turns by quarters.
            let sums = _mm256_castps_pd(_mm256_hadd_ps(a, b));
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(sums))
        }
    }
    #[inline(always)]
    unsafe fn first_of_pairs(x: __m256) -> __m256 {
        unsafe { _mm256_blend_ps::<0b1010_1010>(x, _mm256_setzero_ps()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Caps;
    use crate::simd::attention::exp::exp1;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn exp_avx512(x: &mut [f32; 16]) {
        // SAFETY: 16 elements; the caller has the features.
        unsafe { Avx512::store(x.as_mut_ptr(), Avx512::exp(Avx512::load(x.as_ptr()))) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn exp_avx2(x: &mut [f32; 16]) {
        for half in x.chunks_exact_mut(8) {
            // SAFETY: 8 elements; the caller has the features.
            unsafe { Avx2::store(half.as_mut_ptr(), Avx2::exp(Avx2::load(half.as_ptr()))) }
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
