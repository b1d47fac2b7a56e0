//! bf16 tiles of quantised weights: codes of a group → d·q + m, in f32 or, as `half_tiles` has it, in f16.
//!
//! dequantise a code is put into the mantissa of a power of two, by one shift per byte and one logical operation:
//!            2^8 + q or 2^4 + q exactly, with no conversion; then w = (2^8 + q)·d + (m − 2^8·d) in f32. The
//!            offset is rounded at most by 2^-16 of d. To bf16 by adding half an ulp (ties away from zero) and
//!            one byte shuffle per pair: vcvtne2ps2bf16 and vpermw would be six operations where this is three
//! bound      two 512-bit ports; cycles per 16x32 weights (a tile), counted by scripts/mca for Sapphire Rapids: q4_0,
//!            q4_1 67, q4_k 71, q8_0 74, 5 and 6 bits 91-96.
//!            Against 16 cycles of products per 16 tokens, and 12 cycles per 64-byte line from memory
//! error      d·q + m rounded to bf16: 2^-8 of a weight

use std::arch::x86_64::*;

use super::super::quant::format::RecordFormat;
use super::half_tiles;

/// Half an ulp of bf16, in the bits of an f32.
const HALF_ULP: i32 = 0x8000;

/// Rounds two vectors of f32 to bf16, as the low and high words of dwords (a pair of consecutive k per row).
/// To nearest; ties away from zero. Infinities stay; NaNs whose payload is all ones do not, and no f16 scale
/// but a broken one makes such.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pair(even: __m512, odd: __m512) -> __m512i {
    let half = _mm512_set1_epi32(HALF_ULP);
    let even = _mm512_add_epi32(_mm512_castps_si512(even), half);
    let mut both = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    // The upper word of each dword of `even` goes below that of `odd`.
    let upper = _mm512_set4_epi32(0x0f0e_0f0e, 0x0b0a_0b0a, 0x0706_0706, 0x0302_0302);
    let low: __mmask64 = 0x3333_3333_3333_3333;
    // SAFETY: register arithmetic. In asm, because the compiler turns the intrinsic into vpermt2w: one
    // operation fewer where that is one, two more on Intel's cores, the only ones with tiles.
    unsafe {
        std::arch::asm!(
            "vpshufb {both} {{{low}}}, {even}, {upper}",
            both = inout(zmm_reg) both, low = in(kreg) low, even = in(zmm_reg) even, upper = in(zmm_reg) upper,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    both
}

/// f32 from a code in some bits of a dword: (bits & mask) | power, which is the power of two plus the code.
#[inline]
#[target_feature(enable = "avx512f")]
fn plus<const MASK: i32>(bits: __m512i, power: f32) -> __m512 {
    let (mask, power) = (_mm512_set1_epi32(MASK), _mm512_set1_epi32(power.to_bits() as i32));
    _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xea>(bits, mask, power))
}

/// The four bytes of each dword, each with its lowest bit at bit 15.
#[inline]
#[target_feature(enable = "avx512f")]
fn bytes_at_15(c: __m512i) -> [__m512i; 4] {
    [
        _mm512_slli_epi32::<15>(c),
        _mm512_slli_epi32::<7>(c),
        _mm512_srli_epi32::<1>(c),
        _mm512_srli_epi32::<9>(c),
    ]
}

/// Writes four codes per row, `power` + q each, to two rows of a tile.
///
/// # Safety
/// `out` has room for two rows of 32 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn quad(q: [__m512; 4], d: __m512, m: __m512, out: *mut u16) {
    // SAFETY: as promised.
    unsafe {
        let w: [__m512; 4] = [
            _mm512_fmadd_ps(q[0], d, m),
            _mm512_fmadd_ps(q[1], d, m),
            _mm512_fmadd_ps(q[2], d, m),
            _mm512_fmadd_ps(q[3], d, m),
        ];
        _mm512_storeu_si512(out.cast(), pair(w[0], w[1]));
        _mm512_storeu_si512(out.add(32).cast(), pair(w[2], w[3]));
    }
}

/// Scales and offsets of a block of 32: two pairs, for codes above 2^8 and above 2^4 (`NIBBLES`) or for the first and the
/// second half of the block.
///
/// # Safety
/// The record at `w` has block `b`; the CPU has the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
unsafe fn scales<F: RecordFormat, const NIBBLES: bool>(w: *const u8, b: usize) -> [(__m512, __m512); 2] {
    // SAFETY: as promised.
    unsafe {
        let (d, m) = F::scales(w, b, 0);
        let first = (d, _mm512_fnmadd_ps(d, _mm512_set1_ps(256.0), m));
        if NIBBLES {
            [first, (d, _mm512_fnmadd_ps(d, _mm512_set1_ps(16.0), m))]
        } else if F::HALVES {
            let (d, m) = F::scales(w, b, 1);
            [first, (d, _mm512_fnmadd_ps(d, _mm512_set1_ps(256.0), m))]
        } else {
            [first, first]
        }
    }
}

/// Makes a quarter of a tile, four of its 16 rows: those of line `J` of a block's nibbles, or of its codes `2 J` and `2
/// J + 1`. With `NIBBLES` the codes are nibbles without high bits, taken directly from their lines without splitting
/// into bytes first.
///
/// # Safety
/// The record at `w` has block `b`, `scales` are its; `out` has room for a tile; the CPU has the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
unsafe fn part<F: RecordFormat, const NIBBLES: bool, const J: usize>(
    w: *const u8,
    b: usize,
    scales: &[(__m512, __m512); 2],
    out: *mut u16,
) {
    // SAFETY: as promised.
    unsafe {
        if NIBBLES {
            // Codes end the record, 256 bytes a block. A line holds, per row, a dword with elements
            // 4j..4j+4 in the low nibbles of its bytes and 16+4j.. in the high ones.
            let blocks = F::LAYOUT.record_k / 32;
            let lines = w.add(F::LAYOUT.record_bytes - (blocks - b) * 256);
            let c = bytes_at_15(_mm512_loadu_si512(lines.add(J * 64).cast()));
            let low = [
                plus::<0x0007_8000>(c[0], 256.0),
                plus::<0x0007_8000>(c[1], 256.0),
                plus::<0x0007_8000>(c[2], 256.0),
                plus::<0x0007_8000>(c[3], 256.0),
            ];
            let high = [
                plus::<0x0078_0000>(c[0], 16.0),
                plus::<0x0078_0000>(c[1], 16.0),
                plus::<0x0078_0000>(c[2], 16.0),
                plus::<0x0078_0000>(c[3], 16.0),
            ];
            quad(low, scales[0].0, scales[0].1, out.add(J * 64));
            quad(high, scales[1].0, scales[1].1, out.add(256 + J * 64));
        } else {
            let codes = F::codes(w, b);
            let (d, m) = scales[J / 2];
            for q in [2 * J, 2 * J + 1] {
                let c = bytes_at_15(codes[q]);
                let q4 = [
                    plus::<0x007f_8000>(c[0], 256.0),
                    plus::<0x007f_8000>(c[1], 256.0),
                    plus::<0x007f_8000>(c[2], 256.0),
                    plus::<0x007f_8000>(c[3], 256.0),
                ];
                quad(q4, d, m, out.add(q * 64));
            }
        }
    }
}

/// Makes tile `step` of a packed group.
///
/// # Safety
/// The group at `w` has this block of 32; `out` has room for a tile; the CPU has the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
pub(super) unsafe fn whole<F: RecordFormat, const NIBBLES: bool>(w: *const u8, step: usize, out: *mut u16) {
    let blocks = F::LAYOUT.record_k / 32;
    let (w, b) = (w.wrapping_add(step / blocks * F::LAYOUT.record_bytes), step % blocks);
    // SAFETY: block `b` of a record of the group.
    unsafe {
        let scales = scales::<F, NIBBLES>(w, b);
        part::<F, NIBBLES, 0>(w, b, &scales, out);
        part::<F, NIBBLES, 1>(w, b, &scales, out);
        part::<F, NIBBLES, 2>(w, b, &scales, out);
        part::<F, NIBBLES, 3>(w, b, &scales, out);
    }
}

/// A quarter of [`whole`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
pub(super) unsafe fn quarter<F: RecordFormat, const NIBBLES: bool>(
    w: *const u8,
    step: usize,
    quarter: usize,
    out: *mut u16,
) {
    let blocks = F::LAYOUT.record_k / 32;
    let (w, b) = (w.wrapping_add(step / blocks * F::LAYOUT.record_bytes), step % blocks);
    // SAFETY: block `b` of a record of the group.
    unsafe {
        let scales = scales::<F, NIBBLES>(w, b);
        match quarter {
            0 => part::<F, NIBBLES, 0>(w, b, &scales, out),
            1 => part::<F, NIBBLES, 1>(w, b, &scales, out),
            2 => part::<F, NIBBLES, 2>(w, b, &scales, out),
            _ => part::<F, NIBBLES, 3>(w, b, &scales, out),
        }
    }
}

/// As [`whole`], with f16 arithmetic.
///
/// # Safety
/// As there; the CPU has [`half_arithmetic`](crate::amx::half_arithmetic).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
pub(super) unsafe fn half_whole<F: RecordFormat, const NIBBLES: bool>(
    group: *const u8,
    step: usize,
    out: *mut u16,
) {
    let blocks = F::LAYOUT.record_k / 32;
    let (w, b) = (group.wrapping_add(step / blocks * F::LAYOUT.record_bytes), step % blocks);
    // SAFETY: block `b` of a record of the group.
    unsafe {
        let Some(scales) = half_tiles::scales::<F, NIBBLES>(w, b) else {
            return whole::<F, NIBBLES>(group, step, out);
        };
        half_tiles::part::<F, NIBBLES, 0>(w, b, &scales, out);
        half_tiles::part::<F, NIBBLES, 1>(w, b, &scales, out);
        half_tiles::part::<F, NIBBLES, 2>(w, b, &scales, out);
        half_tiles::part::<F, NIBBLES, 3>(w, b, &scales, out);
    }
}

/// A quarter of [`half_whole`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
pub(super) unsafe fn half_quarter<F: RecordFormat, const NIBBLES: bool>(
    group: *const u8,
    step: usize,
    j: usize,
    out: *mut u16,
) {
    let blocks = F::LAYOUT.record_k / 32;
    let (w, b) = (group.wrapping_add(step / blocks * F::LAYOUT.record_bytes), step % blocks);
    // SAFETY: block `b` of a record of the group.
    unsafe {
        let Some(scales) = half_tiles::scales::<F, NIBBLES>(w, b) else {
            return quarter::<F, NIBBLES>(group, step, j, out);
        };
        match j {
            0 => half_tiles::part::<F, NIBBLES, 0>(w, b, &scales, out),
            1 => half_tiles::part::<F, NIBBLES, 1>(w, b, &scales, out),
            2 => half_tiles::part::<F, NIBBLES, 2>(w, b, &scales, out),
            _ => half_tiles::part::<F, NIBBLES, 3>(w, b, &scales, out),
        }
    }
}
