//! Linear on AMX: tiles of bf16 weights, made a quarter at a time between tile products.
//!
//!   quantised   codes of a group → d·q + m → bf16 tiles (this file; for few tokens with f16 arithmetic, `half_tiles`), then
//!               products
//!   bf16        rows of the file → transposed to tiles (this file), then products; up to 16 tokens: `rows_tiles`
//!   f16         rows of the file → converted (`panel`), then products
//!   bf16, f16   packed at load: tiles in place (`stored`)
//!
//! Why not int8 tiles for many tokens: their scales change every 32 elements, so a tile product covers K = 32, as many
//! multiply-adds as a bf16 tile; it saves the dequantisation (once per call and weight) and pays a conversion of every 16x16
//! result per 32 elements (once per token block). From 17 tokens on bf16 wins, and its activations are more precise;
//! up to 16 it is `int8_tiles`.
//!
//! bound      two 512-bit ports; cycles per 16x32 weights (a tile), counted by scripts/mca for Sapphire Rapids: bf16 40 (48
//!            insertions beside loads, 32 shuffles), quantised: `dequantise`. Against 16 cycles of products per 16 tokens, and 12
//!            cycles per 64-byte line from memory
//! measured   on a Sapphire Rapids, as a C program (decision 0023): q4_0, quarters made in the K loop 1.15 TFLOP/s a thread
//!            at M = 512, through the ring 0.585 at 32; this code was executed on software tiles only
//! error      weights (quantised: d·q + m; f16) and activations rounded to bf16, f32 accumulation

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::dequantise;
use super::packed::GROUP;
use super::panel::{RowBlock, panel_bf16};
use super::rows_tiles;
use super::stored::Tiles;
use super::vnni::{Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use crate::amx::bf16::{Panels, gemm_bf16_raw};
use crate::amx::{Session, half_arithmetic};
use crate::tensor::DType;

/// Where panels come from.
pub(super) enum Source<'a> {
    /// Consecutive packed groups of a quantised dtype.
    Groups(DType, &'a [u8]),
    /// `n` rows of `k` f16 or bf16 weights.
    Rows(DType, *const u8),
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

/// Packed groups as panels. `HALF`: made with f16 arithmetic.
struct Groups<'a, F, const NIBBLES: bool, const HALF: bool> {
    groups: &'a [u8],
    /// Bytes of a group.
    bytes: usize,
    _format: PhantomData<F>,
}

impl<'a, F: Format, const NIBBLES: bool, const HALF: bool> Groups<'a, F, NIBBLES, HALF> {
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

impl<F: Format, const NIBBLES: bool, const HALF: bool> Panels for Groups<'_, F, NIBBLES, HALF> {
    fn stored(&self, _: usize, _: usize) -> Option<*const u16> {
        None
    }

    unsafe fn fill(&self, panel: usize, step: usize, out: *mut u16) {
        let group = self.group(panel, step);
        // SAFETY: the group has this step (checked); the caller's contract; f16 arithmetic is there where it is chosen.
        unsafe {
            if HALF {
                dequantise::half_whole::<F, NIBBLES>(group, step, out);
            } else {
                dequantise::whole::<F, NIBBLES>(group, step, out);
            }
        }
    }

    unsafe fn quarter(&self, panel: usize, step: usize, quarter: usize, out: *mut u16) {
        let group = self.group(panel, step);
        // SAFETY: as above.
        unsafe {
            if HALF {
                dequantise::half_quarter::<F, NIBBLES>(group, step, quarter, out);
            } else {
                dequantise::quarter::<F, NIBBLES>(group, step, quarter, out);
            }
        }
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

/// What multiplies a weight by `m` tokens.
struct Product<'a> {
    session: &'a mut Session,
    n: usize,
    k: usize,
    k_padded: usize,
    x: *const u16,
    m: usize,
    out: *mut f32,
    ldo: usize,
}

impl Product<'_> {
    /// # Safety
    /// As [`gemm`], of which `panels` are the source.
    unsafe fn by(&mut self, panels: &dyn Panels) {
        let Product { n, k_padded, x, m, out, ldo, .. } = *self;
        // SAFETY: n rows make n/16 panels; k_padded is k rounded up to whole records (K-quants: 256, of which
        // k is a multiple) or padded with zeros by `Rows`; the rest is the contract.
        unsafe { gemm_bf16_raw(self.session, m, n, k_padded, x, panels, out, ldo) }
    }

    /// # Safety
    /// As [`gemm`], of which `w` are the groups; with `half` f16 arithmetic is there.
    unsafe fn by_groups<F: Format, const NIBBLES: bool>(&mut self, w: &[u8], half: bool) {
        // SAFETY: the caller's contract.
        unsafe {
            if half {
                self.by(&Groups::<F, NIBBLES, true>::new(w, self.k));
            } else {
                self.by(&Groups::<F, NIBBLES, false>::new(w, self.k));
            }
        }
    }
}

/// `out[t·ldo + r] = Σ_k w[r][k]·x[t][k]` for `n` rows. `half_up_to`: tokens up to which quantised weights become tiles by f16
/// arithmetic, where the CPU has it.
///
/// # Safety
/// AMX and AVX-512 BF16 are usable; the source holds `n` rows of `k`; `x` is A tiles of `m` rows of
/// `k_padded` (a multiple of 64 that covers `k`); `out` has `m` rows of `ldo >= n`.
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn gemm(
    source: &Source<'_>,
    half_up_to: usize,
    n: usize,
    k: usize,
    k_padded: usize,
    x: *const u16,
    m: usize,
    out: *mut f32,
    ldo: usize,
) {
    let mut session = Session::open().expect("the tier was checked when the weight was made");
    let half = m <= half_up_to && half_arithmetic();
    let mut run = Product { session: &mut session, n, k, k_padded, x, m, out, ldo };
    // SAFETY: the caller's contract.
    unsafe {
        match *source {
            Source::Groups(dtype, w) => match dtype {
                DType::Q4_0 => run.by_groups::<Q4_0, true>(w, half),
                DType::Q4_1 => run.by_groups::<Q4_1, true>(w, half),
                DType::Q5_0 => run.by_groups::<Q5_0, false>(w, half),
                DType::Q5_1 => run.by_groups::<Q5_1, false>(w, half),
                DType::Q8_0 => run.by_groups::<Q8_0, false>(w, half),
                DType::Q4_K => run.by_groups::<Q4K, true>(w, half),
                DType::Q5_K => run.by_groups::<Q5K, false>(w, half),
                DType::Q6_K => run.by_groups::<Q6K, false>(w, half),
                DType::F16 | DType::BF16 => run.by(&Tiles::new(w, k)),
                DType::F32 => unreachable!("f32 is not packed"),
            },
            Source::Rows(DType::BF16, w) if m <= rows_tiles::MAX_M && n >= GROUP => {
                rows_tiles::gemm(&mut session, &rows_tiles::Job { w, n, k, x, m, k_padded, out, ldo });
            }
            Source::Rows(dtype, w) => run.by(&Rows { dtype, w, n, k }),
        }
    }
}
