//! Linear on AMX: panels of bf16 weights in scratch, multiplied by tiles.
//!
//!   quantised   codes of a group → d·q + m → bf16 panel (this file), then tiles
//!   f16, bf16   rows of the file → bf16 panel (`panel`), then tiles
//!
//! Why not int8 tiles for quantised weights: their scales change every 32 elements, so a tile product
//! covers K = 32, as many multiply-adds as a bf16 tile; it would save the dequantisation (once per call
//! and weight) and pay a conversion of every 16x16 result per 32 elements (once per token block). From a
//! few tens of tokens on, bf16 wins, and its activations are more precise.
//!
//! bound      many tokens: tiles; a 16x32 block takes ~170 instructions to dequantise and 16 cycles per 16
//!            tokens to multiply
//! measured   not measured: no AMX machine at hand; verified by executing the same code on software tiles
//! error      weights (quantised: d·q + m; f16) and activations rounded to bf16, f32 accumulation

use std::arch::x86_64::*;

use super::packed::{GROUP, Layout};
use super::panel::{RowBlock, panel_bf16, with_scratch};
use super::vnni::{Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use crate::amx::Session;
use crate::amx::bf16::gemm_bf16_raw;
use crate::tensor::DType;

/// Where panels come from.
pub(super) enum Source<'a> {
    /// Consecutive packed groups of a quantised dtype.
    Groups(DType, &'a [u8]),
    /// `n` rows of `k` f16 or bf16 weights.
    Rows(DType, *const u8),
}

/// One dword (a pair of consecutive k) per row from two vectors of f32.
#[inline(always)]
unsafe fn pair(even: __m512, odd: __m512) -> __m512i {
    // SAFETY: register arithmetic; the instantiating functions enable the features.
    unsafe {
        let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(odd, even));
        // even values came out in words 0..16, odd ones in 16..32: interleave.
        let index = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
            18, 2, 17, 1, 16, 0,
        );
        _mm512_permutexvar_epi16(index, both)
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,f16c,fma")]
unsafe fn dequantise<F: Format>(w: *const u8, k: usize, out: *mut u16) {
    let blocks = F::LAYOUT.record_k / 32;
    let records = k.div_ceil(F::LAYOUT.record_k);
    let byte = _mm512_set1_epi32(255);
    for r in 0..records {
        for b in 0..blocks {
            // SAFETY: the group has `records` records; the panel has 64 bytes per pair of k.
            unsafe {
                let w = w.add(r * F::LAYOUT.record_bytes);
                let codes = F::codes(w, b);
                let first = F::scales(w, b, 0);
                let scales = [first, if F::HALVES { F::scales(w, b, 1) } else { first }];
                let out = out.add((r * blocks + b) * 32 * GROUP);
                for (q, &c) in codes.iter().enumerate() {
                    let (d, m) = scales[q / 4];
                    let v0 = _mm512_and_si512(c, byte);
                    let v1 = _mm512_and_si512(_mm512_srli_epi32::<8>(c), byte);
                    let v2 = _mm512_and_si512(_mm512_srli_epi32::<16>(c), byte);
                    let v3 = _mm512_srli_epi32::<24>(c);
                    let f0 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(v0), d, m);
                    let f1 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(v1), d, m);
                    let f2 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(v2), d, m);
                    let f3 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(v3), d, m);
                    _mm512_storeu_si512(out.add(q * 64).cast(), pair(f0, f1));
                    _mm512_storeu_si512(out.add(q * 64 + 32).cast(), pair(f2, f3));
                }
            }
        }
    }
}

/// `out[t·ldo + r] = Σ_k w[r][k]·x[t][k]` for `n` rows.
///
/// # Safety
/// AMX and AVX-512 BF16 are usable; the source holds `n` rows of `k`; `x` is A tiles of `m` rows of
/// `k_padded` (a multiple of 64 that covers `k`); `out` has `m` rows of `ldo >= n`.
pub(super) unsafe fn gemm(
    source: &Source<'_>,
    n: usize,
    k: usize,
    k_padded: usize,
    x: *const u16,
    m: usize,
    out: *mut f32,
    ldo: usize,
) {
    let groups = n.div_ceil(GROUP);
    let panel = k_padded * GROUP;
    with_scratch(groups * panel * 2, |scratch| {
        let scratch = scratch.cast::<u16>();
        for g in 0..groups {
            // SAFETY: the caller's contract; each panel has its part of the scratch. K-quant records cover
            // 256 elements and k is a multiple of that, so `k_padded` is what they fill.
            unsafe {
                let out = scratch.add(g * panel);
                match source {
                    Source::Groups(dtype, groups) => {
                        let layout = Layout::of(*dtype).expect("quantised");
                        let bytes = layout.group_bytes(k);
                        let w = groups[g * bytes..(g + 1) * bytes].as_ptr();
                        debug_assert!(k.next_multiple_of(layout.record_k) <= k_padded);
                        match dtype {
                            DType::Q4_0 => dequantise::<Q4_0>(w, k, out),
                            DType::Q4_1 => dequantise::<Q4_1>(w, k, out),
                            DType::Q5_0 => dequantise::<Q5_0>(w, k, out),
                            DType::Q5_1 => dequantise::<Q5_1>(w, k, out),
                            DType::Q8_0 => dequantise::<Q8_0>(w, k, out),
                            DType::Q4_K => dequantise::<Q4K>(w, k, out),
                            DType::Q5_K => dequantise::<Q5K>(w, k, out),
                            DType::Q6_K => dequantise::<Q6K>(w, k, out),
                            DType::F32 | DType::F16 | DType::BF16 => unreachable!("floats are not packed"),
                        }
                    }
                    Source::Rows(dtype, w) => {
                        let rows = (n - g * GROUP).min(GROUP);
                        let w = w.add(g * GROUP * k * dtype.block_bytes());
                        panel_bf16(RowBlock { dtype: *dtype, w, rows, k }, 0, k, k_padded, out);
                    }
                }
            }
        }
        let mut session = Session::open().expect("the tier was checked when the weight was made");
        // SAFETY: panels of n rows and k_padded columns were just written; the rest is the contract.
        unsafe { gemm_bf16_raw(&mut session, m, n, k_padded, x, scratch, out, ldo) };
    });
}
