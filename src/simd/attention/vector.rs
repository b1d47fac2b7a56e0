//! The vector operations that attention in f32 needs in addition to [`Simd`].

use std::arch::x86_64::*;

use crate::simd::avx2::Avx2;
use crate::simd::avx512::Avx512;
use crate::simd::vector::Simd;

/// Vectors of block kernels. Methods that take a pointer need as many readable elements as they state, of any
/// alignment.
#[allow(clippy::missing_safety_doc)] // one contract for the whole trait, stated on it
pub(super) trait BlockSimd: Simd {
    /// Rows per register tile: with 2 vectors each they fill the registers.
    const ROWS: usize;
    /// Rows per register tile where each row and vector needs two accumulators.
    const WIDE_PAIRED_ROWS: usize;
    /// Number of prefetches of each line of keys and values.
    const AHEAD: usize;
    /// `x` in the lanes with lo <= base + lane < hi, −∞ in the others.
    fn keep(self, x: Self::F, base: usize, lo: usize, hi: usize) -> Self::F;
    /// `LANES` pairs of 16-bit elements: the first elements and the second ones, as f32.
    unsafe fn bf16_pairs(self, p: *const u16) -> (Self::F, Self::F);
    /// `LANES` codes of 8 bits, as f32.
    unsafe fn load_codes(self, p: *const i8) -> Self::F;
    /// The two f32 at `p`, alternating.
    unsafe fn splat_pair(self, p: *const f32) -> Self::F;
    /// The sums of neighbours: those of `a`, then those of `b`.
    fn add_pairs(self, a: Self::F, b: Self::F) -> Self::F;
    /// 0 in every other lane, beginning with the second.
    fn first_of_pairs(self, x: Self::F) -> Self::F;
}

// The token proves that the instructions are there; what takes a pointer passes on its caller's promise.
#[allow(clippy::undocumented_unsafe_blocks)] // as said
impl BlockSimd for Avx512 {
    const ROWS: usize = 6;
    const WIDE_PAIRED_ROWS: usize = 6;
    const AHEAD: usize = 3;
    #[inline(always)]
    fn keep(self, x: __m512, base: usize, lo: usize, hi: usize) -> __m512 {
        let below = |n: usize| (1u32 << n.saturating_sub(base).min(16)) - 1;
        let mask = (below(hi) & !below(lo)) as __mmask16;
        unsafe { _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), mask, x) }
    }
    #[inline(always)]
    unsafe fn bf16_pairs(self, p: *const u16) -> (__m512, __m512) {
        unsafe {
            let x = _mm512_loadu_si512(p.cast());
            let hi = _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)), _mm512_castsi512_ps(hi))
        }
    }
    #[inline(always)]
    unsafe fn load_codes(self, p: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn splat_pair(self, p: *const f32) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_set1_epi64(p.cast::<i64>().read_unaligned())) }
    }
    #[inline(always)]
    fn add_pairs(self, a: __m512, b: __m512) -> __m512 {
        unsafe {
            let first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let second = _mm512_or_si512(first, _mm512_set1_epi32(1));
            _mm512_add_ps(_mm512_permutex2var_ps(a, first, b), _mm512_permutex2var_ps(a, second, b))
        }
    }
    #[inline(always)]
    fn first_of_pairs(self, x: __m512) -> __m512 {
        unsafe { _mm512_maskz_mov_ps(0x5555, x) }
    }
}

// The token proves that the instructions are there; what takes a pointer passes on its caller's promise.
#[allow(clippy::undocumented_unsafe_blocks)] // as said
impl BlockSimd for Avx2 {
    const ROWS: usize = 4;
    const WIDE_PAIRED_ROWS: usize = 2;
    const AHEAD: usize = 1;
    #[inline(always)]
    fn keep(self, x: __m256, base: usize, lo: usize, hi: usize) -> __m256 {
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
    unsafe fn bf16_pairs(self, p: *const u16) -> (__m256, __m256) {
        unsafe {
            let x = _mm256_loadu_si256(p.cast());
            let hi = _mm256_and_si256(x, _mm256_set1_epi32(0xffff_0000u32 as i32));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)), _mm256_castsi256_ps(hi))
        }
    }
    #[inline(always)]
    unsafe fn load_codes(self, p: *const i8) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn splat_pair(self, p: *const f32) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_set1_epi64x(p.cast::<i64>().read_unaligned())) }
    }
    #[inline(always)]
    fn add_pairs(self, a: __m256, b: __m256) -> __m256 {
        unsafe {
            // Pairs of a and of b alternate by quarters.
            let sums = _mm256_castps_pd(_mm256_hadd_ps(a, b));
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(sums))
        }
    }
    #[inline(always)]
    fn first_of_pairs(self, x: __m256) -> __m256 {
        unsafe { _mm256_blend_ps::<0b1010_1010>(x, _mm256_setzero_ps()) }
    }
}
