//! bf16 panels for AMX: 16 rows of float weights, transposed straight from the file's mapping.
//!
//! layout     `[k/2][16 rows][2]` ("VNNI16"): an AMX B tile per 32 k
//! bound      64 shuffles per KiB of bf16: ~45 GB/s a core, in L1

use std::arch::x86_64::*;

use crate::tensor::DType;

/// Row-major float weights: up to 16 rows from `w`.
#[derive(Clone, Copy)]
pub(in super::super) struct RowBlock {
    pub dtype: DType,
    pub w: *const u8,
    pub rows: usize,
    pub k: usize,
}

impl RowBlock {
    fn row(&self, r: usize, k: usize) -> *const u8 {
        let e = self.dtype.block_bytes();
        self.w.wrapping_add((r * self.k + k) * e)
    }
}

/// Transposes a 16x16 matrix of dwords.
#[inline(always)]
unsafe fn transpose16(r: [__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: register arithmetic; the instantiating functions enable the features.
    unsafe {
        let mut a = [_mm512_setzero_si512(); 16];
        for i in 0..8 {
            a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        let mut b = a;
        for i in 0..4 {
            b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
            b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
            b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
            b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
        }
        // Lane l of b[4i + j] is column 4l + j of rows 4i..4i+4.
        let mut out = a;
        for j in 0..4 {
            let x = _mm512_shuffle_i32x4::<0x44>(b[j], b[4 + j]);
            let y = _mm512_shuffle_i32x4::<0x44>(b[8 + j], b[12 + j]);
            let z = _mm512_shuffle_i32x4::<0xee>(b[j], b[4 + j]);
            let w = _mm512_shuffle_i32x4::<0xee>(b[8 + j], b[12 + j]);
            out[j] = _mm512_shuffle_i32x4::<0x88>(x, y);
            out[4 + j] = _mm512_shuffle_i32x4::<0xdd>(x, y);
            out[8 + j] = _mm512_shuffle_i32x4::<0x88>(z, w);
            out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(z, w);
        }
        out
    }
}

/// Rounds to bf16, nearest even, with integer operations, so AVX-512 BF16 is not needed.
#[inline(always)]
unsafe fn round_bf16(v: __m512) -> __m256i {
    // SAFETY: register arithmetic.
    unsafe {
        let v = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(v), _mm512_set1_epi32(1));
        let v = _mm512_add_epi32(v, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(v))
    }
}

/// 32 weights as bf16, the first `valid` of them; the rest zero. f16 and f32 are rounded.
#[inline(always)]
unsafe fn load_bf16(dtype: DType, p: *const u8, valid: usize) -> __m512i {
    // SAFETY: masked loads touch `valid` elements only.
    unsafe {
        let mask = if valid >= 32 { !0u32 } else { (1u32 << valid) - 1 };
        if dtype == DType::BF16 {
            return _mm512_maskz_loadu_epi16(mask, p.cast());
        }
        let (lo, hi) = if dtype == DType::F16 {
            (
                _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask as u16, p.cast())),
                _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((mask >> 16) as u16, p.wrapping_add(32).cast())),
            )
        } else {
            (
                _mm512_maskz_loadu_ps(mask as u16, p.cast()),
                _mm512_maskz_loadu_ps((mask >> 16) as u16, p.wrapping_add(64).cast()),
            )
        };
        let (lo, hi) = (round_bf16(lo), round_bf16(hi));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lo), hi)
    }
}

/// Writes the VNNI16 panel of `k0..k0+kc` (padded with zeros to `kc_padded`, a multiple of 32).
///
/// # Safety
/// AVX-512 F/BW/VL; `out` has room for `kc_padded·16` bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
pub(in super::super) unsafe fn panel_bf16(
    w: RowBlock,
    k0: usize,
    kc: usize,
    kc_padded: usize,
    out: *mut u16,
) {
    for i in (0..kc_padded).step_by(32) {
        let valid = kc.saturating_sub(i).min(32);
        let mut r = [_mm512_setzero_si512(); 16];
        for (j, r) in r.iter_mut().enumerate().take(w.rows) {
            // SAFETY: row j, elements k0+i.. of which `valid` exist.
            *r = unsafe { load_bf16(w.dtype, w.row(j, k0 + i), valid) };
            _mm_prefetch::<_MM_HINT_T1>(w.row(j, k0 + i + 512).cast());
        }
        // SAFETY: 1 KiB per 32 k fits by contract.
        unsafe {
            let t = transpose16(r);
            for (j, t) in t.iter().enumerate() {
                _mm512_storeu_si512(out.add(i * 16 + j * 32).cast(), *t);
            }
        }
    }
}
