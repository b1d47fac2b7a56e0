//! How the AVX-512 and AMX kernels read records of packed codes ([`packed`](super::super::packed)), one row per lane.

use std::arch::x86_64::*;

use super::super::packed::RecordLayout;
use crate::tensor::DType;

/// How a packed record is read. `b` counts the blocks of 32 in a record.
pub(in super::super) trait Format {
    const LAYOUT: RecordLayout;
    /// Scales per 16 elements instead of per 32 (q6_k).
    const HALVES: bool = false;
    /// Number of different codes: 16, 32, 64 or 256.
    const CODES: f32 =
        if Self::LAYOUT.code_bytes == 512 { 256.0 } else { (16 << (Self::LAYOUT.high_bytes / 64)) as f32 };
    /// Codes are nibbles, without high bits.
    const NIBBLES: bool = Self::LAYOUT.code_bytes == 256 && Self::LAYOUT.high_bytes == 0;
    /// log2 of the zero point, if it is the same for all blocks: the kernel then folds it into its integer sums, which
    /// start at minus the zero point times the sum of the activations, and needs no offset.
    const ZERO_LOG2: Option<i32> = None;
    /// The 8 quads of block `b`, unsigned bytes, a row per dword.
    unsafe fn codes(w: *const u8, b: usize) -> [__m512i; 8];
    /// Scale and offset of block `b`; of its half `h` when [`Format::HALVES`].
    unsafe fn scales(w: *const u8, b: usize, h: usize) -> (__m512, __m512);
}

#[inline(always)]
unsafe fn line(p: *const u8) -> __m512i {
    // SAFETY: the caller's record holds 64 bytes here.
    unsafe { _mm512_loadu_si512(p.cast()) }
}

#[inline(always)]
unsafe fn half16(p: *const u8) -> __m512 {
    // SAFETY: the caller's record holds 16 halves here.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
}

#[inline(always)]
unsafe fn nibbles(p: *const u8) -> [__m512i; 8] {
    // SAFETY: the caller's record holds four lines of nibbles here.
    unsafe {
        let low = _mm512_set1_epi8(15);
        let l: [__m512i; 4] = [line(p), line(p.add(64)), line(p.add(128)), line(p.add(192))];
        // No closures in kernels: they do not inherit target features, and may stay calls.
        let mut codes = [_mm512_setzero_si512(); 8];
        for j in 0..4 {
            codes[j] = _mm512_and_si512(l[j], low);
            codes[j + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(l[j]), low);
        }
        codes
    }
}

#[inline(always)]
unsafe fn fifth_bits(mut codes: [__m512i; 8], masks: *const u8) -> [__m512i; 8] {
    // SAFETY: the caller's record holds eight 64-bit masks here; the rest is register arithmetic.
    unsafe {
        let bit = _mm512_set1_epi8(16);
        for (q, c) in codes.iter_mut().enumerate() {
            let mask = masks.cast::<u64>().add(q).read_unaligned();
            *c = _mm512_mask_add_epi8(*c, mask, *c, bit);
        }
    }
    codes
}

macro_rules! block32 {
    ($name:ident, $dtype:expr, zero $zero:expr) => {
        pub(in super::super) struct $name;
        impl Format for $name {
            const LAYOUT: RecordLayout = RecordLayout::of($dtype).unwrap();
            const ZERO_LOG2: Option<i32> = $zero;
            #[inline(always)]
            unsafe fn codes(w: *const u8, b: usize) -> [__m512i; 8] {
                // SAFETY: `w` points to a record of this dtype and `b` < 2.
                unsafe {
                    let c = nibbles(w.add(Self::LAYOUT.codes(b)));
                    if Self::LAYOUT.high_bytes > 0 { fifth_bits(c, w.add(Self::LAYOUT.high(b))) } else { c }
                }
            }
            #[inline(always)]
            unsafe fn scales(w: *const u8, b: usize, _: usize) -> (__m512, __m512) {
                // SAFETY: `w` points to a record of this dtype and `b` < 2.
                unsafe {
                    let d = half16(w.add(b * 32));
                    let m = match Self::ZERO_LOG2 {
                        Some(z) => _mm512_mul_ps(d, _mm512_set1_ps(-((1 << z) as f32))),
                        None => half16(w.add(64 + b * 32)),
                    };
                    (d, m)
                }
            }
        }
    };
}
block32!(Q4_0, DType::Q4_0, zero Some(3));
block32!(Q4_1, DType::Q4_1, zero None);
block32!(Q5_0, DType::Q5_0, zero Some(4));
block32!(Q5_1, DType::Q5_1, zero None);

pub(in super::super) struct Q8_0;
impl Format for Q8_0 {
    const LAYOUT: RecordLayout = RecordLayout::of(DType::Q8_0).unwrap();
    const ZERO_LOG2: Option<i32> = Some(7);
    #[inline(always)]
    unsafe fn codes(w: *const u8, b: usize) -> [__m512i; 8] {
        // SAFETY: `w` points to a q8_0 record and `b` < 2.
        unsafe {
            let p = w.add(Self::LAYOUT.codes(b));
            [
                line(p),
                line(p.add(64)),
                line(p.add(128)),
                line(p.add(192)),
                line(p.add(256)),
                line(p.add(320)),
                line(p.add(384)),
                line(p.add(448)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn scales(w: *const u8, b: usize, _: usize) -> (__m512, __m512) {
        // SAFETY: as above.
        unsafe {
            let d = half16(w.add(b * 32));
            (d, _mm512_mul_ps(d, _mm512_set1_ps(-128.0)))
        }
    }
}

/// 16 bytes (a row each) to f32.
#[inline(always)]
unsafe fn bytes16(p: *const u8) -> __m512 {
    // SAFETY: the caller's record holds 16 bytes here.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
}

macro_rules! k_quant {
    ($name:ident, $dtype:expr) => {
        pub(in super::super) struct $name;
        impl Format for $name {
            const LAYOUT: RecordLayout = RecordLayout::of($dtype).unwrap();
            #[inline(always)]
            unsafe fn codes(w: *const u8, b: usize) -> [__m512i; 8] {
                // SAFETY: `w` points to a record of this dtype and `b` < 8.
                unsafe {
                    let c = nibbles(w.add(Self::LAYOUT.codes(b)));
                    if Self::LAYOUT.high_bytes > 0 { fifth_bits(c, w.add(Self::LAYOUT.high(b))) } else { c }
                }
            }
            #[inline(always)]
            unsafe fn scales(w: *const u8, b: usize, _: usize) -> (__m512, __m512) {
                // SAFETY: `w` points to a record of this dtype and `b` < 8.
                unsafe {
                    let d = _mm512_mul_ps(half16(w), bytes16(w.add(64 + b * 16)));
                    // Negated before the multiplication, once for all blocks of the record.
                    let dmin = _mm512_sub_ps(_mm512_setzero_ps(), half16(w.add(32)));
                    (d, _mm512_mul_ps(dmin, bytes16(w.add(192 + b * 16))))
                }
            }
        }
    };
}
k_quant!(Q4K, DType::Q4_K);
k_quant!(Q5K, DType::Q5_K);

pub(in super::super) struct Q6K;
impl Format for Q6K {
    const LAYOUT: RecordLayout = RecordLayout::of(DType::Q6_K).unwrap();
    const HALVES: bool = true;
    const ZERO_LOG2: Option<i32> = Some(5);
    #[inline(always)]
    unsafe fn codes(w: *const u8, b: usize) -> [__m512i; 8] {
        // SAFETY: `w` points to a q6_k record and `b` < 8.
        unsafe {
            let mut c = nibbles(w.add(Self::LAYOUT.codes(b)));
            let pair = _mm512_set1_epi8(0x30);
            let high = w.add(Self::LAYOUT.high(b));
            let h = [line(high), line(high.add(64))];
            let mut l = 0;
            while l < 2 {
                let at = [
                    _mm512_slli_epi16::<4>(h[l]),
                    _mm512_slli_epi16::<2>(h[l]),
                    h[l],
                    _mm512_srli_epi16::<2>(h[l]),
                ];
                for q in 0..4 {
                    // codes | (at & pair)
                    c[l * 4 + q] = _mm512_ternarylogic_epi32::<0xf8>(c[l * 4 + q], at[q], pair);
                }
                l += 1;
            }
            c
        }
    }
    #[inline(always)]
    unsafe fn scales(w: *const u8, b: usize, h: usize) -> (__m512, __m512) {
        // SAFETY: `w` points to a q6_k record, `b` < 8 and `h` < 2.
        unsafe {
            let sc = _mm_loadu_si128(w.add(64 + (b * 2 + h) * 16).cast());
            let d = _mm512_mul_ps(half16(w), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sc)));
            (d, _mm512_mul_ps(d, _mm512_set1_ps(-32.0)))
        }
    }
}

/// Evaluates `$body` with the type `$F` that reads records of `$dtype`.
macro_rules! with_format {
    ($dtype:expr, $F:ident => $body:expr) => {{
        use $crate::simd::linear::quant::format;
        use $crate::tensor::DType;
        match $dtype {
            DType::Q4_0 => {
                type $F = format::Q4_0;
                $body
            }
            DType::Q4_1 => {
                type $F = format::Q4_1;
                $body
            }
            DType::Q5_0 => {
                type $F = format::Q5_0;
                $body
            }
            DType::Q5_1 => {
                type $F = format::Q5_1;
                $body
            }
            DType::Q8_0 => {
                type $F = format::Q8_0;
                $body
            }
            DType::Q4_K => {
                type $F = format::Q4K;
                $body
            }
            DType::Q5_K => {
                type $F = format::Q5K;
                $body
            }
            DType::Q6_K => {
                type $F = format::Q6K;
                $body
            }
            DType::F32 | DType::F16 | DType::BF16 => unreachable!("floats are not quantised"),
        }
    }};
}
pub(in super::super) use with_format;
