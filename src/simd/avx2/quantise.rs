//! Quantises activations to int8, two blocks of 32 at a time, with the bits of [`crate::reference::quantise`].

use std::arch::x86_64::*;

use crate::reference::quantise::{Int8Row, LEAST};

#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::simd) fn quantise_row(x: &[f32], mut row: Int8Row<'_>, mut fine: Option<Int8Row<'_>>) {
    let blocks = row.blocks();
    if let Some(fine) = &fine {
        assert_eq!(fine.blocks(), blocks, "a fine plane of as many blocks");
    }
    for b in (0..blocks).step_by(2) {
        let mut v = load(&x[(b * 32).min(x.len())..(b * 32 + 64).min(x.len())]);
        // SAFETY: the slices agree about their number of blocks, which is even and more than b.
        let (q, d) = unsafe { quantise_two(&v, &mut row, b) };
        if let Some(fine) = &mut fine {
            let d = [_mm256_broadcastss_ps(d), _mm256_broadcastss_ps(_mm_movehdup_ps(d))];
            for i in 0..8 {
                v[i] = _mm256_fnmadd_ps(d[i / 4], _mm256_cvtepi32_ps(q[i]), v[i]);
            }
            // SAFETY: as above.
            unsafe { quantise_two(&v, fine, b) };
        }
    }
}

/// Up to 64 elements, padded with zeros.
#[target_feature(enable = "avx2")]
#[inline]
fn load(x: &[f32]) -> [__m256; 8] {
    let mut padded = [0f32; 64];
    let from = if x.len() == 64 {
        x.as_ptr()
    } else {
        padded[..x.len()].copy_from_slice(x);
        padded.as_ptr()
    };
    let mut v = [_mm256_setzero_ps(); 8];
    for (i, v) in v.iter_mut().enumerate() {
        // SAFETY: 64 elements either way.
        *v = unsafe { _mm256_loadu_ps(from.add(i * 8)) };
    }
    v
}

/// The codes of blocks `b` and `b + 1`, four vectors each, and their scales in lanes 0 and 1.
///
/// # Safety
/// The slices of `out` agree about their number of blocks, which is more than `b + 1`.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn quantise_two(v: &[__m256; 8], out: &mut Int8Row<'_>, b: usize) -> ([__m256i; 8], __m128) {
    let magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fff_ffff));
    let mut amax = [_mm256_setzero_ps(); 2];
    for (i, v) in v.iter().enumerate() {
        amax[i / 4] = _mm256_max_ps(amax[i / 4], _mm256_and_ps(*v, magnitude));
    }
    // Lanes 0 and 1: the maxima of the blocks.
    let amax = _mm256_max_ps(_mm256_unpacklo_ps(amax[0], amax[1]), _mm256_unpackhi_ps(amax[0], amax[1]));
    let amax = _mm_max_ps(_mm256_castps256_ps128(amax), _mm256_extractf128_ps::<1>(amax));
    let amax = _mm_max_ps(amax, _mm_movehl_ps(amax, amax));
    let range = _mm_set1_ps(127.0);
    let scale = _mm_div_ps(amax, range);
    let some = _mm_cmpgt_ps(amax, _mm_set1_ps(LEAST));
    let inverse = _mm_and_ps(some, _mm_div_ps(range, amax));
    let inverse = [_mm256_broadcastss_ps(inverse), _mm256_broadcastss_ps(_mm_movehdup_ps(inverse))];
    let mut q = [_mm256_setzero_si256(); 8];
    for i in 0..8 {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse[i / 4]));
    }
    // Sum two vectors for each half of a block; then reduce four halves at a time to one lane each.
    let sums = [
        _mm256_add_epi32(q[0], q[1]),
        _mm256_add_epi32(q[2], q[3]),
        _mm256_add_epi32(q[4], q[5]),
        _mm256_add_epi32(q[6], q[7]),
    ];
    let sums = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    let halves = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
    let both = _mm_hadd_epi32(halves, halves);
    // SAFETY: blocks b and b + 1, two halves each, exist by the caller's promise.
    unsafe {
        for i in 0..2 {
            // Packing works in lanes of 128 bits; the permutation puts their dwords in order.
            let low = _mm256_packs_epi32(q[4 * i], q[4 * i + 1]);
            let high = _mm256_packs_epi32(q[4 * i + 2], q[4 * i + 3]);
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
            _mm256_storeu_si256(out.q.as_mut_ptr().add((b + i) * 32).cast(), codes);
        }
        let zero = _mm_setzero_si128();
        _mm_storel_pd(out.d.as_mut_ptr().add(b).cast(), _mm_castps_pd(scale));
        let sum = _mm_mul_ps(scale, _mm_cvtepi32_ps(both));
        _mm_storel_pd(out.sum32.as_mut_ptr().add(b).cast(), _mm_castps_pd(sum));
        _mm_storel_epi64(out.minus32.as_mut_ptr().add(b).cast(), _mm_sub_epi32(zero, both));
        let scales = _mm_unpacklo_ps(scale, scale);
        _mm_storeu_ps(out.sum16.as_mut_ptr().add(2 * b), _mm_mul_ps(scales, _mm_cvtepi32_ps(halves)));
        _mm_storeu_si128(out.minus16.as_mut_ptr().add(2 * b).cast(), _mm_sub_epi32(zero, halves));
    }
    (q, scale)
}
