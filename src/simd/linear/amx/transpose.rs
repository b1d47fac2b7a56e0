//! Rows of bf16 as B tiles: the transpose of 16x16 dwords.

use std::arch::x86_64::*;

/// A quarter of a tile from 16 rows of 32 bf16 (`stride` bytes apart): the transpose of 4x16 of the 16x16 dwords. Its
/// first half, across 128-bit lanes, is done by loads that insert; they need no shuffle port, of which there is one.
///
/// # Safety
/// 16 rows of 64 bytes are readable, `out` has room for a tile; the CPU has AVX-512 F; `j < 4`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn transpose_quarter(w: *const u8, stride: usize, j: usize, out: *mut u16) {
    // SAFETY: as promised.
    unsafe {
        let w = w.add(j * 16);
        let mut v = [_mm512_setzero_si512(); 4];
        for (r, v) in v.iter_mut().enumerate() {
            // Lane l: dwords 4j..4j+4 of row 4l + r.
            *v = _mm512_castsi128_si512(_mm_loadu_si128(w.add(r * stride).cast()));
            *v = _mm512_inserti32x4::<1>(*v, _mm_loadu_si128(w.add((4 + r) * stride).cast()));
            *v = _mm512_inserti32x4::<2>(*v, _mm_loadu_si128(w.add((8 + r) * stride).cast()));
            *v = _mm512_inserti32x4::<3>(*v, _mm_loadu_si128(w.add((12 + r) * stride).cast()));
        }
        let (a, b) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
        let (c, d) = (_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
        let rows: [__m512i; 4] = [
            _mm512_unpacklo_epi64(a, c),
            _mm512_unpackhi_epi64(a, c),
            _mm512_unpacklo_epi64(b, d),
            _mm512_unpackhi_epi64(b, d),
        ];
        for (i, row) in rows.iter().enumerate() {
            _mm512_storeu_si512(out.add((4 * j + i) * 32).cast(), *row);
        }
    }
}

/// A whole tile: see [`transpose_quarter`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn transpose_tile(w: *const u8, stride: usize, out: *mut u16) {
    for j in 0..4 {
        // SAFETY: as promised.
        unsafe { transpose_quarter(w, stride, j, out) };
    }
}
