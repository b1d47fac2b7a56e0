//! Float linear for many tokens: 16 rows of weights are transposed into a small panel, once per call and
//! straight from the file's mapping, and multiplied with all tokens while it sits in L2.
//!
//! panels     bf16: `[k/2][16 rows][2]` ("VNNI16", also an AMX B tile per 32 k); f32: `[k][16 rows]`
//! tile       2 groups of 16 rows x 12 tokens; a token's value (or bf16 pair) is broadcast from memory
//! registers  24 acc + 2 panel = 26 of 32 zmm
//! bound      few tokens: memory, if the transpose (64 shuffles per KiB, ~45 GB/s a core) stays below it;
//!            many: vdpbf16ps or fma throughput
//! order      k ascending, one accumulator per output: the same bits for every number of tokens
//! error      bf16 panels: activations rounded to bf16, f32 accumulation; f32 panels: f32

use std::arch::x86_64::*;
use std::cell::RefCell;

use super::packed::GROUP;
use crate::tensor::DType;

/// Elements of k per panel: two groups of bf16 take 128 KiB, of f32 256 KiB, of an L2 of 1-2 MiB.
const KC: usize = 2048;

/// One 64-byte line, for aligned scratch.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` with `bytes` of this thread's 64-byte aligned scratch, whose contents are arbitrary.
pub(super) fn with_scratch<R>(bytes: usize, f: impl FnOnce(*mut u8) -> R) -> R {
    SCRATCH.with_borrow_mut(|s| {
        if s.len() * 64 < bytes {
            s.resize(bytes.div_ceil(64), Line([0; 64]));
        }
        f(s.as_mut_ptr().cast())
    })
}

/// Row-major float weights: up to 16 rows from `w`.
#[derive(Clone, Copy)]
pub(super) struct RowBlock {
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

/// To bf16, nearest even, with integers: no AVX-512 BF16 is needed.
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
pub(super) unsafe fn panel_bf16(w: RowBlock, k0: usize, kc: usize, kc_padded: usize, out: *mut u16) {
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

/// Writes the f32 panel of `k0..k0+kc`.
///
/// # Safety
/// AVX-512 F/BW/VL and F16C; `out` has room for `kc` rounded up to 16, times 16 floats.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn panel_f32(w: RowBlock, k0: usize, kc: usize, out: *mut f32) {
    for i in (0..kc).step_by(16) {
        let valid = (kc - i).min(16);
        let mask = ((1u32 << valid) - 1) as __mmask16;
        let mut r = [_mm512_setzero_si512(); 16];
        // SAFETY: masked loads touch existing elements only; a prefetch never faults; stores by contract.
        unsafe {
            for (j, r) in r.iter_mut().enumerate().take(w.rows) {
                let p = w.row(j, k0 + i);
                *r = match w.dtype {
                    DType::F32 => _mm512_maskz_loadu_epi32(mask, p.cast()),
                    DType::F16 => {
                        _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p.cast())))
                    }
                    _ => {
                        let v = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.cast()));
                        _mm512_slli_epi32::<16>(v)
                    }
                };
                _mm_prefetch::<_MM_HINT_T1>(w.row(j, k0 + i + 512).cast());
            }
            let t = transpose16(r);
            for (j, t) in t.iter().enumerate() {
                _mm512_storeu_si512(out.add((i + j) * 16).cast(), *t);
            }
        }
    }
}

/// The AVX2 way of [`panel_f32`]: plain conversion and scattered stores.
///
/// # Safety
/// AVX2 and F16C; as there.
#[target_feature(enable = "avx2,f16c")]
unsafe fn panel_f32_avx2(w: RowBlock, k0: usize, kc: usize, out: *mut f32) {
    for r in 0..GROUP {
        for i in 0..kc {
            // SAFETY: element k0+i of row r exists when r < rows; `out` has room.
            unsafe {
                let v = if r >= w.rows {
                    0.0
                } else {
                    let p = w.row(r, k0 + i);
                    match w.dtype {
                        DType::F32 => p.cast::<f32>().read_unaligned(),
                        DType::F16 => {
                            let h = p.cast::<u16>().read_unaligned();
                            _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h as i32)))
                        }
                        _ => f32::from_bits((p.cast::<u16>().read_unaligned() as u32) << 16),
                    }
                };
                *out.add(i * GROUP + r) = v;
            }
        }
    }
}

/// What a microkernel multiplies: MT tokens with NG groups over `steps` panel rows of 64 bytes.
struct Job {
    /// First group's panel; the second follows after `panel_stride` bytes.
    panel: *const u8,
    panel_stride: usize,
    steps: usize,
    /// Activations of the first token at this k: a dword per step.
    x: *const u8,
    x_stride: usize,
    out: *mut f32,
    ldo: usize,
    /// Outputs of the last group that exist.
    lanes: __mmask16,
    /// Add to the outputs (k0 > 0).
    accumulate: bool,
}

#[inline(always)]
unsafe fn micro<const BF16: bool, const MT: usize, const NG: usize>(j: &Job) {
    // SAFETY: `Job` describes existing memory (see `gemm`).
    unsafe {
        let lanes = |g: usize| if g + 1 == NG { j.lanes } else { !0 };
        let mut acc = [[_mm512_setzero_ps(); NG]; MT];
        if j.accumulate {
            for (t, acc) in acc.iter_mut().enumerate() {
                for (g, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_maskz_loadu_ps(lanes(g), j.out.add(t * j.ldo + g * GROUP));
                }
            }
        }
        for s in 0..j.steps {
            let mut w = [_mm512_setzero_si512(); NG];
            for (g, w) in w.iter_mut().enumerate() {
                *w = _mm512_load_si512(j.panel.add(g * j.panel_stride + s * 64).cast());
            }
            for t in 0..MT {
                let x = _mm512_set1_epi32(j.x.add(t * j.x_stride + s * 4).cast::<i32>().read_unaligned());
                for g in 0..NG {
                    acc[t][g] = if BF16 {
                        _mm512_dpbf16_ps(
                            acc[t][g],
                            std::mem::transmute::<__m512i, __m512bh>(w[g]),
                            std::mem::transmute::<__m512i, __m512bh>(x),
                        )
                    } else {
                        _mm512_fmadd_ps(_mm512_castsi512_ps(w[g]), _mm512_castsi512_ps(x), acc[t][g])
                    };
                }
            }
        }
        for (t, acc) in acc.iter().enumerate() {
            for (g, acc) in acc.iter().enumerate() {
                _mm512_mask_storeu_ps(j.out.add(t * j.ldo + g * GROUP), lanes(g), *acc);
            }
        }
    }
}

macro_rules! tiles {
    ($name:ident, $bf16:literal, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn $name(mt: usize, ng: usize, j: &Job) {
            // SAFETY: the caller's contract.
            unsafe {
                match (mt, ng) {
                    (12, 2) => micro::<$bf16, 12, 2>(j),
                    (8, 2) => micro::<$bf16, 8, 2>(j),
                    (4, 2) => micro::<$bf16, 4, 2>(j),
                    (2, 2) => micro::<$bf16, 2, 2>(j),
                    (1, 2) => micro::<$bf16, 1, 2>(j),
                    (12, 1) => micro::<$bf16, 12, 1>(j),
                    (8, 1) => micro::<$bf16, 8, 1>(j),
                    (4, 1) => micro::<$bf16, 4, 1>(j),
                    (2, 1) => micro::<$bf16, 2, 1>(j),
                    (1, 1) => micro::<$bf16, 1, 1>(j),
                    _ => unreachable!("no tile of {mt} tokens x {ng} groups"),
                }
            }
        }
    };
}
tiles!(tiles_bf16, true, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16");
tiles!(tiles_f32, false, "avx512f,avx512bw,avx512dq,avx512vl,fma");

#[inline(always)]
unsafe fn micro_avx2<const MT: usize>(j: &Job) {
    // SAFETY: `Job` describes existing memory (see `gemm`); one group.
    unsafe {
        let n = j.lanes.count_ones() as usize;
        let mut acc = [[_mm256_setzero_ps(); 2]; MT];
        let mut lanes = [0f32; GROUP];
        for t in 0..MT {
            if j.accumulate {
                std::ptr::copy_nonoverlapping(j.out.add(t * j.ldo), lanes.as_mut_ptr(), n);
                acc[t] = [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(8))];
            }
        }
        for s in 0..j.steps {
            let p = j.panel.add(s * 64).cast::<f32>();
            let w = [_mm256_load_ps(p), _mm256_load_ps(p.add(8))];
            for t in 0..MT {
                let x = _mm256_set1_ps(j.x.add(t * j.x_stride + s * 4).cast::<f32>().read_unaligned());
                acc[t] = [_mm256_fmadd_ps(w[0], x, acc[t][0]), _mm256_fmadd_ps(w[1], x, acc[t][1])];
            }
        }
        for t in 0..MT {
            _mm256_storeu_ps(lanes.as_mut_ptr(), acc[t][0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(8), acc[t][1]);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), j.out.add(t * j.ldo), n);
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn tiles_avx2(mt: usize, _ng: usize, j: &Job) {
    // SAFETY: the caller's contract.
    unsafe {
        match mt {
            4 => micro_avx2::<4>(j),
            2 => micro_avx2::<2>(j),
            _ => micro_avx2::<1>(j),
        }
    }
}

/// Which instructions multiply a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// AVX-512 BF16: bf16 panels and activations.
    Bf16,
    /// AVX-512: f32 panels and activations.
    F32,
    /// AVX2: the same, one group at a time.
    F32Avx2,
}

/// `out[t·ldo + r] = Σ_k w[r][k]·x[t][k]` for up to two groups: rows `0..n` (n <= 32) at `w`.
/// `x` is bf16 with rows of `x_stride` bytes, zero-padded to 64 elements, for [`Kind::Bf16`]; f32 otherwise.
///
/// # Safety
/// The CPU has what `kind` needs; `w` holds `n` rows of `k` floats of `dtype`; `x` and `out` have `m` rows.
pub(super) unsafe fn gemm(
    kind: Kind,
    dtype: DType,
    w: *const u8,
    n: usize,
    k: usize,
    x: *const u8,
    x_stride: usize,
    m: usize,
    out: *mut f32,
    ldo: usize,
) {
    let per_call = if kind == Kind::F32Avx2 { GROUP } else { 2 * GROUP };
    assert!(n <= 2 * GROUP);
    let (elem, per_step) = if kind == Kind::Bf16 { (2, 2) } else { (4, 1) };
    let panel_stride = KC * GROUP * elem;
    with_scratch(2 * panel_stride, |scratch| {
        for first in (0..n).step_by(per_call) {
            let n = (n - first).min(per_call);
            let groups = n.div_ceil(GROUP);
            let tail = n - (groups - 1) * GROUP;
            for k0 in (0..k).step_by(KC) {
                let kc = (k - k0).min(KC);
                let padded = kc.next_multiple_of(32);
                for g in 0..groups {
                    let rows = (n - g * GROUP).min(GROUP);
                    let at = (first + g * GROUP) * k * dtype.block_bytes();
                    // SAFETY: rows first+16g.. exist; the panel fits in its part of the scratch.
                    unsafe {
                        let w = RowBlock { dtype, w: w.add(at), rows, k };
                        let panel = scratch.add(g * panel_stride);
                        match kind {
                            Kind::Bf16 => panel_bf16(w, k0, kc, padded, panel.cast()),
                            Kind::F32 => panel_f32(w, k0, kc, panel.cast()),
                            Kind::F32Avx2 => panel_f32_avx2(w, k0, kc, panel.cast()),
                        }
                    }
                }
                let steps = if kind == Kind::Bf16 { padded / per_step } else { kc };
                let mut t = 0;
                while t < m {
                    let mt = match (m - t, kind) {
                        (4.., Kind::F32Avx2) => 4,
                        (12.., _) if (m - t) != 16 => 12,
                        (8.., _) => 8,
                        (4.., _) => 4,
                        (2.., _) => 2,
                        _ => 1,
                    };
                    // SAFETY: tokens t..t+mt and the outputs of these rows exist.
                    unsafe {
                        let job = Job {
                            panel: scratch,
                            panel_stride,
                            steps,
                            x: x.add(t * x_stride + k0 * elem),
                            x_stride,
                            out: out.add(t * ldo + first),
                            ldo,
                            lanes: ((1u32 << tail) - 1) as __mmask16,
                            accumulate: k0 > 0,
                        };
                        match kind {
                            Kind::Bf16 => tiles_bf16(mt, groups, &job),
                            Kind::F32 => tiles_f32(mt, groups, &job),
                            Kind::F32Avx2 => tiles_avx2(mt, groups, &job),
                        }
                    }
                    t += mt;
                }
            }
        }
    });
}
