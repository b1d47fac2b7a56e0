//! Block kernels in f32: 16-bit keys and values are widened as they are read (AVX2, AVX-512).
//!
//! layout     K line: a pair of dims of 16 tokens; V line: 16 dims of a pair of tokens; both widen to two
//!            f32 vectors by shift and mask (bf16) or vcvtph2ps (f16), with no shuffle across lanes
//! tile       4 rows x 2 vectors (AVX2), 6 x 2 (AVX-512)
//! registers  8 accumulators + 2 widened + 1 broadcast + constants = 13 of 16 ymm; 12 + 4 + 1 of 32 zmm
//! bound      memory in decode: 4·T·head_dim bytes per KV head
//! error      q and P stay f32; tolerance derived in tests/attention_vs_reference.rs

#![allow(clippy::needless_range_loop)] // tiles: two indices into two or three arrays

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use super::kernels::{BLOCK, BlockKernels, GROUPS, Pv, Qk, S_STRIDE, Softmax};
use super::partial::merge_body;
use super::vector::{Avx2, Avx512, Simd};
use crate::cache::PAGE_TOKENS;

/// `N` pairs at `p`, widened.
///
/// # Safety
/// As [`Simd`]: `2·N` readable elements.
#[inline(always)]
unsafe fn pairs<V: Simd, const F16: bool>(p: *const u16) -> (V::F, V::F) {
    // SAFETY: the caller's contract.
    unsafe { if F16 { V::f16_pairs(p) } else { V::bf16_pairs(p) } }
}

/// One tile of S: `R` rows x `W` vectors of tokens. Each score is one chain of FMAs over dims in order.
///
/// # Safety
/// `q` has `R` rows of `head_dim`; each `k` has `head_dim/2` runs of `2·N` elements, 32 apart; `s` has
/// `R` rows of `S_STRIDE`, and vector `w` goes to `at[w]`.
#[inline(always)]
unsafe fn qk_tile<V: Simd, const F16: bool, const R: usize, const W: usize>(
    q: *const f32,
    head_dim: usize,
    k: [*const u16; W],
    ahead: [*const u16; W],
    s: *mut f32,
    at: [usize; W],
) {
    // SAFETY: the caller's contract bounds every address below; prefetching any address is harmless.
    unsafe {
        let mut acc = [[V::splat(0.0); W]; R];
        for d in 0..head_dim / 2 {
            for w in 0..W {
                _mm_prefetch::<_MM_HINT_T1>(ahead[w].wrapping_add(d * 32).cast());
                let (even, odd) = pairs::<V, F16>(k[w].add(d * 32));
                for r in 0..R {
                    let q = q.add(r * head_dim + 2 * d);
                    acc[r][w] = V::fma(even, V::splat(*q), acc[r][w]);
                    acc[r][w] = V::fma(odd, V::splat(*q.add(1)), acc[r][w]);
                }
            }
        }
        for r in 0..R {
            for w in 0..W {
                V::store(s.add(r * S_STRIDE + at[w]), acc[r][w]);
            }
        }
    }
}

/// # Safety
/// As [`Qk`] says, and the CPU has `V`'s features.
#[inline(always)]
unsafe fn qk_body<V: Simd, const F16: bool>(a: &Qk) {
    // SAFETY: rows r..r+R stay below a.rows; vectors nv cover a.groups groups, 16/N to each; lines are
    // 32 elements, of which a vector takes 2·N at an offset that stays inside.
    unsafe {
        let per_group = 16 / V::N;
        let total = a.groups * per_group;
        let vector = |list: &[*const u16; GROUPS], v: usize| {
            list[v / per_group].wrapping_add(v % per_group * 2 * V::N)
        };
        let mut r = 0;
        while r < a.rows {
            let n = (a.rows - r).div_ceil((a.rows - r).div_ceil(V::ROWS));
            let q = a.q.cast::<f32>().add(r * a.head_dim);
            let s = a.s.add(r * S_STRIDE);
            let mut v = 0;
            while v < total {
                if total - v >= 2 {
                    let k = [vector(&a.k, v), vector(&a.k, v + 1)];
                    let ahead = [vector(&a.ahead, v), vector(&a.ahead, v + 1)];
                    let at = [v * V::N, (v + 1) * V::N];
                    match n {
                        1 => qk_tile::<V, F16, 1, 2>(q, a.head_dim, k, ahead, s, at),
                        2 => qk_tile::<V, F16, 2, 2>(q, a.head_dim, k, ahead, s, at),
                        3 => qk_tile::<V, F16, 3, 2>(q, a.head_dim, k, ahead, s, at),
                        5 if V::ROWS > 4 => qk_tile::<V, F16, 5, 2>(q, a.head_dim, k, ahead, s, at),
                        6 if V::ROWS > 4 => qk_tile::<V, F16, 6, 2>(q, a.head_dim, k, ahead, s, at),
                        _ => qk_tile::<V, F16, 4, 2>(q, a.head_dim, k, ahead, s, at),
                    }
                    v += 2;
                } else {
                    let (k, ahead, at) = ([vector(&a.k, v)], [vector(&a.ahead, v)], [v * V::N]);
                    match n {
                        1 => qk_tile::<V, F16, 1, 1>(q, a.head_dim, k, ahead, s, at),
                        2 => qk_tile::<V, F16, 2, 1>(q, a.head_dim, k, ahead, s, at),
                        3 => qk_tile::<V, F16, 3, 1>(q, a.head_dim, k, ahead, s, at),
                        5 if V::ROWS > 4 => qk_tile::<V, F16, 5, 1>(q, a.head_dim, k, ahead, s, at),
                        6 if V::ROWS > 4 => qk_tile::<V, F16, 6, 1>(q, a.head_dim, k, ahead, s, at),
                        _ => qk_tile::<V, F16, 4, 1>(q, a.head_dim, k, ahead, s, at),
                    }
                    v += 1;
                }
            }
            r += n;
        }
    }
}

/// The first half of a row's softmax: masks its scores, and gives (maximum to subtract, alpha).
/// Scores count in `unit` (1: natural logarithms; ln 2: powers of two).
///
/// # Safety
/// `s` has `groups · 16` elements; the CPU has `V`'s features.
#[inline(always)]
pub(super) unsafe fn row_max<V: Simd>(
    s: *mut f32,
    groups: usize,
    (lo, hi): (u32, u32),
    m: &mut f32,
    unit: f32,
) -> (V::F, f32) {
    // SAFETY: the caller's contract.
    unsafe {
        let n = groups * 16;
        let mut top = V::splat(f32::NEG_INFINITY);
        if lo == 0 && hi as usize >= n {
            for t in (0..n).step_by(V::N) {
                top = V::max(top, V::load(s.add(t)));
            }
        } else {
            for t in (0..n).step_by(V::N) {
                let x = V::keep(V::load(s.add(t)), t, lo as usize, hi as usize);
                V::store(s.add(t), x);
                top = V::max(top, x);
            }
        }
        let old = *m;
        let top = V::hmax(top);
        let new = if top > old { top } else { old };
        *m = new;
        // Nothing visible so far: −∞ − −∞ would be NaN; subtracting 0 leaves every p at exp(−∞) = 0.
        let base = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let alpha = if new == old { 1.0 } else { first_lane::<V>(V::exp(V::splat((old - base) * unit))) };
        (V::splat(base), alpha)
    }
}

#[inline(always)]
unsafe fn first_lane<V: Simd>(x: V::F) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: 16 >= N elements; the caller has the features.
    unsafe { V::store(lanes.as_mut_ptr(), x) };
    lanes[0]
}

/// # Safety
/// As [`Softmax`] says, P in f32, and the CPU has `V`'s features.
#[inline(always)]
unsafe fn softmax_body<V: Simd>(a: &Softmax) {
    // SAFETY: rows and groups bound every address (see `Softmax`).
    unsafe {
        for r in 0..a.rows {
            let s = a.s.add(r * S_STRIDE);
            let p = a.p.cast::<f32>().add(r * S_STRIDE);
            let (base, alpha) = row_max::<V>(s, a.groups, *a.visible.add(r), &mut *a.m.add(r), 1.0);
            *a.alpha.add(r) = alpha;
            let lanes = (*a.sum.add(r)).as_mut_ptr();
            let mut sum = V::mul(V::load(lanes), V::splat(alpha));
            for t in (0..a.groups * 16).step_by(V::N) {
                let e = V::exp(V::sub(V::load(s.add(t)), base));
                V::store(p.add(t), e);
                sum = V::add(sum, e);
            }
            V::store(lanes, sum);
        }
    }
}

/// One tile of O: `R` rows x `W` vectors of dims, over all tokens of the block in order.
///
/// # Safety
/// `p` has `R` rows of `S_STRIDE`; `v`'s pages have `tokens` stored tokens; `o` has `R` rows of
/// `head_dim` from column `d0` on, with `d0 + W·N <= head_dim`; `alpha` has `R` elements.
#[inline(always)]
unsafe fn pv_tile<V: Simd, const F16: bool, const R: usize, const W: usize>(
    a: &Pv,
    p: *const f32,
    o: *mut f32,
    alpha: *const f32,
    d0: usize,
) {
    // SAFETY: the caller's contract bounds every address below; prefetching any address is harmless.
    unsafe {
        let hd = a.head_dim;
        let mut acc = [[V::splat(0.0); W]; R];
        for r in 0..R {
            for w in 0..W {
                acc[r][w] = V::mul(V::load(o.add(r * hd + d0 + w * V::N)), V::splat(*alpha.add(r)));
            }
        }
        let line = |t: usize| ((t % PAGE_TOKENS) / 2 * hd + d0) * 2;
        for t in (0..a.tokens & !1).step_by(2) {
            for w in 0..W {
                let at = line(t) + w * 2 * V::N;
                _mm_prefetch::<_MM_HINT_T1>(a.ahead[t / PAGE_TOKENS].wrapping_add(at).cast());
                let (even, odd) = pairs::<V, F16>(a.v[t / PAGE_TOKENS].add(at));
                for r in 0..R {
                    let p = p.add(r * S_STRIDE + t);
                    acc[r][w] = V::fma(even, V::splat(*p), acc[r][w]);
                    acc[r][w] = V::fma(odd, V::splat(*p.add(1)), acc[r][w]);
                }
            }
        }
        if a.tokens % 2 == 1 {
            let t = a.tokens - 1;
            for w in 0..W {
                let (even, _) = pairs::<V, F16>(a.v[t / PAGE_TOKENS].add(line(t) + w * 2 * V::N));
                for r in 0..R {
                    acc[r][w] = V::fma(even, V::splat(*p.add(r * S_STRIDE + t)), acc[r][w]);
                }
            }
        }
        for r in 0..R {
            for w in 0..W {
                V::store(o.add(r * hd + d0 + w * V::N), acc[r][w]);
            }
        }
    }
}

/// # Safety
/// As [`Pv`] says, P in f32, and the CPU has `V`'s features.
#[inline(always)]
unsafe fn pv_body<V: Simd, const F16: bool>(a: &Pv) {
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
                if a.head_dim - d >= 2 * V::N {
                    match n {
                        1 => pv_tile::<V, F16, 1, 2>(a, p, o, alpha, d),
                        2 => pv_tile::<V, F16, 2, 2>(a, p, o, alpha, d),
                        3 => pv_tile::<V, F16, 3, 2>(a, p, o, alpha, d),
                        5 if V::ROWS > 4 => pv_tile::<V, F16, 5, 2>(a, p, o, alpha, d),
                        6 if V::ROWS > 4 => pv_tile::<V, F16, 6, 2>(a, p, o, alpha, d),
                        _ => pv_tile::<V, F16, 4, 2>(a, p, o, alpha, d),
                    }
                    d += 2 * V::N;
                } else {
                    match n {
                        1 => pv_tile::<V, F16, 1, 1>(a, p, o, alpha, d),
                        2 => pv_tile::<V, F16, 2, 1>(a, p, o, alpha, d),
                        3 => pv_tile::<V, F16, 3, 1>(a, p, o, alpha, d),
                        5 if V::ROWS > 4 => pv_tile::<V, F16, 5, 1>(a, p, o, alpha, d),
                        6 if V::ROWS > 4 => pv_tile::<V, F16, 6, 1>(a, p, o, alpha, d),
                        _ => pv_tile::<V, F16, 4, 1>(a, p, o, alpha, d),
                    }
                    d += V::N;
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
    ($table:ident, $module:ident, $name:literal, $vector:ty, $f16:literal, $features:literal) => {
        /// A tier's table.
        pub(super) static $table: BlockKernels = BlockKernels {
            name: $name,
            bf16: false,
            unit: 1.0,
            pack_q: pack_q_f32,
            qk: $module::qk,
            softmax: $module::softmax,
            pv: $module::pv,
            merge: $module::merge,
        };
        mod $module {
            use super::*;
            #[target_feature(enable = $features)]
            pub(super) unsafe fn qk(a: &Qk) {
                // SAFETY: the features are enabled here; the rest is the caller's contract.
                unsafe { qk_body::<$vector, $f16>(a) }
            }
            #[target_feature(enable = $features)]
            pub(super) unsafe fn softmax(a: &Softmax) {
                // SAFETY: as in `qk`.
                unsafe { softmax_body::<$vector>(a) }
            }
            #[target_feature(enable = $features)]
            pub(super) unsafe fn pv(a: &Pv) {
                // SAFETY: as in `qk`.
                unsafe { pv_body::<$vector, $f16>(a) }
            }
            #[target_feature(enable = $features)]
            pub(super) unsafe fn merge(acc: (&mut f32, &mut f32, &mut [f32]), part: (f32, f32, &[f32])) {
                merge_body(acc, part)
            }
        }
    };
}

tier!(AVX2_BF16, avx2_bf16, "avx2 f32 x bf16", Avx2, false, "avx2,fma,f16c");
tier!(AVX2_F16, avx2_f16, "avx2 f32 x f16", Avx2, true, "avx2,fma,f16c");
tier!(
    AVX512_BF16,
    avx512_bf16,
    "avx512 f32 x bf16",
    Avx512,
    false,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
tier!(
    AVX512_F16,
    avx512_f16,
    "avx512 f32 x f16",
    Avx512,
    true,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
