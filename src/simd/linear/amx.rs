//! Linear on AMX: tiles of bf16 weights, made a quarter at a time between tile products.
//!
//!   quantised   codes of a group → d·q + m → bf16 tiles (this file), then products
//!   bf16        rows of the file → transposed to tiles (this file), then products; up to 16 tokens: `rows_tiles`
//!   f16         rows of the file → converted (`panel`), then products
//!   bf16, f16   packed at load: tiles in place (`stored`)
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
//! measured   on a Sapphire Rapids, as a C program (decision 0023): q4_0, quarters made in the K loop 1.15 TFLOP/s a thread
//!            at M = 512, through the ring 0.585 at 32; this code was executed on software tiles only
//! error      weights (quantised: d·q + m; f16) and activations rounded to bf16, f32 accumulation

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::packed::GROUP;
use super::panel::{RowBlock, panel_bf16};
use super::rows_tiles;
use super::stored::Tiles;
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

/// Scales and offsets of a block of 32: two pairs, for codes above 2^8 and above 2^4 (`NIBBLES`) or for the first and the
/// second half of the block.
///
/// # Safety
/// The record at `w` has block `b`; the CPU has the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
unsafe fn scales<F: Format, const NIBBLES: bool>(w: *const u8, b: usize) -> [(__m512, __m512); 2] {
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

/// A quarter of a tile, four of its 16 rows: those of line `J` of a block's nibbles, or of its codes `2 J` and `2 J + 1`.
/// `NIBBLES`: the codes are nibbles and nothing else, and are taken from their lines, not split into bytes first.
///
/// # Safety
/// The record at `w` has block `b`, `scales` are its; `out` has room for a tile; the CPU has the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
unsafe fn part<F: Format, const NIBBLES: bool, const J: usize>(
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

/// Tile `step` of a packed group.
///
/// # Safety
/// The group at `w` has this block of 32; `out` has room for a tile; the CPU has the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
unsafe fn dequantise<F: Format, const NIBBLES: bool>(w: *const u8, step: usize, out: *mut u16) {
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

/// A quarter of [`dequantise`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
unsafe fn dequantise_quarter<F: Format, const NIBBLES: bool>(
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

/// A quarter of a tile from 16 rows of 32 bf16 (`stride` bytes apart): the transpose of 4x16 of the 16x16 dwords. Its
/// first half, across 128-bit lanes, is done by loads that insert; they need no shuffle port, of which there is one.
///
/// # Safety
/// 16 rows of 64 bytes are readable, `out` has room for a tile; the CPU has AVX-512 F; `j < 4`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn transpose_quarter(w: *const u8, stride: usize, j: usize, out: *mut u16) {
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

    /// The packed rows of `panel`, which have tile `step`.
    #[inline]
    fn group(&self, panel: usize, step: usize) -> *const u8 {
        assert!((step + 1) * 32 * F::LAYOUT.record_bytes <= self.bytes * F::LAYOUT.record_k);
        self.groups[panel * self.bytes..(panel + 1) * self.bytes].as_ptr()
    }
}

impl<F: Format, const NIBBLES: bool> Panels for Groups<'_, F, NIBBLES> {
    fn stored(&self, _: usize, _: usize) -> Option<*const u16> {
        None
    }

    unsafe fn fill(&self, panel: usize, step: usize, out: *mut u16) {
        // SAFETY: the group has this step (checked); the caller's contract.
        unsafe { dequantise::<F, NIBBLES>(self.group(panel, step), step, out) };
    }

    unsafe fn quarter(&self, panel: usize, step: usize, quarter: usize, out: *mut u16) {
        // SAFETY: as above.
        unsafe { dequantise_quarter::<F, NIBBLES>(self.group(panel, step), step, quarter, out) };
    }

    fn prefetch(&self, panel: usize, step: usize, quarter: usize) {
        // Each step takes its share of the record's lines.
        let per_step = F::LAYOUT.record_bytes * 32 / F::LAYOUT.record_k;
        let from = (4 * step + quarter) * per_step / 4;
        for byte in (from..from + per_step / 4).step_by(64) {
            let line = self.groups.as_ptr().wrapping_add(panel * self.bytes + byte);
            // SAFETY: prefetching any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
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

    unsafe fn fill(&self, panel: usize, step: usize, out: *mut u16) {
        // SAFETY: rows of the panel exist, and the caller's contract; whole tiles read elements below k only.
        unsafe {
            match self.whole(panel, step) {
                Some(w) => transpose_tile(w, self.stride(), out),
                None => self.edge(panel, step, out),
            }
        }
    }

    unsafe fn quarter(&self, panel: usize, step: usize, quarter: usize, out: *mut u16) {
        // SAFETY: as above.
        unsafe {
            match self.whole(panel, step) {
                Some(w) => transpose_quarter(w, self.stride(), quarter, out),
                None if quarter == 0 => self.edge(panel, step, out),
                None => {}
            }
        }
    }

    fn prefetch(&self, panel: usize, step: usize, quarter: usize) {
        let w = self.w.wrapping_add(panel * GROUP * self.stride() + step * 64);
        for row in (4 * quarter..4 * quarter + 4).take_while(|row| panel * GROUP + row < self.n) {
            // SAFETY: prefetching any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(row * self.stride()).cast()) };
        }
    }
}

impl Rows {
    /// Bytes of a row.
    fn stride(&self) -> usize {
        self.k * self.dtype.block_bytes()
    }

    /// Where tile `step` of `panel` lies, if it is 16 rows of 32 bf16.
    #[inline]
    fn whole(&self, panel: usize, step: usize) -> Option<*const u8> {
        let whole = self.dtype == DType::BF16 && (panel + 1) * GROUP <= self.n && (step + 1) * 32 <= self.k;
        whole.then(|| self.w.wrapping_add(panel * GROUP * self.stride() + step * 64))
    }

    /// A tile of fewer rows, at the end of k, or of f16.
    ///
    /// # Safety
    /// The panel exists; `out` has room for a tile.
    unsafe fn edge(&self, panel: usize, step: usize, out: *mut u16) {
        let (first, k0) = (panel * GROUP, step * 32);
        let rows = (self.n - first).min(GROUP);
        let kc = self.k.saturating_sub(k0).min(32);
        let w = self.w.wrapping_add(first * self.stride());
        // SAFETY: as promised; elements k0..k0 + kc exist.
        unsafe { panel_bf16(RowBlock { dtype: self.dtype, w, rows, k: self.k }, k0, kc, 32, out) };
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
            DType::F16 | DType::BF16 => run(&Tiles::new(w, k)),
            DType::F32 => unreachable!("f32 is not packed"),
        },
        Source::Rows(DType::BF16, w) if m <= rows_tiles::MAX_M && n >= GROUP => {
            let job = rows_tiles::Job { w, n, k, x, m, k_padded, out, ldo };
            // SAFETY: as above.
            unsafe { rows_tiles::gemm(&mut session, &job) };
        }
        Source::Rows(dtype, w) => run(&Rows { dtype, w, n, k }),
    }
}
