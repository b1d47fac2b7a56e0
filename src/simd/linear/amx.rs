//! Linear on AMX: panels of bf16 weights, made a slab at a time between tile products.
//!
//!   quantised   codes of a group → d·q + m → bf16 tiles (this file), then products
//!   bf16        rows of the file → transposed to tiles (this file), then products
//!   f16         rows of the file → converted (`panel`), then products
//!
//! Why not int8 tiles for quantised weights: their scales change every 32 elements, so a tile product
//! covers K = 32, as many multiply-adds as a bf16 tile; it would save the dequantisation (once per call
//! and weight) and pay a conversion of every 16x16 result per 32 elements (once per token block). From a
//! few tens of tokens on, bf16 wins, and its activations are more precise.
//!
//! dequantise a code is put into the mantissa of a power of two, by one shift per byte and one logical operation:
//!            2^8 + q or 2^4 + q exactly, with no conversion; then w = (2^8 + q)·d + (m − 2^8·d) in f32. The
//!            offset is rounded at most by 2^-16 of d. To bf16 by adding half an ulp (ties away from zero) and
//!            one byte shuffle per pair: vcvtne2ps2bf16 and vpermw would be six operations where this is three
//! bound      two 512-bit ports; cycles per 16x32 weights (a tile), counted by scripts/mca for Sapphire Rapids: q4_0,
//!            q4_1 67, q4_k 71, q8_0 74, 5 and 6 bits 91-96; bf16 40 (48 insertions beside loads, 32 shuffles).
//!            Against 16 cycles of products per 16 tokens, and 12 cycles per 64-byte line from memory
//! measured   not measured: no AMX machine at hand; verified by executing the same code on software tiles
//! error      weights (quantised: d·q + m; f16) and activations rounded to bf16, f32 accumulation

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::packed::GROUP;
use super::panel::{RowBlock, panel_bf16};
use super::vnni::{Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use crate::amx::Session;
use crate::amx::bf16::{Panels, gemm_bf16_raw};
use crate::tensor::DType;

/// Where panels come from.
pub(super) enum Source<'a> {
    /// Consecutive packed groups of a quantised dtype.
    Groups(DType, &'a [u8]),
    /// `n` rows of `k` f16 or bf16 weights.
    Rows(DType, *const u8),
}

/// Elements of a tile: 16 rows of weights, 32 of k.
const TILE: usize = 32 * GROUP;

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

/// f32 from a code that lies in bits of a dword: (bits & mask) | power, which is the power of two plus the code.
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

/// Four codes per row, `power` + q each, to two rows of a tile.
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

/// Tiles `steps` of a packed group. `NIBBLES`: the codes are nibbles and nothing else, and are taken from their
/// lines, not split into bytes first.
///
/// # Safety
/// The group at `w` has these blocks of 32; `out` has room for a tile each; the CPU has the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
unsafe fn dequantise<F: Format, const NIBBLES: bool>(w: *const u8, steps: Range<usize>, out: *mut u16) {
    let (blocks, bytes) = (F::LAYOUT.record_k / 32, F::LAYOUT.record_bytes);
    for (i, step) in steps.enumerate() {
        let b = step % blocks;
        // SAFETY: block `b` of a record of the group; tile `i` of `out`.
        unsafe {
            let w = w.add(step / blocks * bytes);
            let out = out.add(i * TILE);
            let (d, m) = F::scales(w, b, 0);
            let m256 = _mm512_fnmadd_ps(d, _mm512_set1_ps(256.0), m);
            if NIBBLES {
                // Codes end the record, 256 bytes a block. A line holds, per row, a dword with elements
                // 4j..4j+4 in the low nibbles of its bytes and 16+4j.. in the high ones.
                let lines = w.add(bytes - (blocks - b) * 256);
                let m16 = _mm512_fnmadd_ps(d, _mm512_set1_ps(16.0), m);
                for j in 0..4 {
                    let c = bytes_at_15(_mm512_loadu_si512(lines.add(j * 64).cast()));
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
                    quad(low, d, m256, out.add(j * 64));
                    quad(high, d, m16, out.add(256 + j * 64));
                }
            } else {
                let codes = F::codes(w, b);
                let first = (d, m256);
                let second = if F::HALVES {
                    let (d, m) = F::scales(w, b, 1);
                    (d, _mm512_fnmadd_ps(d, _mm512_set1_ps(256.0), m))
                } else {
                    first
                };
                for (q, &c) in codes.iter().enumerate() {
                    let (d, m) = if q < 4 { first } else { second };
                    let c = bytes_at_15(c);
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
}

/// One tile from 16 rows of 32 bf16 (`stride` bytes apart): the transpose of 16x16 dwords. Its first half, across
/// 128-bit lanes, is done by loads that insert; they need no shuffle port, of which there is one.
///
/// # Safety
/// 16 rows of 64 bytes are readable, `out` has room for a tile; the CPU has AVX-512 F.
#[inline(always)]
unsafe fn transpose_bf16(w: *const u8, stride: usize, out: *mut u16) {
    // SAFETY: as promised.
    unsafe {
        for j in 0..4 {
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
}

/// # Safety
/// 16 rows, `stride` bytes apart, have 32 bf16 for each of `tiles` tiles; `out` has room for them; the CPU has
/// AVX-512 F.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tiles_bf16(w: *const u8, stride: usize, tiles: usize, out: *mut u16) {
    for t in 0..tiles {
        // SAFETY: as promised.
        unsafe { transpose_bf16(w.add(t * 64), stride, out.add(t * TILE)) };
    }
}

/// Packed groups as panels.
struct Groups<'a, F, const NIBBLES: bool> {
    groups: &'a [u8],
    /// Bytes of a group.
    bytes: usize,
    _format: PhantomData<F>,
}

impl<'a, F: Format, const NIBBLES: bool> Groups<'a, F, NIBBLES> {
    fn new(groups: &'a [u8], k: usize) -> Self {
        Groups { groups, bytes: F::LAYOUT.group_bytes(k), _format: PhantomData }
    }
}

impl<F: Format, const NIBBLES: bool> Panels for Groups<'_, F, NIBBLES> {
    fn stored(&self, _: usize, _: usize) -> Option<*const u16> {
        None
    }

    unsafe fn fill(&self, panel: usize, steps: Range<usize>, out: *mut u16) {
        let group = &self.groups[panel * self.bytes..(panel + 1) * self.bytes];
        assert!(steps.end * 32 * F::LAYOUT.record_bytes <= self.bytes * F::LAYOUT.record_k);
        // SAFETY: the group has these steps (checked); the caller's contract.
        unsafe { dequantise::<F, NIBBLES>(group.as_ptr(), steps, out) };
    }

    fn prefetch(&self, panel: usize, steps: Range<usize>) {
        // Each step takes its share of the record's lines.
        let per_step = F::LAYOUT.record_bytes * 32 / F::LAYOUT.record_k;
        let from = self.groups.as_ptr().wrapping_add(panel * self.bytes + steps.start * per_step);
        for line in (0..steps.len() * per_step).step_by(64) {
            // SAFETY: prefetching any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line).cast()) };
        }
    }
}

/// Rows of the file as panels.
struct Rows {
    dtype: DType,
    w: *const u8,
    n: usize,
    k: usize,
}

impl Panels for Rows {
    fn stored(&self, _: usize, _: usize) -> Option<*const u16> {
        None
    }

    unsafe fn fill(&self, panel: usize, steps: Range<usize>, out: *mut u16) {
        let (first, rows) = (panel * GROUP, (self.n - panel * GROUP).min(GROUP));
        let stride = self.k * self.dtype.block_bytes();
        let w = self.w.wrapping_add(first * stride);
        let (mut steps, mut out) = (steps, out);
        // SAFETY: rows first.. exist, and the caller's contract; whole tiles read elements below k only.
        unsafe {
            let whole = steps.end.min(self.k / 32).saturating_sub(steps.start);
            if self.dtype == DType::BF16 && rows == GROUP && whole > 0 {
                tiles_bf16(w.add(steps.start * 64), stride, whole, out);
                (steps.start, out) = (steps.start + whole, out.add(whole * TILE));
            }
            if !steps.is_empty() {
                self.edge(w, rows, steps, out);
            }
        }
    }

    fn prefetch(&self, panel: usize, steps: Range<usize>) {
        let stride = self.k * self.dtype.block_bytes();
        let w = self.w.wrapping_add(panel * GROUP * stride + steps.start * 64);
        for row in 0..(self.n - panel * GROUP).min(GROUP) {
            for step in 0..steps.len() {
                // SAFETY: prefetching any address is harmless.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(w.wrapping_add(row * stride + step * 64).cast()) };
            }
        }
    }
}

impl Rows {
    /// Tiles of fewer rows, at the end of k, or of f16.
    ///
    /// # Safety
    /// `rows` rows at `w` exist; `out` has room for a tile a step.
    unsafe fn edge(&self, w: *const u8, rows: usize, steps: Range<usize>, out: *mut u16) {
        let (k0, padded) = (steps.start * 32, steps.len() * 32);
        let kc = self.k.saturating_sub(k0).min(padded);
        // SAFETY: as promised; elements k0..k0 + kc exist.
        unsafe { panel_bf16(RowBlock { dtype: self.dtype, w, rows, k: self.k }, k0, kc, padded, out) };
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
    let mut session = Session::open().expect("the tier was checked when the weight was made");
    let mut run = |panels: &dyn Panels| {
        // SAFETY: n rows make n/16 panels; k_padded is k rounded up to whole records (K-quants: 256, of which
        // k is a multiple) or padded with zeros by `Rows`; the rest is the contract.
        unsafe { gemm_bf16_raw(&mut session, m, n, k_padded, x, panels, out, ldo) }
    };
    match *source {
        Source::Groups(dtype, w) => match dtype {
            DType::Q4_0 => run(&Groups::<Q4_0, true>::new(w, k)),
            DType::Q4_1 => run(&Groups::<Q4_1, true>::new(w, k)),
            DType::Q5_0 => run(&Groups::<Q5_0, false>::new(w, k)),
            DType::Q5_1 => run(&Groups::<Q5_1, false>::new(w, k)),
            DType::Q8_0 => run(&Groups::<Q8_0, false>::new(w, k)),
            DType::Q4_K => run(&Groups::<Q4K, true>::new(w, k)),
            DType::Q5_K => run(&Groups::<Q5K, false>::new(w, k)),
            DType::Q6_K => run(&Groups::<Q6K, false>::new(w, k)),
            DType::F32 | DType::F16 | DType::BF16 => unreachable!("floats are not packed"),
        },
        Source::Rows(dtype, w) => run(&Rows { dtype, w, n, k }),
    }
}
