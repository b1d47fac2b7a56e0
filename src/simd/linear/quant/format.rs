//! How the AVX-512 and AMX kernels read records of packed codes ([`packed`](super::super::packed)), one row per lane.

use std::arch::x86_64::*;

use super::super::packed::{RecordLayout, nibble_scales};
use crate::tensor::formats::{BlockFormat, Scales};

/// How a packed record of a block format is read. `b` counts the blocks of 32 in a record.
pub(in super::super) trait RecordFormat {
    const LAYOUT: RecordLayout;
    /// Scales per 16 elements instead of per 32.
    const HALVES: bool;
    /// Above the largest code.
    const CODES: f32;
    /// Codes are nibbles, without high bits or a table.
    const NIBBLES: bool;
    /// log2 of the zero point, if it is the same for all blocks: the kernel then folds it into its integer sums, which
    /// start at minus the zero point times the sum of the activations, and needs no offset.
    const ZERO_LOG2: Option<i32>;
    /// The 8 quads of block `b`, unsigned bytes, a row per dword: codes, or what their table says.
    unsafe fn codes(w: *const u8, b: usize) -> [__m512i; 8];
    /// Scale and offset of block `b`; of its half `h` when [`RecordFormat::HALVES`].
    unsafe fn scales(w: *const u8, b: usize, h: usize) -> (__m512, __m512);
}

impl<F: BlockFormat> RecordFormat for F {
    const LAYOUT: RecordLayout = RecordLayout::new::<F>();
    const HALVES: bool = F::SUB == 16;
    const CODES: f32 = if F::TABLE.is_some() { 256.0 } else { (1u32 << F::BITS) as f32 };
    const NIBBLES: bool = F::BITS == 4 && F::TABLE.is_none();
    const ZERO_LOG2: Option<i32> = if F::ZERO > 0 { Some(F::ZERO.ilog2() as i32) } else { None };

    #[inline(always)]
    unsafe fn codes(w: *const u8, b: usize) -> [__m512i; 8] {
        // SAFETY: `w` points to a record of this format and `b` is a block of it.
        unsafe {
            let (high, codes) = (w.add(Self::LAYOUT.high(b)), w.add(Self::LAYOUT.codes(b)));
            match F::BITS {
                4 => match F::TABLE {
                    Some(table) => looked_up(nibbles(codes), table),
                    None => nibbles(codes),
                },
                5 => with_bits::<16>(nibbles(codes), high),
                2 => low_pairs(codes),
                3 => with_bits::<4>(low_pairs(codes), high),
                6 => pairs(nibbles(codes), high),
                _ => bytes(codes),
            }
        }
    }

    #[inline(always)]
    unsafe fn scales(w: *const u8, b: usize, h: usize) -> (__m512, __m512) {
        // SAFETY: `w` points to a record of this format, `b` is a block of it and `h` < 2.
        unsafe {
            let d = match F::SCALES {
                Scales::Scale => half16(w.add(b * 32)),
                Scales::PowerOfTwo => wide16(w.add(b * 32)),
                Scales::ScaleMin => return (half16(w.add(b * 32)), half16(w.add(64 + b * 32))),
                Scales::SuperMin => {
                    let (sub, at) = (b * (32 / F::SUB) + h, w.add(64));
                    let (d, min) = if nibble_scales::<F>() {
                        nibbles16(at.add(sub * 16))
                    } else {
                        (bytes16(at.add(sub * 16)), bytes16(at.add((256 / F::SUB + sub) * 16)))
                    };
                    let d = _mm512_mul_ps(half16(w), d);
                    // Negated before the multiplication, once for all blocks of the record.
                    let dmin = _mm512_sub_ps(_mm512_setzero_ps(), half16(w.add(32)));
                    return (d, _mm512_mul_ps(dmin, min));
                }
                Scales::SuperSigned => {
                    let sub = _mm_loadu_si128(w.add(64 + (b * (32 / F::SUB) + h) * 16).cast());
                    _mm512_mul_ps(half16(w), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sub)))
                }
            };
            (d, _mm512_mul_ps(d, _mm512_set1_ps(-f32::from(F::ZERO))))
        }
    }
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

/// 16 bf16 to f32.
#[inline(always)]
unsafe fn wide16(p: *const u8) -> __m512 {
    // SAFETY: the caller's record holds 16 words here.
    unsafe {
        let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
    }
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

/// The bytes of `table` at `codes`.
#[inline(always)]
unsafe fn looked_up(mut codes: [__m512i; 8], table: &[u8; 16]) -> [__m512i; 8] {
    // SAFETY: a table is 16 bytes; the rest is register arithmetic.
    unsafe {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        for c in &mut codes {
            *c = _mm512_shuffle_epi8(table, *c);
        }
    }
    codes
}

/// Adds `BIT` to the codes whose bit is set in the masks.
#[inline(always)]
unsafe fn with_bits<const BIT: i8>(mut codes: [__m512i; 8], masks: *const u8) -> [__m512i; 8] {
    // SAFETY: the caller's record holds eight 64-bit masks here; the rest is register arithmetic.
    unsafe {
        let bit = _mm512_set1_epi8(BIT);
        for (q, c) in codes.iter_mut().enumerate() {
            let mask = masks.cast::<u64>().add(q).read_unaligned();
            *c = _mm512_mask_add_epi8(*c, mask, *c, bit);
        }
    }
    codes
}

/// Codes of two bits.
#[inline(always)]
unsafe fn low_pairs(p: *const u8) -> [__m512i; 8] {
    // SAFETY: the caller's record holds two lines of pairs here; the rest is register arithmetic.
    unsafe {
        let pair = _mm512_set1_epi8(3);
        let mut codes = [pair; 8];
        for l in 0..2 {
            let v = line(p.add(l * 64));
            codes[l * 4] = _mm512_and_si512(v, pair);
            codes[l * 4 + 1] = _mm512_and_si512(_mm512_srli_epi16::<2>(v), pair);
            codes[l * 4 + 2] = _mm512_and_si512(_mm512_srli_epi16::<4>(v), pair);
            codes[l * 4 + 3] = _mm512_and_si512(_mm512_srli_epi16::<6>(v), pair);
        }
        codes
    }
}

/// 16 bytes (a row each) to f32.
#[inline(always)]
unsafe fn bytes16(p: *const u8) -> __m512 {
    // SAFETY: the caller's record holds 16 bytes here.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
}

/// The low and the high nibbles of 16 bytes (a row each) to f32.
#[inline(always)]
unsafe fn nibbles16(p: *const u8) -> (__m512, __m512) {
    // SAFETY: the caller's record holds 16 bytes here.
    unsafe {
        let both = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        let low = _mm512_and_si512(both, _mm512_set1_epi32(15));
        (_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(both)))
    }
}

/// Adds the fifth and sixth bits of codes.
#[inline(always)]
unsafe fn pairs(mut codes: [__m512i; 8], high: *const u8) -> [__m512i; 8] {
    // SAFETY: the caller's record holds two lines here; the rest is register arithmetic.
    unsafe {
        let pair = _mm512_set1_epi8(0x30);
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
                codes[l * 4 + q] = _mm512_ternarylogic_epi32::<0xf8>(codes[l * 4 + q], at[q], pair);
            }
            l += 1;
        }
        codes
    }
}

#[inline(always)]
unsafe fn bytes(p: *const u8) -> [__m512i; 8] {
    // SAFETY: register arithmetic.
    let mut codes = [unsafe { _mm512_setzero_si512() }; 8];
    for q in 0..8 {
        // SAFETY: the caller's record holds eight lines here.
        codes[q] = unsafe { line(p.add(q * 64)) };
    }
    codes
}
