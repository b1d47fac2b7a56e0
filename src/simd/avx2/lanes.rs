//! [`Simd`] over AVX2: eight lanes.

use std::arch::x86_64::*;

use crate::simd::vector::Simd;

/// Proof that AVX2, FMA and F16C may be used.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Safe to call only where the compiler already knows that the features are enabled.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn token() -> Self {
        Avx2(())
    }
}

/// Runs intrinsics of this tier on behalf of a token.
macro_rules! isa {
    ($e:expr) => {{
        // SAFETY: an `Avx2` token exists only where AVX2, FMA and F16C do (`Avx2::token`); pointers are
        // covered by the contract of the enclosing `unsafe fn`.
        unsafe { $e }
    }};
}

/// All ones in lanes below `n`.
#[inline(always)]
fn mask(_: Avx2, n: usize) -> __m256i {
    isa!(_mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)))
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    type F = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        isa!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        isa!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn load_tail(self, p: *const f32, n: usize, fill: f32) -> __m256 {
        let m = mask(self, n);
        isa!(_mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(p, m), _mm256_castsi256_ps(m)))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        isa!(_mm256_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn store_tail(self, p: *mut f32, n: usize, v: __m256) {
        isa!(_mm256_maskstore_ps(p, mask(self, n), v))
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        isa!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn fma_sub_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        isa!(_mm256_fmaddsub_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        isa!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        isa!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn abs(self, a: __m256) -> __m256 {
        isa!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), a))
    }
    #[inline(always)]
    fn with_sign(self, magnitude: __m256, sign: __m256) -> __m256 {
        isa!(_mm256_or_ps(magnitude, _mm256_and_ps(_mm256_set1_ps(-0.0), sign)))
    }
    #[inline(always)]
    fn select_lt(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        isa!(_mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)))
    }
    #[inline(always)]
    fn scale2(self, a: __m256, n: __m256) -> __m256 {
        // Two factors, because 2^n itself may not be a normal number: n = h + (n - h), h = n >> 1.
        isa!({
            let bias = _mm256_set1_epi32(127);
            let n = _mm256_cvtps_epi32(n);
            let h = _mm256_srai_epi32::<1>(n);
            let p = _mm256_slli_epi32::<23>(_mm256_add_epi32(h, bias));
            let q = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_sub_epi32(n, h), bias));
            _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(p)), _mm256_castsi256_ps(q))
        })
    }
    #[inline(always)]
    fn scale2_normal(self, a: __m256, n: __m256) -> __m256 {
        isa!({
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n)))
        })
    }
    #[inline(always)]
    fn eq_mask(self, a: __m256, b: __m256) -> u32 {
        isa!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, b))) as u32
    }

    #[inline(always)]
    fn reduce_sum(self, a: __m256) -> f32 {
        isa!({
            let x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn reduce_max(self, a: __m256) -> f32 {
        isa!({
            let x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        })
    }

    #[inline(always)]
    fn swap_pairs(self, a: __m256) -> __m256 {
        isa!(_mm256_permute_ps::<0b10_11_00_01>(a))
    }
    #[inline(always)]
    unsafe fn load_twice(self, p: *const f32) -> __m256 {
        isa!(_mm256_permutevar8x32_ps(
            _mm256_castps128_ps256(_mm_loadu_ps(p)),
            _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)
        ))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        isa!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        isa!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m256) {
        isa!({
            let x = _mm256_castps_si256(v);
            let top = _mm256_srli_epi32::<16>(x);
            let odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
            let rounded = _mm256_srli_epi32::<16>(up);
            // Rounding could carry a NaN's payload into infinity or the sign: set the quiet bit instead.
            let quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let r = _mm256_blendv_epi8(rounded, quiet, nan);
            let r = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256::<1>(r));
            _mm_storeu_si128(p.cast(), r)
        })
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> __m256 {
        isa!(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))))
    }
}
