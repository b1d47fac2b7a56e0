//! Block kernels in f32: keys and values of 16 or 8 bits are widened as they are read (AVX2, AVX-512).
//!
//! layout     K line: a pair of dims of 16 tokens; V line: 16 dims of a pair of tokens. A bf16 line is split into the
//!            first and the second elements of its pairs, by shift and mask. An f16 line is widened half by half
//!            straight from memory, its pairs stay neighbours, and they are added when the sum is complete:
//!            separating them first took three more instructions a line than there are products for one row. Codes of 8 bits
//!            are widened like f16; their scales are factors of scores and of P, a few instructions for 16 tokens
//! tile       4 rows x 2 vectors (AVX2, bf16), 2 x 2 or 4 x 1 with two accumulators each (AVX2, f16, q8), 6 x 2 (AVX-512)
//! registers  8 accumulators + 4 widened + 2 broadcast = 14 of 16 ymm; with f16, q8 24 + 4 + 1 = 29 of 32 zmm
//! bound      memory in decode: 4·T·head_dim bytes per KV head (q8: 2·T·(head_dim + 4)); else the products: 2 per row and vector, on Zen 4 one
//!            cycle each in 512 bits, so for 4 rows 8 cycles a line, 29 GB/s at 3.64 GHz
//! error      q and P stay f32; tolerance derived in tests/kernels/attention.rs

#![allow(clippy::needless_range_loop)] // tiles: two indices into two or three arrays

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use super::kernels::{BLOCK, BlockKernels, GROUPS, MAX_ROWS, Pv, Qk, S_STRIDE, Softcap, Softmax};
use super::partial::merge_body;
use super::vector::BlockSimd;
use crate::cache::PAGE_TOKENS;
use crate::simd::avx2::Avx2;
use crate::simd::avx512::Avx512;
use crate::simd::generic::activation;
use crate::simd::generic::exp::exp_nonpositive;
use crate::simd::generic::map::Map1;

/// A type of keys and values as these kernels read it.
trait Kv {
    /// In memory.
    type Element;
    /// Whether pairs stay neighbours as they are widened (f16, codes), or are split into first and second elements (bf16).
    const NEIGHBOURS: bool;
    /// Whether scores and weights are multiplied by a scale of their token.
    const SCALED: bool;
    /// `LANES` pairs at `p`, widened to two vectors: first and second elements, or the first and the last `N/2` pairs.
    ///
    /// # Safety
    /// As [`BlockSimd`]: `2·LANES` readable elements.
    unsafe fn pairs<V: BlockSimd>(simd: V, p: *const Self::Element) -> [V::F; 2];
}

enum Bf16 {}
enum F16 {}
enum Q8 {}

impl Kv for Bf16 {
    type Element = u16;
    const NEIGHBOURS: bool = false;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn pairs<V: BlockSimd>(simd: V, p: *const u16) -> [V::F; 2] {
        // SAFETY: the caller's contract.
        unsafe { simd.bf16_pairs(p).into() }
    }
}

impl Kv for F16 {
    type Element = u16;
    const NEIGHBOURS: bool = true;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn pairs<V: BlockSimd>(simd: V, p: *const u16) -> [V::F; 2] {
        // SAFETY: the caller's contract.
        unsafe { [simd.load_f16(p), simd.load_f16(p.add(V::LANES))] }
    }
}

impl Kv for Q8 {
    type Element = i8;
    const NEIGHBOURS: bool = true;
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn pairs<V: BlockSimd>(simd: V, p: *const i8) -> [V::F; 2] {
        // SAFETY: the caller's contract.
        unsafe { [simd.load_codes(p), simd.load_codes(p.add(V::LANES))] }
    }
}

/// The factors at `p`, arranged as multipliers of the two vectors of [`Kv::pairs`].
///
/// # Safety
/// As [`BlockSimd`]: two readable elements.
#[inline(always)]
unsafe fn factors<V: BlockSimd, K: Kv>(simd: V, p: *const f32) -> [V::F; 2] {
    // SAFETY: the caller's contract.
    unsafe { if K::NEIGHBOURS { [simd.splat_pair(p); 2] } else { [simd.splat(*p), simd.splat(*p.add(1))] } }
}

/// The accumulator for the products of vector `i` of [`Kv::pairs`]; split pairs need only one.
const fn slot<K: Kv>(i: usize) -> usize {
    if K::NEIGHBOURS { i } else { 0 }
}

/// The sums of the `LANES` pairs.
#[inline(always)]
fn join<V: BlockSimd, K: Kv>(simd: V, [a, b]: [V::F; 2]) -> V::F {
    if K::NEIGHBOURS { simd.add_pairs(a, b) } else { a }
}

/// Most rows of a tile of two vectors.
const fn wide_rows<V: BlockSimd, K: Kv>() -> usize {
    if K::NEIGHBOURS { V::WIDE_PAIRED_ROWS } else { V::ROWS }
}

/// Whether the `i`th of consecutive vectors of pairs begins a line to prefetch: of elements of 8 bits two share one.
const fn asks<K: Kv>(i: usize) -> bool {
    size_of::<K::Element>() == 2 || i.is_multiple_of(2)
}

/// One tile of S: `R` rows x `W` vectors of tokens. Each score is one chain of FMAs over dims in order (bf16), or one
/// over the even dims, one over the odd ones, and their sum (f16, codes), times the token's scale (codes).
///
/// # Safety
/// `q` has `R` rows of `head_dim`; each `k` has `head_dim/2` runs of `2·N` elements, 32 apart; `s` has
/// `R` rows of `S_STRIDE`, and vector `w` goes to `at[w]`.
#[inline(always)]
unsafe fn qk_tile<V: BlockSimd, K: Kv, const R: usize, const W: usize>(
    simd: V,
    q: *const f32,
    head_dim: usize,
    k: [*const K::Element; W],
    scales: [*const f32; W],
    ahead: [[*const K::Element; W]; 3],
    s: *mut f32,
    at: [usize; W],
) {
    // SAFETY: the caller's contract bounds every address below; prefetching any address is harmless.
    unsafe {
        let mut acc = [[[simd.splat(0.0); 2]; W]; R];
        for d in 0..head_dim / 2 {
            let mut x = [[simd.splat(0.0); 2]; W];
            for w in 0..W {
                if asks::<K>(d) {
                    for run in &ahead[..V::AHEAD] {
                        _mm_prefetch::<_MM_HINT_T1>(run[w].wrapping_add(d * 32).cast());
                    }
                }
                x[w] = K::pairs(simd, k[w].add(d * 32));
            }
            for r in 0..R {
                let q = factors::<V, K>(simd, q.add(r * head_dim + 2 * d));
                for w in 0..W {
                    for i in 0..2 {
                        let acc = &mut acc[r][w][slot::<K>(i)];
                        *acc = simd.fma(x[w][i], q[i], *acc);
                    }
                }
            }
        }
        for r in 0..R {
            for w in 0..W {
                let mut sum = join::<V, K>(simd, acc[r][w]);
                if K::SCALED {
                    sum = simd.mul(sum, simd.load(scales[w]));
                }
                simd.store(s.add(r * S_STRIDE + at[w]), sum);
            }
        }
    }
}

/// # Safety
/// As [`Qk`] says, and the CPU has `V`'s features.
#[inline(always)]
unsafe fn qk_body<V: BlockSimd, K: Kv>(simd: V, a: &Qk) {
    // SAFETY: rows r..r+R stay below a.rows; vectors nv cover a.groups groups, 16/N to each; lines are
    // 32 elements, of which a vector takes 2·N at an offset that stays inside.
    unsafe {
        let per_group = 16 / V::LANES;
        let total = a.groups * per_group;
        let vector = |list: &[*const u8; GROUPS], v: usize| {
            list[v / per_group].cast::<K::Element>().wrapping_add(v % per_group * 2 * V::LANES)
        };
        let scales = |v: usize| a.k_scales[v / per_group].wrapping_add(v % per_group * V::LANES);
        if K::SCALED {
            ask_for_scales(a);
        }
        let mut r = 0;
        while r < a.rows {
            let n = (a.rows - r).div_ceil((a.rows - r).div_ceil(V::ROWS));
            let q = a.q.cast::<f32>().add(r * a.head_dim);
            let s = a.s.add(r * S_STRIDE);
            let mut v = 0;
            while v < total {
                if total - v >= 2 && n <= wide_rows::<V, K>() {
                    let k = [vector(&a.k, v), vector(&a.k, v + 1)];
                    let ahead = a.ahead.map(|run| [vector(&run, v), vector(&run, v + 1)]);
                    let at = [v * V::LANES, (v + 1) * V::LANES];
                    let by = [scales(v), scales(v + 1)];
                    match n {
                        1 => qk_tile::<V, K, 1, 2>(simd, q, a.head_dim, k, by, ahead, s, at),
                        2 => qk_tile::<V, K, 2, 2>(simd, q, a.head_dim, k, by, ahead, s, at),
                        3 => qk_tile::<V, K, 3, 2>(simd, q, a.head_dim, k, by, ahead, s, at),
                        4 if wide_rows::<V, K>() >= 4 => {
                            qk_tile::<V, K, 4, 2>(simd, q, a.head_dim, k, by, ahead, s, at)
                        }
                        5 if wide_rows::<V, K>() >= 5 => {
                            qk_tile::<V, K, 5, 2>(simd, q, a.head_dim, k, by, ahead, s, at)
                        }
                        6 if wide_rows::<V, K>() >= 6 => {
                            qk_tile::<V, K, 6, 2>(simd, q, a.head_dim, k, by, ahead, s, at)
                        }
                        _ => unreachable!("{n} rows in a wide tile"),
                    }
                    v += 2;
                } else {
                    let (k, ahead) = ([vector(&a.k, v)], a.ahead.map(|run| [vector(&run, v)]));
                    let (by, at) = ([scales(v)], [v * V::LANES]);
                    match n {
                        1 => qk_tile::<V, K, 1, 1>(simd, q, a.head_dim, k, by, ahead, s, at),
                        2 => qk_tile::<V, K, 2, 1>(simd, q, a.head_dim, k, by, ahead, s, at),
                        3 => qk_tile::<V, K, 3, 1>(simd, q, a.head_dim, k, by, ahead, s, at),
                        4 => qk_tile::<V, K, 4, 1>(simd, q, a.head_dim, k, by, ahead, s, at),
                        5 if V::ROWS >= 5 => qk_tile::<V, K, 5, 1>(simd, q, a.head_dim, k, by, ahead, s, at),
                        6 if V::ROWS >= 6 => qk_tile::<V, K, 6, 1>(simd, q, a.head_dim, k, by, ahead, s, at),
                        _ => unreachable!("{n} rows in a tile"),
                    }
                    v += 1;
                }
            }
            r += n;
        }
    }
}

/// Prefetches the scales of the runs ahead, which lie behind their codes.
#[inline(always)]
pub(super) fn ask_for_scales(a: &Qk) {
    for run in a.ahead {
        for page in run.iter().step_by(2) {
            for line in 0..PAGE_TOKENS / 16 {
                let scales = page.wrapping_add(PAGE_TOKENS * a.head_dim + line * 64);
                // SAFETY: prefetching any address is harmless.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(scales.cast()) };
            }
        }
    }
}

/// # Safety
/// As [`Softcap`] says; the CPU has `V`'s features.
#[inline(always)]
pub(super) unsafe fn softcap_body<V: BlockSimd>(simd: V, a: &Softcap) {
    for r in 0..a.rows {
        for t in (0..a.groups * 16).step_by(V::LANES) {
            // SAFETY: rows and groups bound every address (see `Softcap`).
            unsafe {
                let s = a.s.add(r * S_STRIDE + t);
                simd.store(s, activation::Softcap(a.cap).apply(simd, simd.load(s)));
            }
        }
    }
}

/// The first half of the softmax: masks scores, updates the maxima and gives each row's alpha; returns what to subtract
/// from its scores. These count in `unit` (1: natural logarithms; ln 2: powers of two). The exponentials of all
/// rows are taken at once, and nothing branches on data.
///
/// # Safety
/// As [`Softmax`] says; the CPU has `V`'s features.
#[inline(always)]
pub(super) unsafe fn maxima<V: BlockSimd>(simd: V, a: &Softmax, unit: f32) -> [f32; MAX_ROWS] {
    let mut base = [0.0f32; MAX_ROWS];
    let mut fall = [0.0f32; MAX_ROWS];
    // SAFETY: rows and groups bound every address (see `Softmax`); N divides MAX_ROWS, the length of `alpha`.
    unsafe {
        let n = a.groups * 16;
        for r in 0..a.rows {
            let s = a.s.add(r * S_STRIDE);
            let (lo, hi) = *a.visible.add(r);
            let mut top = simd.splat(f32::NEG_INFINITY);
            if lo == 0 && hi as usize >= n {
                for t in (0..n).step_by(V::LANES) {
                    top = simd.max(top, simd.load(s.add(t)));
                }
            } else {
                for t in (0..n).step_by(V::LANES) {
                    let x = simd.keep(simd.load(s.add(t)), t, lo as usize, hi as usize);
                    simd.store(s.add(t), x);
                    top = simd.max(top, x);
                }
            }
            let m = &mut *a.m.add(r);
            let (old, top) = (*m, simd.reduce_max(top));
            *m = if top > old { top } else { old };
            // No token visible so far: −∞ − −∞ would be NaN; subtracting 0 leaves every p, and alpha, at exp(−∞) = 0.
            base[r] = if *m == f32::NEG_INFINITY { 0.0 } else { *m };
            fall[r] = (old - base[r]) * unit;
        }
        for r in (0..a.rows).step_by(V::LANES) {
            simd.store(a.alpha.add(r), exp_nonpositive(simd, simd.load(fall.as_ptr().add(r))));
        }
    }
    base
}

/// # Safety
/// As [`Softmax`] says, P in f32, and the CPU has `V`'s features.
#[inline(always)]
unsafe fn softmax_body<V: BlockSimd, K: Kv>(simd: V, a: &Softmax) {
    // SAFETY: rows and groups bound every address (see `Softmax`).
    unsafe {
        let base = maxima::<V>(simd, a, 1.0);
        for r in 0..a.rows {
            let s = a.s.add(r * S_STRIDE);
            let p = a.p.cast::<f32>().add(r * S_STRIDE);
            let base = simd.splat(base[r]);
            let lanes = (*a.sum.add(r)).as_mut_ptr();
            let mut sum = simd.mul(simd.load(lanes), simd.splat(*a.alpha.add(r)));
            for t in (0..a.groups * 16).step_by(V::LANES) {
                let e = exp_nonpositive(simd, simd.sub(simd.load(s.add(t)), base));
                sum = simd.add(sum, e);
                // Of a slot without a token this may be NaN; `pv` does not read it.
                let scales = a.v_scales[t / PAGE_TOKENS].wrapping_add(t % PAGE_TOKENS);
                simd.store(p.add(t), if K::SCALED { simd.mul(e, simd.load(scales)) } else { e });
            }
            simd.store(lanes, sum);
        }
    }
}

/// One tile of O: `R` rows x `W` vectors of dims, over all tokens of the block in order: one chain that begins with
/// O·alpha (bf16), or even and odd tokens in chains of their own, then O·alpha and their sum (f16, codes).
///
/// # Safety
/// `p` has `R` rows of `S_STRIDE`; `v`'s pages have `tokens` stored tokens; `o` has `R` rows of
/// `head_dim` from column `d0` on, with `d0 + W·N <= head_dim`; `alpha` has `R` elements.
#[inline(always)]
unsafe fn pv_tile<V: BlockSimd, K: Kv, const R: usize, const W: usize>(
    simd: V,
    a: &Pv,
    p: *const f32,
    o: *mut f32,
    alpha: *const f32,
    d0: usize,
) {
    // SAFETY: the caller's contract bounds every address below; prefetching any address is harmless.
    unsafe {
        let hd = a.head_dim;
        let mut acc = [[[simd.splat(0.0); 2]; W]; R];
        if !K::NEIGHBOURS {
            for r in 0..R {
                for w in 0..W {
                    let o = simd.load(o.add(r * hd + d0 + w * V::LANES));
                    acc[r][w][0] = simd.mul(o, simd.splat(*alpha.add(r)));
                }
            }
        }
        for page in 0..a.tokens.div_ceil(PAGE_TOKENS) {
            let first = page * PAGE_TOKENS;
            let v = a.v[page].cast::<K::Element>().add(d0 * 2);
            let ahead = a.ahead.map(|run| run[page].cast::<K::Element>().wrapping_add(d0 * 2));
            for i in 0..(a.tokens - first).min(PAGE_TOKENS) / 2 {
                let mut x = [[simd.splat(0.0); 2]; W];
                for w in 0..W {
                    let at = i * hd * 2 + w * 2 * V::LANES;
                    if asks::<K>(w) {
                        for run in &ahead[..V::AHEAD] {
                            _mm_prefetch::<_MM_HINT_T1>(run.wrapping_add(at).cast());
                        }
                    }
                    x[w] = K::pairs(simd, v.add(at));
                }
                for r in 0..R {
                    let p = factors::<V, K>(simd, p.add(r * S_STRIDE + first + 2 * i));
                    for w in 0..W {
                        for i in 0..2 {
                            let acc = &mut acc[r][w][slot::<K>(i)];
                            *acc = simd.fma(x[w][i], p[i], *acc);
                        }
                    }
                }
            }
        }
        if a.tokens % 2 == 1 {
            // The pair's other token is not stored: the contents of its slot must not enter, not even times 0.
            let t = a.tokens - 1;
            for w in 0..W {
                let at = t % PAGE_TOKENS * hd + d0 * 2 + w * 2 * V::LANES;
                let x = K::pairs(simd, a.v[t / PAGE_TOKENS].cast::<K::Element>().add(at));
                for r in 0..R {
                    let p = simd.splat(*p.add(r * S_STRIDE + t));
                    for i in 0..if K::NEIGHBOURS { 2 } else { 1 } {
                        let x = if K::NEIGHBOURS { simd.first_of_pairs(x[i]) } else { x[i] };
                        acc[r][w][i] = simd.fma(x, p, acc[r][w][i]);
                    }
                }
            }
        }
        for r in 0..R {
            let alpha = simd.splat(*alpha.add(r));
            for w in 0..W {
                let o = o.add(r * hd + d0 + w * V::LANES);
                let sum = join::<V, K>(simd, acc[r][w]);
                simd.store(o, if K::NEIGHBOURS { simd.fma(simd.load(o), alpha, sum) } else { sum });
            }
        }
    }
}

/// # Safety
/// As [`Pv`] says, P in f32, and the CPU has `V`'s features.
#[inline(always)]
unsafe fn pv_body<V: BlockSimd, K: Kv>(simd: V, a: &Pv) {
    // SAFETY: tiles stay inside `rows` and `head_dim`: head_dim is a multiple of 16, hence of N.
    unsafe {
        let mut r = 0;
        while r < a.rows {
            let n = (a.rows - r).div_ceil((a.rows - r).div_ceil(V::ROWS));
            let p = a.p.cast::<f32>().add(r * S_STRIDE);
            let o = a.o.add(r * a.head_dim);
            let alpha = a.alpha.add(r);
            let mut d = 0;
            while d < a.head_dim {
                if a.head_dim - d >= 2 * V::LANES && n <= wide_rows::<V, K>() {
                    match n {
                        1 => pv_tile::<V, K, 1, 2>(simd, a, p, o, alpha, d),
                        2 => pv_tile::<V, K, 2, 2>(simd, a, p, o, alpha, d),
                        3 => pv_tile::<V, K, 3, 2>(simd, a, p, o, alpha, d),
                        4 if wide_rows::<V, K>() >= 4 => pv_tile::<V, K, 4, 2>(simd, a, p, o, alpha, d),
                        5 if wide_rows::<V, K>() >= 5 => pv_tile::<V, K, 5, 2>(simd, a, p, o, alpha, d),
                        6 if wide_rows::<V, K>() >= 6 => pv_tile::<V, K, 6, 2>(simd, a, p, o, alpha, d),
                        _ => unreachable!("{n} rows in a wide tile"),
                    }
                    d += 2 * V::LANES;
                } else {
                    match n {
                        1 => pv_tile::<V, K, 1, 1>(simd, a, p, o, alpha, d),
                        2 => pv_tile::<V, K, 2, 1>(simd, a, p, o, alpha, d),
                        3 => pv_tile::<V, K, 3, 1>(simd, a, p, o, alpha, d),
                        4 => pv_tile::<V, K, 4, 1>(simd, a, p, o, alpha, d),
                        5 if V::ROWS >= 5 => pv_tile::<V, K, 5, 1>(simd, a, p, o, alpha, d),
                        6 if V::ROWS >= 6 => pv_tile::<V, K, 6, 1>(simd, a, p, o, alpha, d),
                        _ => unreachable!("{n} rows in a tile"),
                    }
                    d += V::LANES;
                }
            }
            r += n;
        }
    }
}

/// # Safety
/// `to` has room for `q.len()` f32.
unsafe fn pack_q_f32(q: &[f32], scale: f32, to: *mut u8) {
    for (i, &q) in q.iter().enumerate() {
        // SAFETY: the caller's contract.
        unsafe { to.cast::<f32>().add(i).write(q * scale) };
    }
}

const _: () = assert!(BLOCK == GROUPS * 16);

/// Instantiates the bodies for one vector type and KV type inside functions that enable its features.
macro_rules! tier {
    ($table:ident, $module:ident, $name:literal, $vector:ty, $kv:ty, $features:literal) => {
        /// A tier's table.
        pub(super) static $table: BlockKernels = BlockKernels {
            name: $name,
            bf16: false,
            unit: 1.0,
            pack_q: pack_q_f32,
            qk: $module::qk,
            softcap: $module::softcap,
            softmax: $module::softmax,
            pv: $module::pv,
            run: None,
            merge: $module::merge,
        };
        mod $module {
            use super::*;
            #[target_feature(enable = $features)]
            pub(super) unsafe fn qk(a: &Qk) {
                // SAFETY: the features are enabled here; the rest is the caller's contract.
                unsafe { qk_body::<$vector, $kv>(<$vector>::token(), a) }
            }
            #[target_feature(enable = $features)]
            pub(super) unsafe fn softcap(a: &Softcap) {
                // SAFETY: as in `qk`.
                unsafe { softcap_body::<$vector>(<$vector>::token(), a) }
            }
            #[target_feature(enable = $features)]
            pub(super) unsafe fn softmax(a: &Softmax) {
                // SAFETY: as in `qk`.
                unsafe { softmax_body::<$vector, $kv>(<$vector>::token(), a) }
            }
            #[target_feature(enable = $features)]
            pub(super) unsafe fn pv(a: &Pv) {
                // SAFETY: as in `qk`.
                unsafe { pv_body::<$vector, $kv>(<$vector>::token(), a) }
            }
            #[target_feature(enable = $features)]
            pub(super) unsafe fn merge(acc: (&mut f32, &mut f32, &mut [f32]), part: (f32, f32, &[f32])) {
                merge_body(acc, part)
            }
        }
    };
}

tier!(AVX2_BF16, avx2_bf16, "avx2 f32 x bf16", Avx2, Bf16, "avx2,fma,f16c");
tier!(AVX2_F16, avx2_f16, "avx2 f32 x f16", Avx2, F16, "avx2,fma,f16c");
tier!(AVX2_Q8, avx2_q8, "avx2 f32 x q8", Avx2, Q8, "avx2,fma,f16c");
tier!(
    AVX512_BF16,
    avx512_bf16,
    "avx512 f32 x bf16",
    Avx512,
    Bf16,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
tier!(
    AVX512_F16,
    avx512_f16,
    "avx512 f32 x f16",
    Avx512,
    F16,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
tier!(
    AVX512_Q8,
    avx512_q8,
    "avx512 f32 x q8",
    Avx512,
    Q8,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
