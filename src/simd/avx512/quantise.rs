//! Quantises activations to int8, four blocks of 32 at a time, with the bits of [`crate::reference::quantise`].

use std::arch::x86_64::*;

use crate::reference::quantise::{Int8Row, LEAST};

/// Quantises a row, four blocks of 32 at a time: their maxima and sums are reduced together, and the values derived
/// from these are computed for four blocks at once.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
pub(in crate::simd) fn quantise_row(x: &[f32], mut row: Int8Row<'_>, mut fine: Option<Int8Row<'_>>) {
    let blocks = row.blocks();
    if let Some(fine) = &fine {
        assert_eq!(fine.blocks(), blocks, "a fine plane of as many blocks");
    }
    for b in (0..blocks).step_by(4) {
        let mut v = [_mm512_setzero_ps(); 8];
        for (i, v) in v.iter_mut().enumerate() {
            let left = x.len().saturating_sub(b * 32 + i * 16).min(16);
            // SAFETY: masked-off lanes are not read.
            *v = unsafe {
                let at = x.as_ptr().wrapping_add(b * 32 + i * 16);
                _mm512_maskz_loadu_ps(((1u32 << left) - 1) as __mmask16, at)
            };
        }
        // SAFETY: the slices agree about their number of blocks, which is more than b.
        unsafe {
            let (q, d) = quantise_four(&v, &mut row, b);
            if let Some(fine) = &mut fine {
                for i in 0..8 {
                    v[i] = _mm512_fnmadd_ps(spread(d, i / 2), _mm512_cvtepi32_ps(q[i]), v[i]);
                }
                quantise_four(&v, fine, b);
            }
        }
    }
}

/// Lane `i` of four in all of sixteen.
#[target_feature(enable = "avx512f")]
#[inline]
fn spread(v: __m128, i: usize) -> __m512 {
    _mm512_permutexvar_ps(_mm512_set1_epi32(i as i32), _mm512_castps128_ps512(v))
}

/// The codes of blocks `b..b + 4`, two vectors each, and their scales. Blocks past the row's end are not stored.
///
/// # Safety
/// The slices of `out` agree about their number of blocks, which is more than `b`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
#[inline]
unsafe fn quantise_four(v: &[__m512; 8], out: &mut Int8Row<'_>, b: usize) -> ([__m512i; 8], __m128) {
    let mut amax = [_mm512_setzero_ps(); 4];
    for (i, amax) in amax.iter_mut().enumerate() {
        *amax = _mm512_max_ps(_mm512_abs_ps(v[2 * i]), _mm512_abs_ps(v[2 * i + 1]));
    }
    let amax = max_of_each(amax);
    let range = _mm_set1_ps(127.0);
    let scale = _mm_div_ps(amax, range);
    let some = _mm_cmp_ps_mask::<_CMP_GT_OQ>(amax, _mm_set1_ps(LEAST));
    let inverse = _mm_maskz_div_ps(some, range, amax);
    let mut q = [_mm512_setzero_si512(); 8];
    for i in 0..8 {
        q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], spread(inverse, i / 2)));
    }
    let low = sum_of_each([q[0], q[2], q[4], q[6]]);
    let high = sum_of_each([q[1], q[3], q[5], q[7]]);
    let both = _mm_add_epi32(low, high);
    // Low and high half of each block in turn.
    let halves = interleave(low, high);
    let scales = _mm_castps_si128(scale);
    let scales = _mm256_castsi256_ps(interleave(scales, scales));
    let left = (out.d.len() - b).min(4);
    let (one, two) = ((1u32 << left) - 1, (1u32 << (2 * left)) - 1);
    let (one, two) = (one as __mmask8, two as __mmask8);
    // SAFETY: `left` blocks, two halves each, exist from block b on by the caller's promise.
    unsafe {
        for (i, q) in q.iter().enumerate().take(2 * left) {
            let to = out.q.as_mut_ptr().add(b * 32 + i * 16);
            _mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(*q));
        }
        _mm_mask_storeu_ps(out.d.as_mut_ptr().add(b), one, scale);
        let sum = _mm_mul_ps(scale, _mm_cvtepi32_ps(both));
        _mm_mask_storeu_ps(out.sum32.as_mut_ptr().add(b), one, sum);
        let minus = _mm_sub_epi32(_mm_setzero_si128(), both);
        _mm_mask_storeu_epi32(out.minus32.as_mut_ptr().add(b), one, minus);
        let sum = _mm256_mul_ps(scales, _mm256_cvtepi32_ps(halves));
        _mm256_mask_storeu_ps(out.sum16.as_mut_ptr().add(2 * b), two, sum);
        let minus = _mm256_sub_epi32(_mm256_setzero_si256(), halves);
        _mm256_mask_storeu_epi32(out.minus16.as_mut_ptr().add(2 * b), two, minus);
    }
    (q, scale)
}

/// `a[0] b[0] a[1] b[1] ...`
#[target_feature(enable = "avx512f,avx512vl")]
#[inline]
fn interleave(a: __m128i, b: __m128i) -> __m256i {
    _mm256_set_m128i(_mm_unpackhi_epi32(a, b), _mm_unpacklo_epi32(a, b))
}

/// Lane i: the greatest lane of `v[i]`.
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
#[inline]
fn max_of_each(v: [__m512; 4]) -> __m128 {
    let a = _mm512_max_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    let b = _mm512_max_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
    let (lo, hi) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
    let c = _mm512_max_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
    let c = _mm256_max_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps::<1>(c));
    _mm_max_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps::<1>(c))
}

/// Lane i: the sum of the lanes of `v[i]`.
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
#[inline]
fn sum_of_each(v: [__m512i; 4]) -> __m128i {
    let a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    let b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    let c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let c = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64::<1>(c));
    _mm_add_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256::<1>(c))
}
