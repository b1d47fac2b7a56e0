//! Float linear for a few tokens: dot products of rows as in the file (AVX2, AVX-512).
//!
//!   y[t][n] = Σ_k w[n][k]·x[t][k]           w converted to f32 on load, f32 accumulation
//!
//! tile       8 rows x MT tokens (1, 2; AVX2 4 x 2), four vectors of k per step. A vector of x is loaded once for all
//!            rows, which matters because x adds two lines to load per line of weights. 4 rows where nothing is requested ahead
//!            (`ahead_from` of the tuning table)
//! registers  8·MT acc + w + x = 18 zmm at MT = 2; 4·MT + 2 = 10 ymm
//! bound      memory: 2 (bf16, f16) or 4 bytes per weight
//! prefetch   into L2, the same columns of the next tile, every second line: the other comes with it
//! measured   2.5 GB of bf16 from a file mapping (4 KiB pages), 2 threads, Zen 4, where 51 GB/s can be read:
//!            8 rows 49, 4 rows 44; one row at a time 30 to 44, depending on how x lies in L1, with the best prefetch
//! error      f32: at most K/lanes + log2(lanes) roundings of a partial sum

use std::arch::x86_64::*;

use super::super::kernel::{ActsForm, LinearKernel, Work};
use super::few_rows;
use crate::tensor::DType;

/// A vector of f32 lanes, and loads that convert weights to it.
trait Lanes: Copy {
    const N: usize;
    unsafe fn zero() -> Self;
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    unsafe fn sum(self) -> f32;
    unsafe fn f32(p: *const f32) -> Self;
    unsafe fn bf16(p: *const u16) -> Self;
    unsafe fn f16(p: *const u16) -> Self;
}

// SAFETY (all methods): the instantiating functions below enable the features; loads are in range by
// `rows`'s arithmetic.
impl Lanes for __m512 {
    const N: usize = 16;
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, self) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_ps(self) }
    }
    #[inline(always)]
    unsafe fn f32(p: *const f32) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn bf16(p: *const u16) -> Self {
        // SAFETY: see above.
        unsafe {
            let v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v))
        }
    }
    #[inline(always)]
    unsafe fn f16(p: *const u16) -> Self {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
}

// SAFETY (all methods): as above.
impl Lanes for __m256 {
    const N: usize = 8;
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(a, b, self) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let v = _mm_add_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    unsafe fn f32(p: *const f32) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn bf16(p: *const u16) -> Self {
        // SAFETY: see above.
        unsafe {
            let v = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v))
        }
    }
    #[inline(always)]
    unsafe fn f16(p: *const u16) -> Self {
        // SAFETY: see above.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
}

/// Element type of stored weights.
trait Weight {
    const BYTES: usize;
    unsafe fn lanes<V: Lanes>(p: *const u8) -> V;
    fn scalar(bytes: &[u8]) -> f32;
}
struct F32;
struct F16;
struct Bf16;
impl Weight for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn lanes<V: Lanes>(p: *const u8) -> V {
        // SAFETY: the caller's range.
        unsafe { V::f32(p.cast()) }
    }
    fn scalar(b: &[u8]) -> f32 {
        f32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }
}
impl Weight for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn lanes<V: Lanes>(p: *const u8) -> V {
        // SAFETY: the caller's range.
        unsafe { V::f16(p.cast()) }
    }
    fn scalar(b: &[u8]) -> f32 {
        half::f16::from_le_bytes([b[0], b[1]]).to_f32()
    }
}
impl Weight for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn lanes<V: Lanes>(p: *const u8) -> V {
        // SAFETY: the caller's range.
        unsafe { V::bf16(p.cast()) }
    }
    fn scalar(b: &[u8]) -> f32 {
        half::bf16::from_le_bytes([b[0], b[1]]).to_f32()
    }
}

/// Vectors of k per step.
const U: usize = 4;

/// `R` rows x `MT` tokens; with `AHEAD`, the next `R` rows are requested.
#[inline(always)]
unsafe fn tile<V: Lanes, W: Weight, const R: usize, const MT: usize, const AHEAD: bool>(
    w: *const u8,
    k: usize,
    x: *const f32,
    out: *mut f32,
    ldo: usize,
) {
    let rb = k * W::BYTES;
    // SAFETY: R rows of k weights at `w`, MT rows of k activations at `x`, outputs by contract; a prefetch
    // never faults.
    unsafe {
        let mut acc = [[V::zero(); MT]; R];
        let step = U * V::N;
        let whole = k / step * step;
        let mut i = 0;
        while i < whole {
            let p = w.add(i * W::BYTES);
            if AHEAD {
                for r in 0..R {
                    for l in (0..step * W::BYTES).step_by(128) {
                        _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add((R + r) * rb + l).cast());
                    }
                }
            }
            for u in 0..U {
                let x: [V; MT] = std::array::from_fn(|t| V::f32(x.add(t * k + i + u * V::N)));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let w = W::lanes::<V>(p.add(r * rb + u * V::N * W::BYTES));
                    for t in 0..MT {
                        acc[t] = acc[t].fma(w, x[t]);
                    }
                }
            }
            i += step;
        }
        for (r, acc) in acc.iter().enumerate() {
            for (t, acc) in acc.iter().enumerate() {
                let mut sum = acc.sum();
                for j in whole..k {
                    let b = std::slice::from_raw_parts(w.add(r * rb + j * W::BYTES), W::BYTES);
                    sum = W::scalar(b).mul_add(*x.add(t * k + j), sum);
                }
                *out.add(t * ldo + r) = sum;
            }
        }
    }
}

/// `n` rows, in tiles of `R`; a row's bits do not depend on its tile.
#[inline(always)]
unsafe fn rows<V: Lanes, W: Weight, const R: usize, const MT: usize, const AHEAD: bool>(
    w: *const u8,
    n: usize,
    k: usize,
    x: *const f32,
    out: *mut f32,
    ldo: usize,
) {
    let rb = k * W::BYTES;
    let mut r = 0;
    // SAFETY: r + the rows of a tile stay within `n`.
    unsafe {
        while r + R <= n {
            tile::<V, W, R, MT, AHEAD>(w.add(r * rb), k, x, out.add(r), ldo);
            r += R;
        }
        while r < n {
            tile::<V, W, 1, MT, AHEAD>(w.add(r * rb), k, x, out.add(r), ldo);
            r += 1;
        }
    }
}

macro_rules! instantiate {
    ($kernel:ident, $name:literal, $run:ident, $lanes:ty, $r1:literal, $r:literal, $features:literal) => {
        pub(in super::super) static $kernel: LinearKernel = LinearKernel {
            name: $name,
            takes: few_rows,
            pays: |_| true,
            any_rows: false,
            reads: ActsForm::F32,
            chunk: |s| s.usual(),
            run: $run,
        };

        /// `out[t·ldo + r] = Σ w[r][k]·x[t][k]`.
        ///
        /// # Safety
        /// The CPU has the features; the work's weights are rows of a float type, its tokens one or two.
        #[target_feature(enable = $features)]
        unsafe fn $run(work: &Work<'_>) {
            let &Work { n, k, out, ldo, .. } = work;
            let (w, x) = (work.w.as_ptr(), work.x.f32().as_ptr());
            macro_rules! of {
                ($weight:ty) => {
                    match (work.x.m(), work.asks_ahead()) {
                        (1, true) => rows::<$lanes, $weight, $r1, 1, true>(w, n, k, x, out, ldo),
                        (1, false) => rows::<$lanes, $weight, 4, 1, false>(w, n, k, x, out, ldo),
                        (2, true) => rows::<$lanes, $weight, $r, 2, true>(w, n, k, x, out, ldo),
                        (2, false) => rows::<$lanes, $weight, 4, 2, false>(w, n, k, x, out, ldo),
                        (m, _) => unreachable!("{m} tokens"),
                    }
                };
            }
            // SAFETY: the caller's contract.
            unsafe {
                match work.dtype {
                    DType::F32 => of!(F32),
                    DType::F16 => of!(F16),
                    DType::BF16 => of!(Bf16),
                    dtype => unreachable!("{dtype}"),
                }
            }
        }
    };
}
instantiate!(AVX512, "rowdot_avx512", avx512, __m512, 8, 8, "avx512f,avx512bw,avx512dq,avx512vl,f16c,fma");
instantiate!(AVX2, "rowdot_avx2", avx2, __m256, 8, 4, "avx2,f16c,fma");
