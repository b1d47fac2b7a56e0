//! bf16 matrix product on tiles: `C[M,N] = X[M,K] * W[N,K]^T`, f32 out (AMX-BF16).
//!
//! ```text
//! layout     X as A blocks, W as panels of 16 rows (see pack.rs): every tile is one contiguous KiB
//! tile       32x32 (2 A x 2 B) for M > 16; 16x64 (1 A x 4 B) for M <= 16, where weights stream
//! registers  tmm0-3 C, tmm4-5 A, tmm6-7 B (32x32); tmm0-3 C, tmm4 A, tmm5-7 B in turn (16x64); shapes FULL
//! bound      32x32: the tile unit. A K step of 32 is 4 products of 16 cycles, 64 in all (512 multiply-adds a
//!            cycle), against 4 tile loads of 8 cycles each when they hit L1
//!            16x64: memory. 4 KiB of weights per 64 cycles is more than L2 delivers (48 bytes a cycle)
//! blocking   K in slabs of 18 steps: a pair of panels is 36 KiB and stays in L1 while the A rows (512 x 576
//!            bf16 = 576 KiB) pass from L2; 256 columns of C (512 KiB of f32) stay in L2 across slabs
//! measured   not measured: no AMX machine at hand. Predicted: 2x2 blocking issues 64 cycles of products and
//!            32 of loads per step, so about the 97% of tile peak that loads from L1 leave (2.8 of 2.9 TFLOP/s
//!            seen with such blocks on Sapphire Rapids), less one load and store of C per slab: 4 x 24
//!            cycles in 18 x 64 = 8%, partly hidden; so 85-95%. M <= 16: DRAM bandwidth
//! error      f32 accumulation: even and odd k of each step of 32 are summed apart, then joined, then added.
//!            Slabs store and reload exact f32, and all kernels add K steps in order, so a row's bits
//!            depend neither on M nor on which kernel ran
//! refs       Intel Optimization Reference Manual ch. 20 (2x2 blocking, tile latencies); Goto & van de Geijn 2008
//! ```

use super::microkernel::microkernel;
use super::pack::{TILE_LEN, a_blocks_len, panel_len};
use super::session::{Session, Shapes};

/// K steps (of 32) per slab.
const SLAB_STEPS: usize = 18;
/// A blocks (of 16 rows) per pass over the weights.
const PASS_BLOCKS: usize = 32;
/// Panels (of 16 columns) whose C stays in L2 across slabs.
const STRIP_PANELS: usize = 16;

microkernel! {
    /// 32 rows x 32 columns.
    gemm_bf16_32x32(a0 a1; b0 b1; "1024") -> f32,
    rows c0 = 0, c1 = 16;
    c "0" in c0 + "0", c "1" in c0 + "64", c "2" in c1 + "0", c "3" in c1 + "64";
    // Each load stands two products before its use is due; the four accumulators are four independent
    // chains, so a product (latency 52) never waits for the last one of its chain (64 cycles ago).
    step
        "tileloadd tmm6, [{b0} + {s}*1]",
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b1} + {s}*1]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a1} + {s}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm3, tmm5, tmm7",
}

microkernel! {
    /// 32 rows x 16 columns: the last panel of an odd number.
    gemm_bf16_32x16(a0 a1; b0; "1024") -> f32,
    rows c0 = 0, c1 = 16;
    c "0" in c0 + "0", c "2" in c1 + "0";
    step
        "tileloadd tmm6, [{b0} + {s}*1]",
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm5, [{a1} + {s}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
}

microkernel! {
    /// 16 rows x 32 columns: the last A block of an odd number.
    gemm_bf16_16x32(a0; b0 b1; "1024") -> f32,
    rows c0 = 0;
    c "0" in c0 + "0", c "1" in c0 + "64";
    step
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tileloadd tmm6, [{b0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b1} + {s}*1]",
        "tdpbf16ps tmm1, tmm4, tmm7",
}

microkernel! {
    /// 16 rows x 16 columns.
    gemm_bf16_16x16(a0; b0; "1024") -> f32,
    rows c0 = 0;
    c "0" in c0 + "0";
    step
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tileloadd tmm6, [{b0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
}

/// Touches the tile two KiB ahead. The hardware's prefetcher stops at each 4 KiB page, which is every four
/// tiles of a stream; this carries a stream across. Past the end of a panel it touches the next one's.
macro_rules! prefetch_tile {
    ($b:literal) => {
        prefetch_tile!($b; "0" "64" "128" "192" "256" "320" "384" "448" "512" "576" "640" "704" "768" "832"
            "896" "960")
    };
    ($b:literal; $($line:literal)+) => {
        concat!($("prefetcht0 [{", $b, "} + 2048 + ", $line, "]\n"),+)
    };
}

microkernel! {
    /// 16 rows x 64 columns: few rows, so weights stream, in four streams at once.
    gemm_bf16_16x64(a0; b0 b1 b2 b3; "1024") -> f32,
    rows c0 = 0;
    c "0" in c0 + "0", c "1" in c0 + "64", c "2" in c0 + "128", c "3" in c0 + "192";
    step
        prefetch_tile!("b0"),
        prefetch_tile!("b1"),
        prefetch_tile!("b2"),
        prefetch_tile!("b3"),
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tileloadd tmm5, [{b0} + {s}*1]",
        "tileloadd tmm6, [{b1} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm5",
        "tileloadd tmm7, [{b2} + {s}*1]",
        "tdpbf16ps tmm1, tmm4, tmm6",
        "tileloadd tmm5, [{b3} + {s}*1]",
        "tdpbf16ps tmm2, tmm4, tmm7",
        "tdpbf16ps tmm3, tmm4, tmm5",
}

/// `out[m][n] = a * panels^T`, overwriting; rows of `out` are `ldc` apart.
///
/// `a_blocks` as [`pack_a_bf16`](super::pack::pack_a_bf16) makes them for `m` x `k`, `panels` as
/// [`pack_panel_bf16`](super::pack::pack_panel_bf16) does, `ceil(n/16)` of them one after the other.
///
/// # Panics
/// A slice is too short for the shape, or `ldc < n`.
#[allow(clippy::too_many_arguments)]
pub fn gemm_bf16(
    session: &mut Session,
    m: usize,
    n: usize,
    k: usize,
    a_blocks: &[u16],
    panels: &[u16],
    out: &mut [f32],
    ldc: usize,
) {
    assert!(ldc >= n, "gemm_bf16: rows of {n} values overlap at a distance of {ldc}");
    assert!(
        a_blocks.len() >= a_blocks_len(m, k),
        "gemm_bf16: {} elements are no A blocks of {m} x {k}",
        a_blocks.len()
    );
    assert!(
        panels.len() >= n.div_ceil(16) * panel_len(k),
        "gemm_bf16: {} elements are no panels of {n} x {k}",
        panels.len()
    );
    assert!(
        m == 0 || out.len() >= (m - 1) * ldc + n,
        "gemm_bf16: {} values hold no {m} x {n} (ld {ldc})",
        out.len()
    );
    // SAFETY: the asserts above are the promises asked for.
    unsafe { gemm_bf16_raw(session, m, n, k, a_blocks.as_ptr(), panels.as_ptr(), out.as_mut_ptr(), ldc) }
}

/// [`gemm_bf16`] for workers that write different columns of one matrix, which no two slices can express.
///
/// # Safety
/// `a` points to A blocks of `m` x `k`, `panels` to panels of `n` x `k`, and `out` to `m` rows of `n`
/// values, `ldc` apart, that nobody else accesses meanwhile.
#[allow(clippy::too_many_arguments)]
pub unsafe fn gemm_bf16_raw(
    session: &mut Session,
    m: usize,
    n: usize,
    k: usize,
    a: *const u16,
    panels: *const u16,
    out: *mut f32,
    ldc: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        for row in 0..m {
            // SAFETY: `n` values of each row are ours.
            unsafe { std::slice::from_raw_parts_mut(out.add(row * ldc), n) }.fill(0.0);
        }
        return;
    }
    session.load(&Shapes::FULL);
    let problem = Problem { m, n, steps: k.div_ceil(32), a, panels, out, ldc };
    // SAFETY: shapes FULL are loaded; the caller's promises are the problem's.
    unsafe {
        if m <= 16 {
            problem.stream();
        } else {
            problem.blocked();
        }
    }
}

struct Problem {
    m: usize,
    n: usize,
    /// K steps of 32.
    steps: usize,
    a: *const u16,
    panels: *const u16,
    out: *mut f32,
    ldc: usize,
}

impl Problem {
    /// At most 16 rows: one pass over the weights, four panels at a time.
    ///
    /// # Safety
    /// Shapes FULL are loaded, the pointers hold what [`gemm_bf16_raw`] asks for, `m <= 16`.
    unsafe fn stream(&self) {
        let panels = self.n.div_ceil(16);
        let mut p = 0;
        while p < panels {
            let width = match panels - p {
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
            // SAFETY: as promised to this function; panels p..p+width exist.
            unsafe { self.tile_block(0, 1, p, width, 0, self.steps) };
            p += width;
        }
    }

    /// More than 16 rows: slabs of K, so that what is reused stays near.
    ///
    /// # Safety
    /// As for [`Problem::stream`], with any `m`.
    unsafe fn blocked(&self) {
        let (blocks, panels) = (self.m.div_ceil(16), self.n.div_ceil(16));
        // With up to two A blocks nothing of W is reused: one slab, and W streams once.
        let slabs = if blocks <= 2 { 1 } else { self.steps.div_ceil(SLAB_STEPS) };
        let slab = self.steps.div_ceil(slabs);
        for pass in (0..blocks).step_by(PASS_BLOCKS) {
            let pass_end = blocks.min(pass + PASS_BLOCKS);
            for strip in (0..panels).step_by(STRIP_PANELS) {
                let strip_end = panels.min(strip + STRIP_PANELS);
                for first in (0..self.steps).step_by(slab) {
                    let last = self.steps.min(first + slab);
                    for p in (strip..strip_end).step_by(2) {
                        for b in (pass..pass_end).step_by(2) {
                            let (high, wide) = ((pass_end - b).min(2), (strip_end - p).min(2));
                            // SAFETY: blocks, panels and steps are within the problem.
                            unsafe { self.tile_block(b, high, p, wide, first, last) };
                        }
                    }
                }
            }
        }
    }

    /// A blocks `b..b+high` times panels `p..p+wide`, K steps `first..last`; adds to `out` if `first > 0`.
    ///
    /// # Safety
    /// Blocks, panels and steps are within the problem; (high, wide) is (1..=2, 1..=2) or (1, 4).
    unsafe fn tile_block(&self, b: usize, high: usize, p: usize, wide: usize, first: usize, last: usize) {
        let (row, col) = (b * 16, p * 16);
        let rows = (self.m - row).min(high * 16);
        let cols = (self.n - col).min(wide * 16);
        let steps = last - first;
        let add = first > 0;
        let a = |i: usize| self.a.wrapping_add(((b + i) * self.steps + first) * TILE_LEN).cast::<u8>();
        let w = |i: usize| self.panels.wrapping_add(((p + i) * self.steps + first) * TILE_LEN).cast::<u8>();
        let to = self.out.wrapping_add(row * self.ldc + col);
        // SAFETY: FULL shapes; sources have `steps` KiB from there on; `c` is a whole block of tiles, either in
        // `out` or in scratch.
        let run = |c: *mut f32, ld: usize| unsafe {
            match (high, wide) {
                (2, 2) => gemm_bf16_32x32(steps, a(0), a(1), w(0), w(1), c, ld, add),
                (2, _) => gemm_bf16_32x16(steps, a(0), a(1), w(0), c, ld, add),
                (_, 4) => gemm_bf16_16x64(steps, a(0), w(0), w(1), w(2), w(3), c, ld, add),
                (_, 2) => gemm_bf16_16x32(steps, a(0), w(0), w(1), c, ld, add),
                _ => gemm_bf16_16x16(steps, a(0), w(0), c, ld, add),
            }
        };
        if rows == high * 16 && cols == wide * 16 {
            return run(to, self.ldc);
        }
        // An edge: whole tiles go through scratch, and only what exists is copied.
        let mut scratch = Scratch([0.0; 1024]);
        let s = scratch.0.as_mut_ptr();
        let ld = wide * 16;
        // SAFETY: rows x cols values exist in `out` from `to` on, and in scratch (32 x 32 or 16 x 64).
        unsafe {
            if add {
                for r in 0..rows {
                    std::ptr::copy_nonoverlapping(to.add(r * self.ldc), s.add(r * ld), cols);
                }
            }
            run(s, ld);
            for r in 0..rows {
                std::ptr::copy_nonoverlapping(s.add(r * ld), to.add(r * self.ldc), cols);
            }
        }
    }
}

/// A block of C at an edge.
#[repr(C, align(64))]
struct Scratch([f32; 1024]);
