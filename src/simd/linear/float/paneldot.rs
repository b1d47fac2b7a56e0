//! bf16 linear for a few tokens: dot products of weights that lie in tiles, 16 rows a line (AVX512_BF16).
//!
//!   y[t][n] = Σ_k w[n][k]·x[t][k]           x rounded to bf16, f32 accumulation
//!
//! layout     groups of 16 rows, `[k/2][16][2]` each: consecutive B tiles of AMX. A row is a lane, a line of memory a
//!            pair of k: against a broadcast pair of x it is one product, without a sum across lanes at the end
//! tile       4 groups x MT tokens (1, 2): four streams of memory, 4·MT chains of products
//! registers  8 accumulators + 1 line of weights; pairs of x are broadcast by the product's load
//! bound      memory: 2 bytes per weight
//! prefetch   into L1, [`AHEAD`] bytes ahead in each stream
//! error      x: at most 2^-8 relative; f16 weights, converted to bf16, the same; then f32, one chain of K/2 pairs,
//!            each rounded twice, with subnormals treated as zero

use std::arch::x86_64::*;

use super::super::kernel::{ActsForm, GROUP, LinearKernel, Shape, Work};
use super::FEW;

/// Groups of a tile.
const GROUPS: usize = 4;

/// Prefetch distance in bytes.
const AHEAD: usize = 1024;

/// Elements of a line: 16 rows of a pair.
const LINE: usize = 2 * GROUP;

/// The operands of a product.
#[derive(Clone, Copy)]
struct Product {
    /// Consecutive groups of `k` rounded up to 64.
    w: *const u16,
    /// Rows, in `ceil(n/16)` groups.
    n: usize,
    k: usize,
    /// Rows of bf16, `stride` apart, padded with zeros to a multiple of 64.
    x: *const u16,
    stride: usize,
    /// `m` rows of `ldo >= n`.
    out: *mut f32,
    ldo: usize,
}

/// `G` groups from group `g` on, `MT` tokens.
///
/// # Safety
/// The job's promises; the groups exist, `MT <= m`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile<const G: usize, const MT: usize>(job: &Product, g: usize) {
    let pairs = job.k.next_multiple_of(64) / 2;
    let w = job.w.wrapping_add(g * pairs * LINE);
    // SAFETY: each group has `pairs` lines, each row of x as many pairs; rows beyond n are masked off. A prefetch never faults.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); MT]; G];
        for p in 0..pairs {
            let x: [*const i32; MT] = std::array::from_fn(|t| job.x.add(t * job.stride).cast::<i32>().add(p));
            for (i, acc) in acc.iter_mut().enumerate() {
                let line = w.add((i * pairs + p) * LINE);
                _mm_prefetch::<_MM_HINT_T0>(line.cast::<i8>().wrapping_add(AHEAD));
                let line = std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(line.cast()));
                for t in 0..MT {
                    let x = _mm512_set1_epi32(x[t].read_unaligned());
                    acc[t] = _mm512_dpbf16_ps(acc[t], line, std::mem::transmute::<__m512i, __m512bh>(x));
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            let row = (g + i) * GROUP;
            let lanes = ((1u32 << (job.n - row).min(GROUP)) - 1) as __mmask16;
            for (t, &acc) in acc.iter().enumerate() {
                _mm512_mask_storeu_ps(job.out.add(t * job.ldo + row), lanes, acc);
            }
        }
    }
}

/// # Safety
/// As [`gemm`]; `MT == m`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn groups<const MT: usize>(job: &Product) {
    let groups = job.n.div_ceil(GROUP);
    let mut g = 0;
    // SAFETY: the groups of a tile exist.
    unsafe {
        while g + GROUPS <= groups {
            tile::<GROUPS, MT>(job, g);
            g += GROUPS;
        }
        while g < groups {
            tile::<1, MT>(job, g);
            g += 1;
        }
    }
}

/// Groups per chunk: whole tiles, and long runs of memory.
fn chunk(s: &Shape<'_>) -> usize {
    let whole = s.of_bytes(s.tuning.chunk_bytes).next_multiple_of(GROUPS);
    whole.min(s.groups().div_ceil(2 * s.threads)).max(1)
}

pub(in super::super) static KERNEL: LinearKernel = LinearKernel {
    name: "paneldot",
    takes: |a| a.packed && !a.dtype.is_quantised() && a.m <= FEW,
    pays: |_| true,
    any_rows: false,
    reads: ActsForm::Bf16,
    chunk,
    run,
};

/// `out[t·ldo + r] = Σ w[r][k]·x[t][k]`. A row's bits depend neither on the tile it is in nor on how many tokens there are.
///
/// # Safety
/// The CPU has AVX512_BF16; the work's weights are groups of tiles, its activations bf16, its tokens one or two.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn run(work: &Work<'_>) {
    let &Work { n, k, out, ldo, .. } = work;
    let (x, stride, m) = (work.x.bf16().as_ptr(), work.x.bf16_stride(), work.x.m());
    let job = Product { w: work.w.as_ptr().cast(), n, k, x, stride, out, ldo };
    // SAFETY: the caller's contract.
    unsafe {
        match m {
            1 => groups::<1>(&job),
            2 => groups::<2>(&job),
            _ => unreachable!("{m} tokens"),
        }
    }
}
