//! Block kernels on bf16 dot products (AVX-512 BF16): keys and values are never widened to f32, and codes of 8 bits, exact in
//! bf16, become lines of it.
//!
//!   vdpbf16ps acc, line, broadcast pair      32 multiply-adds on 64 bytes of cache, no shuffle
//!
//! layout     K line: a pair of dims of 16 tokens, against a broadcast pair of q; V line: 16 dims of a pair
//!            of tokens, against a broadcast pair of P
//!            32 codes: 2 loads that widen, 2 conversions to f32, 1 to bf16; then a line like the others
//! tile       QK up to 6 rows x 4 groups of 16 tokens; PV up to 6 rows x 4 vectors of 16 dims, 3 rows x 8
//! registers  24 accumulators + 4 lines + 1 broadcast = 29 of 32 zmm
//! bound      memory in decode: 4·T·head_dim bytes per KV head, each line loaded once per 6 rows. While QK
//!            streams K it prefetches V of the same tokens, while PV streams V the next K: pages are
//!            scattered, so the hardware prefetcher cannot know where they are. Into L2: prefetches into L1
//!            are limited by its two dozen miss buffers (Zen 4, 1 thread: 14 GB/s cold, 22 with L2). And three
//!            times, one, two and three runs ahead: a core at work on lines in L2 asks for others three times as
//!            fast as memory answers, and what it cannot queue is dropped (1 thread, SmolLM2: 17 GB/s asked for
//!            once, 25 three times; decision 0011)
//! error      q and P are rounded to bf16 once (2^-9 each); the sum s adds the *rounded* P, so the output
//!            is a convex combination of values (of codes P is rounded with their scale, and the sum adds it before); tolerance derived in tests/kernels/attention.rs

#![allow(clippy::needless_range_loop)] // tiles: two indices into two or three arrays

use std::arch::x86_64::*;

use super::f32_body::{AVX512_BF16, ask_for_scales, maxima};
use super::kernels::{BlockKernels, GROUPS, Pv, Qk, S_STRIDE, Softmax};
use super::partial::merge_body;
use crate::cache::PAGE_TOKENS;
use crate::simd::avx512::Avx512;

pub(super) static KERNELS: BlockKernels = BlockKernels {
    name: "avx512 bf16 dot",
    bf16: true,
    unit: std::f32::consts::LN_2,
    pack_q,
    qk: qk::<Bf16>,
    softcap: AVX512_BF16.softcap,
    softmax: softmax::<Bf16>,
    pv: pv::<Bf16>,
    run: None,
    merge,
};

/// The same for codes of 8 bits.
pub(super) static KERNELS_Q8: BlockKernels = BlockKernels {
    name: "avx512 bf16 dot x q8",
    qk: qk::<Q8>,
    softmax: softmax::<Q8>,
    pv: pv::<Q8>,
    ..KERNELS
};

/// A type of keys and values as these kernels read it.
pub(super) trait Kv {
    /// In memory.
    type Element;
    /// Whether scores and weights are multiplied by a scale of their token.
    const SCALED: bool;
    /// 32 elements at `p` in bf16.
    ///
    /// # Safety
    /// They are readable, of any alignment; the CPU has AVX-512 BF16.
    unsafe fn line(p: *const Self::Element) -> __m512i;
}

pub(super) enum Bf16 {}
pub(super) enum Q8 {}

impl Kv for Bf16 {
    type Element = u16;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn line(p: *const u16) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
}

impl Kv for Q8 {
    type Element = i8;
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn line(p: *const i8) -> __m512i {
        // SAFETY: the caller's contract; both types are 512 bits.
        unsafe {
            let half = |p: *const i8| _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())));
            std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(half(p.add(16)), half(p)))
        }
    }
}

/// Whether the `i`th of consecutive lines begins a line of memory to prefetch: two of codes share one.
const fn asks<K: Kv>(i: usize) -> bool {
    size_of::<K::Element>() == 2 || i.is_multiple_of(2)
}

/// Rows per register tile.
const ROWS: usize = 6;

/// How many of `left` rows the next tile takes: tiles of nearly equal size.
#[inline(always)]
fn tile_rows(left: usize) -> usize {
    left.div_ceil(left.div_ceil(ROWS))
}

#[inline(always)]
pub(super) unsafe fn dp(acc: __m512, line: __m512i, pair: __m512i) -> __m512 {
    // SAFETY: the callers are inside functions that enable avx512bf16; both types are 512 bits of bf16.
    unsafe {
        _mm512_dpbf16_ps(
            acc,
            std::mem::transmute::<__m512i, __m512bh>(line),
            std::mem::transmute::<__m512i, __m512bh>(pair),
        )
    }
}

/// # Safety
/// `to` has room for `q.len()` (a multiple of 16) bf16; the CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn pack_q(q: &[f32], scale: f32, to: *mut u8) {
    let scale = _mm512_set1_ps(scale);
    for (i, q) in q.chunks_exact(16).enumerate() {
        // SAFETY: 16 elements each way.
        unsafe {
            let x = _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(q.as_ptr()), scale));
            _mm256_storeu_si256(to.cast::<__m256i>().add(i), std::mem::transmute::<__m256bh, __m256i>(x));
        }
    }
}

/// One tile of S: each score is one chain of dot products over pairs of dims in order.
///
/// # Safety
/// `q` has `R` rows of `pairs` pairs; each `k` has `pairs` lines; `s` has `R` rows of `S_STRIDE`, of which
/// `G·16` elements are written.
#[inline(always)]
unsafe fn qk_tile<K: Kv, const R: usize, const G: usize, const AHEAD: bool>(
    q: *const i32,
    pairs: usize,
    k: &[*const u8],
    scales: &[*const f32],
    ahead: [&[*const u8]; 3],
    s: *mut f32,
) {
    // SAFETY: the caller's contract bounds every address below; prefetching any address is harmless.
    unsafe {
        let k: [*const K::Element; G] = std::array::from_fn(|g| k[g].cast());
        let ahead: [[*const K::Element; 3]; G] = std::array::from_fn(|g| ahead.map(|run| run[g].cast()));
        let mut acc = [[_mm512_setzero_ps(); G]; R];
        for d in 0..pairs {
            let mut line = [_mm512_setzero_si512(); G];
            for g in 0..G {
                line[g] = K::line(k[g].add(d * 32));
                if AHEAD && asks::<K>(d) {
                    for run in ahead[g] {
                        _mm_prefetch::<_MM_HINT_T1>(run.wrapping_add(d * 32).cast());
                    }
                }
            }
            for r in 0..R {
                let q = _mm512_set1_epi32(*q.add(r * pairs + d));
                for g in 0..G {
                    acc[r][g] = dp(acc[r][g], line[g], q);
                }
            }
        }
        for g in 0..G {
            // Without scales this is optimised away.
            let scale = if K::SCALED { _mm512_loadu_ps(scales[g]) } else { _mm512_set1_ps(1.0) };
            for r in 0..R {
                let sum = if K::SCALED { _mm512_mul_ps(acc[r][g], scale) } else { acc[r][g] };
                _mm512_storeu_ps(s.add(r * S_STRIDE + g * 16), sum);
            }
        }
    }
}

/// # Safety
/// As [`Qk`] says; the CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn qk<K: Kv>(a: &Qk) {
    /// # Safety
    /// As `qk_tile`.
    #[inline(always)]
    unsafe fn rows<K: Kv, const G: usize, const AHEAD: bool>(n: usize, a: &Qk, r: usize, g: usize) {
        // SAFETY: r + n <= rows and g + G <= groups, by the loops below.
        unsafe {
            let pairs = a.head_dim / 2;
            let q = a.q.cast::<i32>().add(r * pairs);
            let s = a.s.add(r * S_STRIDE + g * 16);
            let (k, by, ahead) = (&a.k[g..], &a.k_scales[g..], a.ahead.each_ref().map(|run| &run[g..]));
            match n {
                1 => qk_tile::<K, 1, G, AHEAD>(q, pairs, k, by, ahead, s),
                2 => qk_tile::<K, 2, G, AHEAD>(q, pairs, k, by, ahead, s),
                3 => qk_tile::<K, 3, G, AHEAD>(q, pairs, k, by, ahead, s),
                4 => qk_tile::<K, 4, G, AHEAD>(q, pairs, k, by, ahead, s),
                5 => qk_tile::<K, 5, G, AHEAD>(q, pairs, k, by, ahead, s),
                _ => qk_tile::<K, 6, G, AHEAD>(q, pairs, k, by, ahead, s),
            }
        }
    }
    if K::SCALED {
        ask_for_scales(a);
    }
    let mut r = 0;
    while r < a.rows {
        let n = tile_rows(a.rows - r);
        let mut g = 0;
        while g < a.groups {
            // SAFETY: as argued in `rows`.
            unsafe {
                match (a.groups - g, r == 0) {
                    (4.., true) => rows::<K, 4, true>(n, a, r, g),
                    (4.., false) => rows::<K, 4, false>(n, a, r, g),
                    (2.., true) => rows::<K, 2, true>(n, a, r, g),
                    (2.., false) => rows::<K, 2, false>(n, a, r, g),
                    (_, true) => rows::<K, 1, true>(n, a, r, g),
                    (_, false) => rows::<K, 1, false>(n, a, r, g),
                }
            }
            g += match a.groups - g {
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
        }
        r += n;
    }
}

/// (2^r − 1)/r on [0, 1], highest power first. The relative error of 2^r is 2^-18, negligible against bf16's 2^-9.
const EXP2: [f32; 4] = [0.013_426_683, 0.052_242_476, 0.241_280_2, 0.693_044_84];

/// 2^x for x <= 0 in eight instructions: x − ⌊x⌋ by vreduceps, a polynomial, and 2^⌊x⌋ by vscalefps, which
/// takes the floor itself. Exactly 1 at 0 and 0 at −∞; NaN stays NaN.
///
/// # Safety
/// The CPU has AVX-512 F and DQ.
#[inline(always)]
pub(super) unsafe fn exp2(x: __m512) -> __m512 {
    // SAFETY: the callers are inside functions that enable these.
    unsafe {
        let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
        let mut p = _mm512_set1_ps(EXP2[0]);
        for &c in &EXP2[1..] {
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
        }
        _mm512_scalef_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0)), x)
    }
}

/// Weights times scales. A slot without a token, whose scale may be NaN, has a weight of 0, and so has its product.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn scaled(e: __m512, scale: __m512) -> __m512 {
    // SAFETY: the callers are inside functions that enable these.
    unsafe {
        let some = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(e, _mm512_setzero_ps());
        _mm512_maskz_mul_ps(some, e, scale)
    }
}

/// # Safety
/// As [`Softmax`] says, P in bf16, scores in powers of two; the CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn softmax<K: Kv>(a: &Softmax) {
    // SAFETY: rows and groups bound every address (see `Softmax`); P is written in whole pages of 32
    // tokens, which S_STRIDE has room for, since BLOCK is a multiple of 32.
    unsafe {
        let ones = _mm512_set1_epi32(0x3f80_3f80);
        let base = maxima(Avx512::token(), a, std::f32::consts::LN_2);
        for r in 0..a.rows {
            let s = a.s.add(r * S_STRIDE);
            let p = a.p.cast::<u16>().add(r * S_STRIDE);
            let base = _mm512_set1_ps(base[r]);
            let lanes = (*a.sum.add(r)).as_mut_ptr();
            let mut sum = _mm512_mul_ps(_mm512_loadu_ps(lanes), _mm512_set1_ps(*a.alpha.add(r)));
            for g in (0..a.groups).step_by(2) {
                let e0 = exp2(_mm512_sub_ps(_mm512_loadu_ps(s.add(g * 16)), base));
                // Without a second group, its scores were not computed and its P is 0.
                let e1 = if g + 1 < a.groups {
                    exp2(_mm512_sub_ps(_mm512_loadu_ps(s.add(g * 16 + 16)), base))
                } else {
                    _mm512_setzero_ps()
                };
                let (mut p0, mut p1) = (e0, e1);
                if K::SCALED {
                    let scales = a.v_scales[g / 2];
                    p0 = scaled(e0, _mm512_loadu_ps(scales));
                    p1 = scaled(e1, _mm512_loadu_ps(scales.add(16)));
                }
                let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(p1, p0));
                _mm512_storeu_si512(p.add(g * 16).cast(), rounded);
                sum = match K::SCALED {
                    true => _mm512_add_ps(sum, _mm512_add_ps(e0, e1)),
                    false => dp(sum, rounded, ones),
                };
            }
            _mm512_storeu_ps(lanes, sum);
        }
    }
}

/// One tile of O: `R` rows x `C` vectors of dims, over all pairs of tokens of the block in order.
///
/// # Safety
/// `p` has `R` rows of `S_STRIDE`; `a.v`'s pages have `a.tokens` stored tokens; `o` has `R` rows of
/// `head_dim`, of which columns `d0 .. d0 + 16·C` are updated; `alpha` has `R` elements.
#[inline(always)]
unsafe fn pv_tile<K: Kv, const R: usize, const C: usize, const AHEAD: bool>(
    a: &Pv,
    p: *const u16,
    o: *mut f32,
    alpha: *const f32,
    d0: usize,
) {
    // SAFETY: the caller's contract bounds every address below; prefetching any address is harmless.
    unsafe {
        let hd = a.head_dim;
        let mut acc = [[_mm512_setzero_ps(); C]; R];
        for r in 0..R {
            let alpha = _mm512_set1_ps(*alpha.add(r));
            for c in 0..C {
                acc[r][c] = _mm512_mul_ps(_mm512_loadu_ps(o.add(r * hd + d0 + c * 16)), alpha);
            }
        }
        let pairs = a.tokens / 2;
        for page in 0..pairs.div_ceil(PAGE_TOKENS / 2) {
            let first = page * (PAGE_TOKENS / 2);
            let v = a.v[page].cast::<K::Element>().add(d0 * 2);
            let ahead = a.ahead.map(|run| run[page].cast::<K::Element>().wrapping_add(d0 * 2));
            for i in 0..(pairs - first).min(PAGE_TOKENS / 2) {
                let mut line = [_mm512_setzero_si512(); C];
                for c in 0..C {
                    line[c] = K::line(v.add(i * hd * 2 + c * 32));
                    if AHEAD && asks::<K>(c) {
                        for run in ahead {
                            _mm_prefetch::<_MM_HINT_T1>(run.wrapping_add(i * hd * 2 + c * 32).cast());
                        }
                    }
                }
                for r in 0..R {
                    let pair = p.add(r * S_STRIDE + (first + i) * 2).cast::<i32>();
                    let pair = _mm512_set1_epi32(pair.read_unaligned());
                    for c in 0..C {
                        acc[r][c] = dp(acc[r][c], line[c], pair);
                    }
                }
            }
        }
        if a.tokens % 2 == 1 {
            // The pair's other token is not stored: the contents of its slot are masked to +0.
            let stored = _mm512_set1_epi32(0xffff);
            let v = a.v[pairs / (PAGE_TOKENS / 2)].cast::<K::Element>();
            let v = v.add(pairs % (PAGE_TOKENS / 2) * hd * 2 + d0 * 2);
            for c in 0..C {
                let line = _mm512_and_si512(K::line(v.add(c * 32)), stored);
                for r in 0..R {
                    let pair = p.add(r * S_STRIDE + pairs * 2).cast::<i32>();
                    acc[r][c] = dp(acc[r][c], line, _mm512_set1_epi32(pair.read_unaligned()));
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                _mm512_storeu_ps(o.add(r * hd + d0 + c * 16), acc[r][c]);
            }
        }
    }
}

/// # Safety
/// As [`Pv`] says, P in bf16; the CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pv<K: Kv>(a: &Pv) {
    /// # Safety
    /// As `pv_tile`.
    #[inline(always)]
    unsafe fn few<K: Kv, const C: usize, const AHEAD: bool>(n: usize, a: &Pv, r: usize, d0: usize) {
        // SAFETY: r + n <= rows and d0 + 16·C <= head_dim, by the loops below.
        unsafe {
            let p = a.p.cast::<u16>().add(r * S_STRIDE);
            let o = a.o.add(r * a.head_dim);
            let alpha = a.alpha.add(r);
            match n {
                1 => pv_tile::<K, 1, C, AHEAD>(a, p, o, alpha, d0),
                2 => pv_tile::<K, 2, C, AHEAD>(a, p, o, alpha, d0),
                _ => pv_tile::<K, 3, C, AHEAD>(a, p, o, alpha, d0),
            }
        }
    }
    /// # Safety
    /// As `pv_tile`.
    #[inline(always)]
    unsafe fn many<K: Kv, const C: usize, const AHEAD: bool>(n: usize, a: &Pv, r: usize, d0: usize) {
        // SAFETY: as in `few`.
        unsafe {
            let p = a.p.cast::<u16>().add(r * S_STRIDE);
            let o = a.o.add(r * a.head_dim);
            let alpha = a.alpha.add(r);
            match n {
                4 => pv_tile::<K, 4, C, AHEAD>(a, p, o, alpha, d0),
                5 => pv_tile::<K, 5, C, AHEAD>(a, p, o, alpha, d0),
                _ => pv_tile::<K, 6, C, AHEAD>(a, p, o, alpha, d0),
            }
        }
    }
    let mut r = 0;
    while r < a.rows {
        let n = tile_rows(a.rows - r);
        let mut d = 0;
        while d < a.head_dim {
            let left = (a.head_dim - d) / 16;
            // SAFETY: as argued in `few`; head_dim is a multiple of 16.
            let took = unsafe {
                match (left, n <= 3, r == 0) {
                    (8.., true, true) => (few::<K, 8, true>(n, a, r, d), 8).1,
                    (8.., true, false) => (few::<K, 8, false>(n, a, r, d), 8).1,
                    (4.., true, true) => (few::<K, 4, true>(n, a, r, d), 4).1,
                    (4.., true, false) => (few::<K, 4, false>(n, a, r, d), 4).1,
                    (4.., false, true) => (many::<K, 4, true>(n, a, r, d), 4).1,
                    (4.., false, false) => (many::<K, 4, false>(n, a, r, d), 4).1,
                    (_, true, true) => (few::<K, 1, true>(n, a, r, d), 1).1,
                    (_, true, false) => (few::<K, 1, false>(n, a, r, d), 1).1,
                    (_, false, true) => (many::<K, 1, true>(n, a, r, d), 1).1,
                    (_, false, false) => (many::<K, 1, false>(n, a, r, d), 1).1,
                }
            };
            d += took * 16;
        }
        r += n;
    }
}

/// # Safety
/// The CPU has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn merge(acc: (&mut f32, &mut f32, &mut [f32]), part: (f32, f32, &[f32])) {
    merge_body(acc, part)
}

const _: () = assert!(GROUPS == 4);
