//! [`Simd`] over AVX-512 (F, BW, DQ, VL): sixteen lanes.

use std::arch::x86_64::*;

use crate::simd::vector::Simd;

/// Proof that AVX-512 F, BW, DQ and VL (and all of AVX2's) may be used.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// Safe to call only where the compiler already knows that the features are enabled.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(crate) fn token() -> Self {
        Avx512(())
    }
}

/// Runs intrinsics of this tier on behalf of a token.
macro_rules! isa {
    ($e:expr) => {{
        // SAFETY: an `Avx512` token exists only where AVX-512 F, BW, DQ and VL do (`Avx512::token`);
        // pointers are covered by the contract of the enclosing `unsafe fn`.
        unsafe { $e }
    }};
}

/// Bits set for lanes below `n`.
#[inline(always)]
fn mask(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    type F = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        isa!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        isa!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn load_tail(self, p: *const f32, n: usize, fill: f32) -> __m512 {
        isa!(_mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask(n), p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        isa!(_mm512_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn store_tail(self, p: *mut f32, n: usize, v: __m512) {
        isa!(_mm512_mask_storeu_ps(p, mask(n), v))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        isa!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn fma_sub_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        isa!(_mm512_fmaddsub_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        isa!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        isa!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        isa!(_mm512_abs_ps(a))
    }
    #[inline(always)]
    fn with_sign(self, magnitude: __m512, sign: __m512) -> __m512 {
        isa!(_mm512_or_ps(magnitude, _mm512_and_ps(_mm512_set1_ps(-0.0), sign)))
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        isa!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes))
    }
    #[inline(always)]
    fn scale2(self, a: __m512, n: __m512) -> __m512 {
        isa!(_mm512_scalef_ps(a, n))
    }
    #[inline(always)]
    fn scale2_normal(self, a: __m512, n: __m512) -> __m512 {
        self.scale2(a, n)
    }
    #[inline(always)]
    fn eq_mask(self, a: __m512, b: __m512) -> u32 {
        isa!(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b)) as u32
    }

    #[inline(always)]
    fn reduce_sum(self, a: __m512) -> f32 {
        // Written out, because the compiler chooses the order of `_mm512_reduce_add_ps`.
        isa!({
            let x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn reduce_max(self, a: __m512) -> f32 {
        isa!({
            let x = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        })
    }

    #[inline(always)]
    fn swap_pairs(self, a: __m512) -> __m512 {
        isa!(_mm512_permute_ps::<0b10_11_00_01>(a))
    }
    #[inline(always)]
    unsafe fn load_twice(self, p: *const f32) -> __m512 {
        isa!(_mm512_permutexvar_ps(
            _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
            _mm512_castps256_ps512(_mm256_loadu_ps(p))
        ))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        isa!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
            p.cast()
        )))))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        isa!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m512) {
        isa!({
            let x = _mm512_castps_si512(v);
            let top = _mm512_srli_epi32::<16>(x);
            let odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
            let rounded = _mm512_srli_epi32::<16>(up);
            // Rounding could carry a NaN's payload into infinity or the sign: set the quiet bit instead.
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let r = _mm512_mask_or_epi32(rounded, nan, top, _mm512_set1_epi32(0x40));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(r))
        })
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> __m512 {
        isa!(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))))
    }
}
