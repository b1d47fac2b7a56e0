//! bf16 linear of up to 16 tokens on tiles, rows of the file as the A operand: `y[M,N] = (W·xᵀ)ᵀ`.
//!
//! A tile load takes its 16 rows at any distance, so 16 rows of W are an A tile in place. Only the activations (once
//! per call) and each block of 16 x 16 results are transposed.
//!
//! layout     W `[n][k]` as in the file; activations as `[step][16 pairs of k][16 tokens][2]`, a B tile a step
//! tile       16 rows of W x 16 tokens; one accumulator over all of K
//! bound      memory. The products of a panel depend on each other: 52 cycles per KiB of W, 55 GB/s; a thread reads 15
//! order      k ascending, each step of 32 summed separately, then added: the bits of [`gemm_bf16`](crate::amx::bf16),
//!            because a product does not depend on which factor came first
//! measured   on a Sapphire Rapids, as a C program (decision 0025): 8192 x 2048, M = 16, 0.247 Tflop/s a thread, 15.5 GB/s,
//!            where tiles of transposed rows reach 0.19; contended 0.16-0.18 against 0.06-0.15. Prefetches of 512
//!            bytes: 0.23, contended 0.19. This code has run on emulated tiles only

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::kernel::{ActsForm, GROUP, LinearKernel, Work};
use super::transpose::transpose_tile;
use super::{panels as chunk, rows, session, tiles};
use crate::amx::TILE_BYTES;
use crate::amx::pack::TILE_LEN;
use crate::amx::scratch;
use crate::amx::session::{Session, Shapes};
use crate::tensor::DType;

/// Most tokens: the columns of a B tile.
const MAX_M: usize = 16;

/// The operands of a product.
struct Product {
    /// `n >= 16` consecutive rows of `k` bf16.
    w: *const u8,
    n: usize,
    k: usize,
    /// `m <= MAX_M` rows as A tiles of `k_padded` columns.
    x: *const u16,
    m: usize,
    k_padded: usize,
    out: *mut f32,
    ldo: usize,
}

/// A thread's memory.
struct Scratch {
    /// B tiles of the activations, one a step.
    b: *mut u16,
    /// A tiles of the steps for which W has no whole tile.
    edge: *mut u16,
    /// 16 x 16 results, and the same transposed.
    c: *mut f32,
    turned: *mut f32,
}

pub(in super::super) static KERNEL: LinearKernel = LinearKernel {
    name: "amx_rows_as_a",
    takes: |a| !a.packed && a.dtype == DType::BF16 && a.m <= MAX_M,
    pays: |_| true,
    any_rows: true,
    reads: ActsForm::FineTiles,
    chunk,
    run,
};

/// `out[t·ldo + r] = Σ_k w[r][k]·x[t][k]`.
///
/// # Safety
/// AMX and AVX-512 BF16 are usable; the work's weights are rows of bf16, its activations tiles of at most [`MAX_M`] tokens.
unsafe fn run(w: &Work<'_>) {
    if w.n < GROUP {
        // No tile is whole; this kernel gives the same bits. SAFETY: the caller's contract.
        return unsafe { rows::run(w) };
    }
    let (x, m, k_padded) = (tiles(w), w.x.m(), w.x.k_padded());
    let job = Product { w: w.w.as_ptr(), n: w.n, k: w.k, x, m, k_padded, out: w.out, ldo: w.ldo };
    // SAFETY: the caller's contract.
    unsafe { gemm(&mut session(), &job) }
}

/// [`run`] of one product.
///
/// # Safety
/// Tile instructions and AVX-512 F/BW/DQ/VL execute; `job` is as its fields say, `out` has `m` rows of `ldo >= n`.
unsafe fn gemm(session: &mut Session, job: &Product) {
    let steps = job.k_padded / 32;
    let whole = (job.k / 32).min(steps);
    session.renew(&Shapes::SEVEN);
    scratch::with((2 * steps - whole + 2) * TILE_BYTES, |base| {
        let at = |tiles: usize| base.wrapping_add(tiles * TILE_BYTES);
        let scratch = Scratch {
            b: at(0).cast(),
            edge: at(steps).cast(),
            c: at(2 * steps - whole).cast(),
            turned: at(2 * steps - whole + 1).cast(),
        };
        // SAFETY: the shapes are loaded, the scratch is as large as it says; the caller's contract.
        unsafe { panels(job, whole, steps, &scratch) };
    });
}

/// # Safety
/// As [`gemm`]; W has `whole` whole tiles of `steps`; [`Shapes::SEVEN`] is loaded.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn panels(job: &Product, whole: usize, steps: usize, scratch: &Scratch) {
    let stride = 2 * job.k;
    // SAFETY: 16 rows of W from `first` on, `whole` tiles wide, and what is left of them; tiles of the scratch; outputs as
    // the caller promises.
    unsafe {
        for step in 0..steps {
            transpose_tile(job.x.add(step * TILE_LEN).cast(), 64, scratch.b.add(step * TILE_LEN));
        }
        scratch.edge.write_bytes(0, (steps - whole) * TILE_LEN);
        for panel in 0..job.n.div_ceil(GROUP) {
            // The last panel overlaps the previous one if the rows are no multiple of 16.
            let first = (panel * GROUP).min(job.n - GROUP);
            let w = job.w.add(first * stride);
            for row in 0..GROUP {
                let from = w.add(row * stride + whole * 64);
                scratch.edge.cast::<u8>().add(row * 64).copy_from_nonoverlapping(from, stride - whole * 64);
            }
            product(w, stride, whole, scratch, steps - whole);
            transpose_tile(scratch.c.cast(), 64, scratch.turned.cast());
            for t in 0..job.m {
                let values = _mm512_loadu_ps(scratch.turned.add(t * 16));
                _mm512_storeu_ps(job.out.add(t * job.ldo + first), values);
            }
        }
    }
}

/// 16 rows of W at `w`, `stride` bytes apart, times all tokens: `whole` steps in place, `edge` steps from the scratch.
///
/// # Safety
/// The rows have `whole` tiles; `scratch` holds the B tiles of all steps; [`Shapes::SEVEN`] is loaded.
#[inline(always)]
unsafe fn product(w: *const u8, stride: usize, whole: usize, scratch: &Scratch, edge: usize) {
    // SAFETY: one block, so no tile outlives it; it reads the tiles that the caller promises and writes C of the scratch.
    unsafe {
        asm!(
            "tilezero tmm0",
            "test {whole}, {whole}",
            "jz 3f",
            "2:",
            "tileloadd tmm4, [{w} + {stride}*1]",
            "tileloadd tmm5, [{b} + {s}*1]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "add {w}, 64",
            "add {b}, 1024",
            "dec {whole}",
            "jnz 2b",
            "3:",
            "test {edge}, {edge}",
            "jz 5f",
            "4:",
            "tileloadd tmm4, [{e} + {s}*1]",
            "tileloadd tmm5, [{b} + {s}*1]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "add {e}, 1024",
            "add {b}, 1024",
            "dec {edge}",
            "jnz 4b",
            "5:",
            "tilestored [{c} + {s}*1], tmm0",
            w = inout(reg) w => _, stride = in(reg) stride, whole = inout(reg) whole => _,
            b = inout(reg) scratch.b => _, e = inout(reg) scratch.edge => _, edge = inout(reg) edge => _,
            c = in(reg) scratch.c, s = in(reg) 64usize,
            out("tmm0") _, out("tmm4") _, out("tmm5") _,
            options(nostack)
        );
    }
}
