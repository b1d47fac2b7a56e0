//! Float linear for more than a few tokens: tiles of dot products along k, weights as in the file.
//!
//!   y[t][n] = Σ_k w[n][k]·x[t][k]
//!
//! tile       4 rows x up to 6 tokens (AVX2: 2 x 6) over a block of k; nothing is transposed: each accumulator
//!            holds partial sums of one output, added across lanes at the end of the block
//! registers  24 acc + 4 w + 1 x = 29 of 32 zmm; 12 acc + 2 w + 1 x = 15 of 16 ymm
//! order      few tokens: the outer loop is over row tiles, so weights come from memory once, in file order, and
//!            activations from L2; many: the outer loop is over token tiles, and a chunk of rows stays in L2
//! bound      min(memory, products): bf16 vdpbf16ps, one line of weights each: M lines of products per line read,
//!            at 37 GB/s and 7.4 G products/s equal at M = 13; f32 arithmetic (f16, AVX2) at M = 6
//! measured   Zen 4, 2 threads, 4096x4096 cold, beside 33 GB/s of plain reading and 443 GFLOP/s of this kernel
//!            on weights in L2: bf16 M = 4 / 8 / 16 / 32 33 / 32 / 24 GB/s (383 GFLOP/s) / 419 GFLOP/s, M = 512
//!            446 GFLOP/s; f16 M = 4 / 8 / 16 33 / 25 / 13 GB/s (214 of 229 GFLOP/s)
//! exact bits the sum of an output depends on k alone: the same for every M and every division into tiles
//! error      bf16 dot products: activations rounded to bf16, f32 accumulation that treats subnormals as zero;
//!            otherwise f32

use std::arch::x86_64::*;

use super::super::kernel::{ActsForm, LinearKernel, Shape, Work};
use super::rows;
use crate::simd::Caps;
use crate::tensor::DType;

/// Most tokens of a tile.
const TOKENS: usize = 6;

/// Longest block of k, in bytes of a token's activations; the activations of a tile then stay in L2 beside the weights.
const BLOCK_BYTES: usize = 16 * 1024;

/// Activations up to this size are read from L2 repeatedly, once per row tile.
const L2_SHARE: usize = 512 * 1024;

/// A vector of weights times a vector of activations, added to a vector of sums.
///
/// # Safety
/// (All methods.) The instantiating functions enable the features; `p` is valid for [`Dot::STEP`] elements.
trait Dot {
    /// Elements of k per vector.
    const STEP: usize;
    /// Bytes of a weight and of an activation.
    const W: usize;
    const X: usize;
    type V: Copy;
    type Sum: Copy;
    unsafe fn w(p: *const u8) -> Self::V;
    unsafe fn x(p: *const u8) -> Self::V;
    unsafe fn zero() -> Self::Sum;
    unsafe fn dot(sum: Self::Sum, w: Self::V, x: Self::V) -> Self::Sum;
    /// The sums over the lanes of four vectors, each by the same tree.
    unsafe fn reduce(sums: [Self::Sum; 4]) -> [f32; 4];
}

#[inline(always)]
unsafe fn reduce_zmm(a: [__m512; 4]) -> [f32; 4] {
    // SAFETY: register arithmetic.
    unsafe {
        let b = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
        let c = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        let (b, c) = (_mm512_castps_pd(b), _mm512_castps_pd(c));
        let (lo, hi) = (_mm512_unpacklo_pd(b, c), _mm512_unpackhi_pd(b, c));
        // One output per lane of each 128 bits.
        let d = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
        reduce_ymm_of_four(_mm256_add_ps(_mm512_castps512_ps256(d), _mm512_extractf32x8_ps::<1>(d)))
    }
}

#[inline(always)]
unsafe fn reduce_ymm_of_four(a: __m256) -> [f32; 4] {
    // SAFETY: register arithmetic; a vector of four floats is four floats.
    unsafe { std::mem::transmute(_mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a))) }
}

/// bf16 times bf16, pairs at a time.
struct Bf16Pairs;

impl Dot for Bf16Pairs {
    const STEP: usize = 32;
    const W: usize = 2;
    const X: usize = 2;
    type V = __m512i;
    type Sum = __m512;
    #[inline(always)]
    unsafe fn w(p: *const u8) -> __m512i {
        // SAFETY: see the trait.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn x(p: *const u8) -> __m512i {
        // SAFETY: see the trait.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: see the trait.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn dot(sum: __m512, w: __m512i, x: __m512i) -> __m512 {
        // SAFETY: see the trait; both types are 64 bytes of anything.
        unsafe {
            let w = std::mem::transmute::<__m512i, __m512bh>(w);
            let x = std::mem::transmute::<__m512i, __m512bh>(x);
            _mm512_dpbf16_ps(sum, w, x)
        }
    }
    #[inline(always)]
    unsafe fn reduce(sums: [__m512; 4]) -> [f32; 4] {
        // SAFETY: see the trait.
        unsafe { reduce_zmm(sums) }
    }
}

/// Weights that are widened to f32 on load, times f32.
macro_rules! widening {
    ($name:ident, zmm, $bytes:literal, |$p:ident| $load:expr) => {
        struct $name;
        impl Dot for $name {
            const STEP: usize = 16;
            const W: usize = $bytes;
            const X: usize = 4;
            type V = __m512;
            type Sum = __m512;
            #[inline(always)]
            unsafe fn w($p: *const u8) -> __m512 {
                // SAFETY: see the trait.
                unsafe { $load }
            }
            #[inline(always)]
            unsafe fn x(p: *const u8) -> __m512 {
                // SAFETY: see the trait.
                unsafe { _mm512_loadu_ps(p.cast()) }
            }
            #[inline(always)]
            unsafe fn zero() -> __m512 {
                // SAFETY: see the trait.
                unsafe { _mm512_setzero_ps() }
            }
            #[inline(always)]
            unsafe fn dot(sum: __m512, w: __m512, x: __m512) -> __m512 {
                // SAFETY: see the trait.
                unsafe { _mm512_fmadd_ps(w, x, sum) }
            }
            #[inline(always)]
            unsafe fn reduce(sums: [__m512; 4]) -> [f32; 4] {
                // SAFETY: see the trait.
                unsafe { reduce_zmm(sums) }
            }
        }
    };
    ($name:ident, ymm, $bytes:literal, |$p:ident| $load:expr) => {
        struct $name;
        impl Dot for $name {
            const STEP: usize = 8;
            const W: usize = $bytes;
            const X: usize = 4;
            type V = __m256;
            type Sum = __m256;
            #[inline(always)]
            unsafe fn w($p: *const u8) -> __m256 {
                // SAFETY: see the trait.
                unsafe { $load }
            }
            #[inline(always)]
            unsafe fn x(p: *const u8) -> __m256 {
                // SAFETY: see the trait.
                unsafe { _mm256_loadu_ps(p.cast()) }
            }
            #[inline(always)]
            unsafe fn zero() -> __m256 {
                // SAFETY: see the trait.
                unsafe { _mm256_setzero_ps() }
            }
            #[inline(always)]
            unsafe fn dot(sum: __m256, w: __m256, x: __m256) -> __m256 {
                // SAFETY: see the trait.
                unsafe { _mm256_fmadd_ps(w, x, sum) }
            }
            #[inline(always)]
            unsafe fn reduce(a: [__m256; 4]) -> [f32; 4] {
                // SAFETY: see the trait.
                unsafe {
                    let (b, c) = (_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
                    reduce_ymm_of_four(_mm256_hadd_ps(b, c))
                }
            }
        }
    };
}
widening!(F32Zmm, zmm, 4, |p| _mm512_loadu_ps(p.cast()));
widening!(F16Zmm, zmm, 2, |p| _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())));
widening!(Bf16Zmm, zmm, 2, |p| {
    let v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v))
});
widening!(F32Ymm, ymm, 4, |p| _mm256_loadu_ps(p.cast()));
widening!(F16Ymm, ymm, 2, |p| _mm256_cvtph_ps(_mm_loadu_si128(p.cast())));
widening!(Bf16Ymm, ymm, 2, |p| {
    let v = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v))
});

/// The operands of a tile: R rows with T tokens over `k` elements.
struct Tile {
    w: *const u8,
    w_stride: usize,
    x: *const u8,
    x_stride: usize,
    k: usize,
    out: *mut f32,
    ldo: usize,
    /// Whether to add to the outputs because this is not the first block of k.
    accumulate: bool,
    /// Rows to prefetch into L2 meanwhile: `ahead_rows` of them from `ahead`, `w_stride` apart, and again those a tile
    /// before them. Prefetches are dropped while too many misses are in flight: at M = 16 the second one lifts 20 GB/s
    /// to 24.
    ahead: *const u8,
    ahead_rows: usize,
}

#[inline(always)]
unsafe fn tile<D: Dot, const R: usize, const T: usize>(j: &Tile) {
    // SAFETY: `Tile` describes existing memory (see `gemm`); prefetched memory need not exist.
    unsafe {
        let mut acc = [[D::zero(); R]; T];
        let per_line = 64 / D::W;
        let lines = j.k / per_line;
        let (mut w, mut x, mut ahead) = (j.w, j.x, j.ahead);
        for _ in 0..lines {
            for r in 0..j.ahead_rows {
                let p = ahead.wrapping_add(r * j.w_stride);
                _mm_prefetch::<_MM_HINT_T1>(p.cast());
                _mm_prefetch::<_MM_HINT_T1>(p.wrapping_sub(R * j.w_stride).cast());
            }
            ahead = ahead.wrapping_add(64);
            for _ in 0..per_line / D::STEP {
                step::<D, R, T>(&mut acc, (w, j.w_stride), (x, j.x_stride));
                w = w.add(D::STEP * D::W);
                x = x.add(D::STEP * D::X);
            }
        }
        let mut left = j.k - lines * per_line;
        while left >= D::STEP {
            step::<D, R, T>(&mut acc, (w, j.w_stride), (x, j.x_stride));
            w = w.add(D::STEP * D::W);
            x = x.add(D::STEP * D::X);
            left -= D::STEP;
        }
        if left > 0 {
            // The last, shorter vectors, padded with zeros: 64 bytes are at least a vector.
            let (mut ws, mut xs) = ([[0u8; 64]; R], [[0u8; 64]; T]);
            for (r, to) in ws.iter_mut().enumerate() {
                std::ptr::copy_nonoverlapping(w.add(r * j.w_stride), to.as_mut_ptr(), left * D::W);
            }
            for (t, to) in xs.iter_mut().enumerate() {
                std::ptr::copy_nonoverlapping(x.add(t * j.x_stride), to.as_mut_ptr(), left * D::X);
            }
            step::<D, R, T>(&mut acc, (ws.as_ptr().cast(), 64), (xs.as_ptr().cast(), 64));
        }
        for (t, acc) in acc.iter().enumerate() {
            let mut four = [D::zero(); 4];
            four[..R].copy_from_slice(acc);
            let sums = D::reduce(four);
            for (r, sum) in sums.iter().enumerate().take(R) {
                let out = j.out.add(t * j.ldo + r);
                *out = if j.accumulate { *out + sum } else { *sum };
            }
        }
    }
}

/// One vector of k.
///
/// # Safety
/// R rows of weights and T of activations, given by first row and stride, hold [`Dot::STEP`] elements.
#[inline(always)]
unsafe fn step<D: Dot, const R: usize, const T: usize>(
    acc: &mut [[D::Sum; R]; T],
    (w, w_stride): (*const u8, usize),
    (x, x_stride): (*const u8, usize),
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut ws = [D::w(w); R];
        for r in 1..R {
            ws[r] = D::w(w.add(r * w_stride));
        }
        for t in 0..T {
            let x = D::x(x.add(t * x_stride));
            for r in 0..R {
                acc[t][r] = D::dot(acc[t][r], ws[r], x);
            }
        }
    }
}

/// The tile of `t` tokens.
#[inline(always)]
unsafe fn tokens<D: Dot, const R: usize>(t: usize, j: &Tile) {
    // SAFETY: the caller's contract.
    unsafe {
        match t {
            1 => tile::<D, R, 1>(j),
            2 => tile::<D, R, 2>(j),
            3 => tile::<D, R, 3>(j),
            4 => tile::<D, R, 4>(j),
            5 => tile::<D, R, 5>(j),
            TOKENS => tile::<D, R, TOKENS>(j),
            _ => unreachable!("no tile of {t} tokens"),
        }
    }
}

/// Rows of weights times tokens.
#[derive(Clone, Copy)]
struct Product {
    /// `n` rows of `k` weights.
    w: *const u8,
    n: usize,
    k: usize,
    /// `m` rows of `k` activations, `x_stride` bytes apart: bf16 for [`avx512_bf16`], otherwise f32.
    x: *const u8,
    x_stride: usize,
    m: usize,
    /// `m` rows of `ldo >= n`: `out[t·ldo + r]` is written.
    out: *mut f32,
    ldo: usize,
}

/// Whether `m` tokens of `k` activations of `bytes` are few: see the header's `order`.
fn few(m: usize, k: usize, bytes: usize) -> bool {
    m * k.min(BLOCK_BYTES / bytes) * bytes <= L2_SHARE
}

/// Weight bytes per chunk when many tokens make the work compute-bound: they stay in L2 beside a tile of tokens.
const CHUNK_BYTES: usize = 256 * 1024;

/// Groups per chunk; `act_bytes` is the size of an activation.
fn chunk(s: &Shape<'_>, act_bytes: usize) -> usize {
    s.of_bytes(if few(s.m, s.k, act_bytes) { s.tuning.chunk_bytes } else { CHUNK_BYTES })
}

/// # Safety
/// As the instantiating functions; tiles of R rows.
#[inline(always)]
unsafe fn gemm<D: Dot, const R: usize>(job: &Product) {
    let Product { n, k, m, .. } = *job;
    let row_bytes = k * D::W;
    // Blocks of about the same length, in whole lines of weights. They do not depend on M.
    let blocks = (k * D::X).div_ceil(BLOCK_BYTES).max(1);
    let block = k.div_ceil(blocks).next_multiple_of(64).max(64);
    // Tiles of about the same number of tokens.
    let tiles = m.div_ceil(TOKENS);
    let (base, longer) = (m / tiles, m % tiles);
    let few = few(m, k, D::X);
    let (row_steps, k_steps) = (n.div_ceil(R), k.div_ceil(block));
    // The two orders: (row tile, block of k, token tile) or (block of k, token tile, row tile).
    for outer in 0..if few { row_steps } else { k_steps } {
        for middle in 0..if few { k_steps } else { tiles } {
            for inner in 0..if few { tiles } else { row_steps } {
                let (row, kb, ti) = if few { (outer, middle, inner) } else { (inner, outer, middle) };
                let t = base + (ti < longer) as usize;
                let (r0, k0, t0) = (row * R, kb * block, ti * base + ti.min(longer));
                let len = (k - k0).min(block);
                // SAFETY: rows r0.. below n, elements k0..k0 + len, tokens t0..t0 + t and their outputs exist.
                unsafe {
                    let w = job.w.add(r0 * row_bytes + k0 * D::W);
                    // The token tiles of a row tile share the prefetching of the next rows.
                    let (ahead, ahead_rows) = if few {
                        let (from, to) = (R * ti / tiles, R * (ti + 1) / tiles);
                        (w.wrapping_add((2 * R + from) * row_bytes), to - from)
                    } else {
                        // Each of the first token tiles prefetches one row of the next chunk's row tile.
                        (w.wrapping_add((n + ti) * row_bytes), (ti < R) as usize)
                    };
                    let mut j = Tile {
                        w,
                        w_stride: row_bytes,
                        x: job.x.add(t0 * job.x_stride + k0 * D::X),
                        x_stride: job.x_stride,
                        k: len,
                        out: job.out.add(t0 * job.ldo + r0),
                        ldo: job.ldo,
                        accumulate: kb > 0,
                        ahead,
                        ahead_rows,
                    };
                    if n - r0 >= R {
                        tokens::<D, R>(t, &j);
                    } else {
                        for _ in r0..n {
                            tokens::<D, 1>(t, &j);
                            j.w = j.w.wrapping_add(row_bytes);
                            j.out = j.out.wrapping_add(1);
                        }
                    }
                }
            }
        }
    }
}

pub(in super::super) static BF16: LinearKernel = LinearKernel {
    name: "tiledot_bf16",
    takes: |a| rows(a) && a.dtype == DType::BF16 && Caps::get().bf16_dot_pays(),
    pays: |_| true,
    any_rows: true,
    reads: ActsForm::Bf16,
    chunk: |s| chunk(s, 2),
    run: avx512_bf16,
};

pub(in super::super) static AVX512: LinearKernel = LinearKernel {
    name: "tiledot_avx512",
    takes: rows,
    pays: |_| true,
    any_rows: true,
    reads: ActsForm::F32,
    chunk: |s| chunk(s, 4),
    run: avx512,
};

pub(in super::super) static AVX2: LinearKernel = LinearKernel {
    name: "tiledot_avx2",
    takes: rows,
    pays: |_| true,
    any_rows: true,
    reads: ActsForm::F32,
    chunk: |s| chunk(s, 4),
    run: avx2,
};

impl Product {
    /// Rows of weights times f32 activations.
    fn by_f32(work: &Work<'_>) -> Product {
        let &Work { n, k, out, ldo, .. } = work;
        let (w, x) = (work.w.as_ptr(), work.x.f32().as_ptr().cast());
        Product { w, n, k, x, x_stride: 4 * k, m: work.x.m(), out, ldo }
    }
}

/// bf16 weights times bf16 activations.
///
/// # Safety
/// The CPU has AVX-512 F/BW/DQ/VL and BF16; the work's weights are rows of bf16, its activations bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn avx512_bf16(work: &Work<'_>) {
    let x = &work.x;
    let x = (x.bf16().as_ptr().cast::<u8>(), 2 * x.bf16_stride());
    // SAFETY: the caller's contract.
    unsafe { gemm::<Bf16Pairs, 4>(&Product { x: x.0, x_stride: x.1, ..Product::by_f32(work) }) }
}

/// Float weights times f32 activations.
///
/// # Safety
/// The CPU has AVX-512 F/BW/DQ/VL; the work's weights are rows of a float type.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")]
unsafe fn avx512(work: &Work<'_>) {
    let job = Product::by_f32(work);
    // SAFETY: the caller's contract.
    unsafe {
        match work.dtype {
            DType::F32 => gemm::<F32Zmm, 4>(&job),
            DType::F16 => gemm::<F16Zmm, 4>(&job),
            DType::BF16 => gemm::<Bf16Zmm, 4>(&job),
            dtype => unreachable!("{dtype} is not a float type"),
        }
    }
}

/// Float weights times f32 activations.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; the work's weights are rows of a float type.
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn avx2(work: &Work<'_>) {
    let job = Product::by_f32(work);
    // SAFETY: the caller's contract.
    unsafe {
        match work.dtype {
            DType::F32 => gemm::<F32Ymm, 2>(&job),
            DType::F16 => gemm::<F16Ymm, 2>(&job),
            DType::BF16 => gemm::<Bf16Ymm, 2>(&job),
            dtype => unreachable!("{dtype} is not a float type"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::acts::Acts;
    use super::*;
    use crate::host::Pool;
    use crate::simd::tuning::Tuning;
    use crate::simd::{Isa, Kernels};

    /// Includes the kernels that are not chosen on this machine. Inputs are small integers, exact in every type and in
    /// every order, so only a wrong element can differ.
    #[test]
    fn every_kernel_multiplies_the_elements_it_should() {
        let (caps, pool) = (Caps::get(), Pool::new(1));
        for (m, n, k) in
            [(1, 1, 1), (2, 3, 33), (5, 9, 64), (6, 4, 95), (7, 8, 130), (13, 6, 257), (19, 5, 40)]
        {
            let w: Vec<f32> = (0..n * k).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
            let x: Vec<f32> = (0..m * k).map(|i| (i * 5 % 11) as f32 - 5.0).collect();
            let values = (&w, &x);
            let bits = |x: &[f32], dtype: DType| -> Vec<u8> {
                let one = |&x: &f32| match dtype {
                    DType::F32 => x.to_le_bytes().to_vec(),
                    DType::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                    _ => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                };
                x.iter().flat_map(one).collect()
            };
            for (kernel, dtype) in [DType::F32, DType::F16, DType::BF16]
                .into_iter()
                .flat_map(|d| [(&AVX2, d), (&AVX512, d)])
                .chain([(&BF16, DType::BF16)])
            {
                let (has, isa) = match kernel.name {
                    "tiledot_avx2" => (caps.avx2, Isa::Avx2),
                    "tiledot_avx512" => (caps.avx512, Isa::Avx512),
                    _ => (caps.avx512 && caps.avx512_bf16, Isa::Avx512),
                };
                if !has || isa.missing().is_some() {
                    println!("skipped: {kernel}: this CPU has it not");
                    continue;
                }
                let w = bits(values.0, dtype);
                let (ldo, canary) = (n + 2, 0.5);
                let mut out = vec![canary; m * ldo];
                let mut acts = Acts::default();
                acts.reset(m, k).copy_from_slice(values.1);
                let x = acts.input(&pool, Kernels::for_isa(isa), kernel.need(false));
                let tuning = &Tuning::current().linear(dtype);
                let work = Work { dtype, w: &w, n, k, x, plane: 0, out: out.as_mut_ptr(), ldo, tuning };
                // SAFETY: the CPU was asked; the matrices are the vectors above.
                unsafe { (kernel.run)(&work) };
                for (i, got) in out.iter().enumerate() {
                    let (t, r) = (i / ldo, i % ldo);
                    let product = |j: usize| values.0[r * k + j] * values.1[t * k + j];
                    let want = if r < n { (0..k).map(product).sum() } else { canary };
                    assert_eq!(*got, want, "{kernel} {dtype} M={m} N={n} K={k}: token {t}, row {r}");
                }
            }
        }
    }
}
