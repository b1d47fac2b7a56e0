//! bf16 tiles of quantised weights, made with f16 arithmetic (AVX512-FP16): 32 weights an operation rather than 16.
//!
//!   w·2^16 = code·(d·2^16) + m·2^16 in f16, rounded once, then to bf16
//!
//! f16 has as many exponents as weights below one need: times 2^16, those from 2^-30 on are normal numbers. Such a number
//! becomes bf16, and loses the factor, by two operations on its bits: a rounding shift by three (vpmulhrsw, which keeps the
//! sign), and 96 put above the five bits of its exponent: 2^(e-31) is bf16's exponent e + 96. Zero becomes 2^-31.
//!
//! A block that may have a weight of one or more, or whose scale is no number, is made in f32 as elsewhere (`amx`). The
//! choice depends on the block's scales alone, not on the caller.
//!
//! layout     as `amx`: a line of nibbles, or two quads of codes, become four rows of 32 elements
//! codes      nibbles: one byte shuffle looks up -8 to 7, whose f16 have all their bits in the upper byte, and another
//!            moves it there (vpermw would look up words, with two operations on one port). Longer codes: bytes to
//!            words to f16
//! bound      two 512-bit ports; cycles per tile counted by `scripts/mca`: docs/kernels.md
//! measured   on a Sapphire Rapids, as a C program (decision 0025): q4_0 through the ring, M = 64 0.80 TFLOP/s per
//!            thread where f32 arithmetic reaches 0.64, M = 32 0.70 against 0.585; M = 512 no gain. This code has run
//!            on emulated instructions only
//! error      2^-8 of a weight from bf16, as in f32, and 2^-11 from f16. Rounded to f16 first, so 2^-11 of each: scale and offset of
//!            K-quants, products of two numbers; the offset of q4_1, which becomes that of codes less eight

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::quant::format::RecordFormat;

/// Scale and offset of 16 rows, times 2^16, as f16, twice in each dword.
pub(super) type RowScales = (__m512i, __m512i);

/// `v · 2^16` as 16 f16, each twice in the words of its dword.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves(v: __m512) -> __m512i {
    let v = _mm512_mul_ps(v, _mm512_set1_ps(65536.0));
    let h = _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
    _mm512_or_si512(h, _mm512_slli_epi32::<16>(h))
}

/// The scales of the two halves of block `b`, unless one of its weights may be one or more. With `NIBBLED` the offsets
/// are for codes minus eight, as [`part`] then uses them.
///
/// # Safety
/// The record at `w` has block `b`; the CPU has the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
pub(super) unsafe fn scales<F: RecordFormat, const NIBBLED: bool>(
    w: *const u8,
    b: usize,
) -> Option<[RowScales; 2]> {
    let of_half = |(d, m): (__m512, __m512)| {
        // Codes range from 0 to below 2^bits, so |w| <= |m| + 2^bits |d|; symmetric formats reach |m| only.
        let most = match F::ZERO_LOG2 {
            Some(_) => _mm512_abs_ps(m),
            None => _mm512_fmadd_ps(_mm512_abs_ps(d), _mm512_set1_ps(F::CODES), _mm512_abs_ps(m)),
        };
        let small = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(most, _mm512_set1_ps(0.99));
        let m = if NIBBLED { _mm512_fmadd_ps(d, _mm512_set1_ps(8.0), m) } else { m };
        ((halves(d), halves(m)), small)
    };
    // SAFETY: as promised.
    unsafe {
        let (first, small) = of_half(F::scales(w, b, 0));
        if !F::HALVES {
            return (small == !0).then_some([first, first]);
        }
        let (second, small_too) = of_half(F::scales(w, b, 1));
        (small & small_too == !0).then_some([first, second])
    }
}

/// `q · d + m` of 32 f16.
#[inline]
#[target_feature(enable = "avx512f")]
fn fma(mut q: __m512i, d: __m512i, m: __m512i) -> __m512i {
    // SAFETY: register arithmetic; the caller has checked that the instruction executes. In asm with register operands
    // only, because the emulation supports only those.
    unsafe {
        asm!("vfmadd213ph {q}, {d}, {m}", q = inout(zmm_reg) q, d = in(zmm_reg) d, m = in(zmm_reg) m,
            options(pure, nomem, nostack, preserves_flags));
    }
    q
}

/// Converts 32 unsigned words to f16.
#[inline]
#[target_feature(enable = "avx512f")]
fn from_words(words: __m512i) -> __m512i {
    let q: __m512i;
    // SAFETY: as in `fma`.
    unsafe {
        asm!("vcvtuw2ph {q}, {w}", q = lateout(zmm_reg) q, w = in(zmm_reg) words,
            options(pure, nomem, nostack, preserves_flags));
    }
    q
}

/// Writes a row of a tile from its 32 weights in f16.
///
/// # Safety
/// `out` has room for 32 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn row(q: __m512i, (d, m): RowScales, out: *mut u16) {
    let eighth = _mm512_mulhrs_epi16(fma(q, d, m), _mm512_set1_epi16(1 << 12));
    let (mask, exponent) = (_mm512_set1_epi16(0x8fff_u16 as i16), _mm512_set1_epi16(96 << 7));
    // SAFETY: as promised.
    unsafe { _mm512_storeu_si512(out.cast(), _mm512_ternarylogic_epi32::<0xea>(eighth, mask, exponent)) };
}

/// The upper bytes of the f16 numbers -8 to 7; their lower bytes are zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn signed_nibbles() -> __m512i {
    #[rustfmt::skip]
    let table = _mm_setr_epi8(
        -0x38, -0x39, -0x3a, -0x3b, -0x3c, -0x3e, -0x40, -0x44, 0, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47,
    );
    _mm512_broadcast_i32x4(table)
}

/// Bytes 0 and 1, or 2 and 3, of each dword as the upper bytes of its words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn upper<const SECOND: bool>(c: __m512i) -> __m512i {
    let add = if SECOND { 0x0200_0200 } else { 0 };
    // Indices with the highest bit set give zeros.
    let at = |upper: i32| (upper + add) | 0x0080_0080;
    let at = _mm512_set4_epi32(at(0x0d00_0c00), at(0x0900_0800), at(0x0500_0400), at(0x0100_0000));
    _mm512_shuffle_epi8(c, at)
}

/// The same bytes as words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn words<const UPPER: bool>(c: __m512i) -> __m512i {
    let add = if UPPER { 0x0002_0002 } else { 0 };
    // Indices with the highest bit set give zeros.
    let at = |low: i32| low + add;
    let at = _mm512_set4_epi32(
        at(0x800d_800c_u32 as i32),
        at(0x8009_8008_u32 as i32),
        at(0x8005_8004_u32 as i32),
        at(0x8001_8000_u32 as i32),
    );
    _mm512_shuffle_epi8(c, at)
}

/// A quarter of a tile, as `amx::part` makes it.
///
/// # Safety
/// The record at `w` has block `b`, `scales` are its; `out` has room for a tile; the CPU has the features and
/// [`half_arithmetic`](crate::amx::half_arithmetic).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
pub(super) unsafe fn part<F: RecordFormat, const NIBBLED: bool, const J: usize>(
    w: *const u8,
    b: usize,
    scales: &[RowScales; 2],
    out: *mut u16,
) {
    // SAFETY: as promised.
    unsafe {
        if NIBBLED {
            let lines = w.add(F::LAYOUT.codes(b));
            let c = _mm512_loadu_si512(lines.add(J * 64).cast());
            let (table, mask) = (signed_nibbles(), _mm512_set1_epi8(15));
            let low = _mm512_shuffle_epi8(table, _mm512_and_si512(c, mask));
            let high = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(c), mask));
            let (to, to_high) = (out.add(J * 64), out.add(256 + J * 64));
            row(upper::<false>(low), scales[0], to);
            row(upper::<true>(low), scales[0], to.add(32));
            row(upper::<false>(high), scales[0], to_high);
            row(upper::<true>(high), scales[0], to_high.add(32));
        } else {
            let codes = F::codes(w, b);
            for q in [2 * J, 2 * J + 1] {
                row(from_words(words::<false>(codes[q])), scales[J / 2], out.add(q * 64));
                row(from_words(words::<true>(codes[q])), scales[J / 2], out.add(q * 64 + 32));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::packed::pack;
    use super::super::dequantise;
    use super::*;
    use crate::tensor::formats::with_format;
    use crate::tensor::{Bytes, DType, Tensor, set_scales};

    /// Random codes and sub-scales; f16 scales of about `scale`, or an offset's.
    fn random(dtype: DType, k: usize, scale: f32) -> Tensor {
        let mut x = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x
        };
        let len = 16 * dtype.row_bytes(k).unwrap();
        let mut data: Vec<u8> = (0..len).map(|_| (next() >> 24) as u8).collect();
        let mut scale = || scale * ((next() >> 40) as f32 / (1 << 23) as f32 - 1.0);
        for block in data.chunks_exact_mut(dtype.block_bytes()) {
            set_scales(dtype, block, scale(), scale());
        }
        Tensor::new(dtype, vec![16, k], Bytes::copy_of(&data)).unwrap()
    }

    /// The largest error of a weight: half an ulp of bf16 and of f16; and, where scale and offset are rounded first,
    /// 2^-11 of the scale times the largest code and of the offset.
    fn bound(dtype: DType, w: f64, scale: f64) -> f64 {
        let rounded = match dtype {
            // Exact, except for the offset of codes minus eight.
            DType::Q4_1 => 1.0 + 8.0,
            // Sub-scales and minima up to 63.
            DType::Q4_K => 63.0 * (8.0 + 1.0 + 8.0),
            DType::Q5_K => 63.0 * (31.0 + 1.0),
            // The largest sub-scale times the largest value: the offset, a power of two times the scale, rounds as it does.
            DType::Q6_K => 128.0 * 32.0,
            DType::IQ4_XS => 32.0 * 128.0,
            DType::Q3_K => 32.0 * 4.0,
            DType::Q2_K => 15.0 * (3.0 + 1.0),
            _ => 0.0,
        };
        (2f64.powi(-8) + 2f64.powi(-11)) * w.abs() + rounded * scale * 2f64.powi(-11) + 2f64.powi(-30)
    }

    fn check<F: RecordFormat, const NIBBLED: bool>(dtype: DType, scale: f32) {
        let k = 512;
        let w = random(dtype, k, scale);
        let packed = pack(&w);
        let mut want = vec![0f32; 16 * k];
        for (r, want) in want.chunks_exact_mut(k).enumerate() {
            crate::reference::dequant::dequantise_row(dtype, w.row(r), want);
        }
        let (mut halves, mut tile, mut parts, mut plain) = (0, [0u16; 512], [0u16; 512], [0u16; 512]);
        for step in 0..k / 32 {
            let group = packed.group_range(0, 1).as_ptr();
            let at = group.wrapping_add(step * 32 / F::LAYOUT.record_k * F::LAYOUT.record_bytes);
            // SAFETY: the group has these steps, the arrays are tiles; AVX-512 and f16 arithmetic are there.
            unsafe {
                dequantise::half_whole::<F, NIBBLED>(group, step, tile.as_mut_ptr());
                dequantise::whole::<F, NIBBLED>(group, step, plain.as_mut_ptr());
                (0..4).for_each(|q| {
                    dequantise::half_quarter::<F, NIBBLED>(group, step, q, parts.as_mut_ptr());
                });
                halves += usize::from(scales::<F, NIBBLED>(at, step % (F::LAYOUT.record_k / 32)).is_some());
            }
            assert_eq!(tile, parts, "{dtype}, step {step}: quarters");
            for (i, &got) in tile.iter().enumerate() {
                let (pair, row, odd) = (i / 32, i / 2 % 16, i % 2);
                let want = f64::from(want[row * k + step * 32 + 2 * pair + odd]);
                let got = f64::from(f32::from_bits(u32::from(got) << 16));
                let off = (got - want).abs();
                assert!(off <= bound(dtype, want, scale.into()), "{dtype} {scale}: {got}, wanted {want}");
            }
        }
        let steps = k / 32;
        match scale {
            ..2e-4 => assert_eq!(halves, steps, "{dtype} {scale}: all small"),
            1.0.. => assert!(halves == 0 && tile == plain, "{dtype} {scale}: {halves} of {steps} in f16"),
            _ => {}
        }
    }

    /// Scales of usual size, of the smallest halves, and scales that give weights of one and more.
    #[test]
    fn tiles_are_as_exact_as_bf16_has_them() {
        if !crate::simd::Caps::get().avx512 || !crate::simd::Caps::get().avx512_vnni {
            return println!("skipped: this CPU reports no avx512 with vnni");
        }
        crate::amx::emulate::install().unwrap();
        assert!(crate::amx::half_arithmetic(), "in hardware or emulated");
        for scale in [1e-7, 1e-4, 5e-4, 0.02, 40.0] {
            for dtype in DType::QUANTISED {
                with_format!(dtype, F => check::<F, { <F as RecordFormat>::NIBBLES }>(dtype, scale));
            }
        }
    }
}
