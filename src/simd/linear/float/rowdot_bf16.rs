//! bf16 linear for a few tokens: dot products of rows as in the file (AVX512_BF16).
//!
//!   y[t][n] = Σ_k w[n][k]·x[t][k]           x rounded to bf16, f32 accumulation
//!
//! tile       8 rows x MT tokens (1, 2), two vectors of 32 k a step: a vector of x is loaded once for all rows.
//!            4 rows where nothing is requested ahead (`ahead_from` of the tuning table)
//! registers  8·MT acc + w + MT x = 19 zmm at MT = 2
//! bound      memory: 2 bytes per weight. A line of weights is one load and MT products, so the window of the
//!            core (320 operations on Zen 4) holds several times more lines than when weights are converted
//! prefetch   into L2, the same columns of the next tile; or nothing, since Zen 5 reads more by itself, and the last tile of
//!            a chunk requests rows of another thread's chunk, which are then read twice
//! measured   llama 3.2 1B, decoding from a file mapping, 2 threads, Zen 4: 42 to 47 GB/s where rows converted
//!            to f32 (`rowdot`) reach 37 to 40; in slower minutes 33 of 36.8 readable, and 31. A C program of this loop on
//!            Zen 5, 2 threads, 83 GB/s readable, chunks of 16 to 24 and 48 rows of 4 KiB: 47 and 52 with requests, 68 and 70
//!            without and 4 rows, 56 without and 8 rows
//! error      x: 2^-9 relative; then f32, K/32 + 5 roundings of pairs of products, subnormals treated as zero

use std::arch::x86_64::*;

use super::super::kernel::{ActsForm, LinearKernel, Work};
use super::few_rows;
use crate::simd::Caps;
use crate::tensor::DType;

/// Elements of k per vector.
const LANES: usize = 32;

#[inline(always)]
unsafe fn load(p: *const u16) -> __m512bh {
    // SAFETY: 64 readable bytes at `p` by the caller's range; both types are 512 plain bits.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(p.cast())) }
}

#[inline(always)]
unsafe fn load_tail(p: *const u16, n: usize) -> __m512bh {
    // SAFETY: only the first n < 32 elements are read; both types are 512 plain bits.
    unsafe {
        let v = _mm512_maskz_loadu_epi16((1u32 << n) - 1, p.cast());
        std::mem::transmute::<__m512i, __m512bh>(v)
    }
}

/// `R` rows x `MT` tokens; with `AHEAD`, the next `R` rows are requested.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile<const R: usize, const MT: usize, const AHEAD: bool>(
    w: *const u16,
    k: usize,
    x: *const u16,
    stride: usize,
    out: *mut f32,
    ldo: usize,
) {
    const U: usize = 2;
    // SAFETY: R rows of k weights at `w`, MT rows of k activations (padded with zeros to a multiple of 64) at
    // `x`, outputs by contract; a prefetch never faults.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); MT]; R];
        let mut i = 0;
        while i + U * LANES <= k {
            let p = w.add(i);
            if AHEAD {
                for r in 0..R {
                    let ahead = p.wrapping_add((R + r) * k);
                    _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                    _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(LANES).cast());
                }
            }
            for u in 0..U {
                let x: [__m512bh; MT] = std::array::from_fn(|t| load(x.add(t * stride + i + u * LANES)));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let w = load(p.add(r * k + u * LANES));
                    for t in 0..MT {
                        acc[t] = _mm512_dpbf16_ps(acc[t], w, x[t]);
                    }
                }
            }
            i += U * LANES;
        }
        while i < k {
            let n = (k - i).min(LANES);
            for (r, acc) in acc.iter_mut().enumerate() {
                let p = w.add(r * k + i);
                let w = if n == LANES { load(p) } else { load_tail(p, n) };
                for (t, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_dpbf16_ps(*acc, w, load(x.add(t * stride + i)));
                }
            }
            i += n;
        }
        for (r, acc) in acc.iter().enumerate() {
            for (t, &acc) in acc.iter().enumerate() {
                *out.add(t * ldo + r) = _mm512_reduce_add_ps(acc);
            }
        }
    }
}

/// All rows, in tiles of `R`; a row's bits do not depend on its tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn rows<const R: usize, const MT: usize, const AHEAD: bool>(
    w: *const u16,
    n: usize,
    k: usize,
    x: *const u16,
    stride: usize,
    out: *mut f32,
    ldo: usize,
) {
    let mut r = 0;
    // SAFETY: r + the rows of a tile stay within `n`.
    unsafe {
        while r + R <= n {
            tile::<R, MT, AHEAD>(w.add(r * k), k, x, stride, out.add(r), ldo);
            r += R;
        }
        while r < n {
            tile::<1, MT, AHEAD>(w.add(r * k), k, x, stride, out.add(r), ldo);
            r += 1;
        }
    }
}

pub(in super::super) static KERNEL: LinearKernel = LinearKernel {
    name: "rowdot_bf16",
    takes: |a| few_rows(a) && a.dtype == DType::BF16 && Caps::get().avx512_bf16,
    pays: |_| true,
    any_rows: false,
    reads: ActsForm::Bf16,
    chunk: |s| s.usual(),
    run,
};

/// `out[t·ldo + r] = Σ w[r][k]·x[t][k]`.
///
/// # Safety
/// The CPU has AVX512_BF16; the work's weights are rows of bf16, its activations bf16, its tokens one or two.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn run(work: &Work<'_>) {
    let &Work { n, k, out, ldo, .. } = work;
    let (w, x, stride) = (work.w.as_ptr().cast::<u16>(), work.x.bf16().as_ptr(), work.x.bf16_stride());
    // SAFETY: the caller's contract; rows of x are padded with zeros to a multiple of 64.
    unsafe {
        match (work.x.m(), work.asks_ahead()) {
            (1, true) => rows::<8, 1, true>(w, n, k, x, stride, out, ldo),
            (1, false) => rows::<4, 1, false>(w, n, k, x, stride, out, ldo),
            (2, true) => rows::<8, 2, true>(w, n, k, x, stride, out, ldo),
            (2, false) => rows::<4, 2, false>(w, n, k, x, stride, out, ldo),
            (m, _) => unreachable!("{m} tokens"),
        }
    }
}
