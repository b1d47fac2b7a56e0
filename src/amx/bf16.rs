//! bf16 matrix product on tiles: `C[M,N] = X[M,K] * W[N,K]^T`, f32 out (AMX-BF16).
//!
//! ```text
//! layout     X as A blocks, W as panels of 16 rows (see pack.rs): every tile is one contiguous KiB
//! tile       32x32 (2 A x 2 B); 16x64 (1 A x 4 B) for a single A block, 64x16 for four of them (block.rs)
//! blocking   K in chunks of at most 64 steps, C adding up in `out` between them; a pass has as many rows as make 1 MiB
//!            of A over the chunk, which stays in L2 while all columns are processed; per pair of panels one call for
//!            each 32 rows over the whole chunk, with C in tiles from its first step to its last
//! pipeline   a quarter of a tile of the next pair of panels is made after each K step (make.rs): packed pairs are
//!            double buffered in L2, 128 KiB each; with up to 32 rows, of some panels 64, a ring of 8 steps in L1.
//!            Weights are prefetched only for short K, whose rows end before the hardware prefetcher has started
//!            (otherwise it does better)
//! C          by non-temporal stores where C is larger than L2
//! bound      4 KiB of tile loads a step from L2 (measured on a Sapphire Rapids: 1.41-1.45 of 2.3 TFLOP/s a thread)
//! measured   on a Sapphire Rapids, as a C program of this blocking: 512 x 8192 x 2048 0.925 TFLOP/s a thread where the
//!            previous design reached 0.513 and MKL 0.55-0.57 (decision 0023); in whole models docs/performance.md
//! error      f32 accumulation: even and odd k of each step of 32 are summed separately, then joined, then added.
//!            Chunks store and reload exact f32, and all kernels add K steps in order, so a row's bits
//!            depend neither on M nor on which kernel ran
//! refs       Intel Optimization Reference Manual ch. 20 (2x2 blocking, tile latencies); Goto & van de Geijn 2008
//! ```

use std::arch::x86_64::{__m512, _mm_sfence, _mm512_loadu_ps, _mm512_stream_ps};
use std::ops::Range;

use super::TILE_BYTES;
use super::block::{
    Block, rows16_cols16, rows16_cols32, rows16_cols64, rows32_cols16, rows32_cols32, rows64_cols16,
};
use super::make::{Groups, Maker, RING, RING_LEAD};
use super::pack::{TILE_LEN, a_blocks_len, panel_len};
use super::scratch;
use super::session::{Session, Shapes};

pub use super::make::Panels;

/// Most K steps (of 32) per chunk: a pair of panels is 128 KiB. Measured against 32 (-5%) and 128 (-12%).
const CHUNK_STEPS: usize = 64;
/// Bytes of A per pass. They stay in L2 (2 MiB) beside two pairs of panels and streamed data. Measured against 0.75 MiB
/// (equal, or -8%), 1.5 (-12%) and 2 (-28%).
const PASS_BYTES: usize = 1 << 20;
/// Number of A blocks of a pass from which its chunk of A is copied to contiguous memory: this many blocks at distances
/// of a whole K may fall into the same few sets of L2.
const COPY_BLOCKS: usize = 5;
/// Chunks of K of at most this many steps end before the hardware prefetchers start, so their weights are prefetched.
const SHORT_STEPS: usize = 32;
/// Bytes of C above which non-temporal stores bypass the caches: below, what reads C next finds it there. Measured on a Sapphire Rapids
/// with 2 MiB of L2 a core, a prompt of 512: SmolLM2's 3 MiB a product are 1.10 x as fast stored as usual, the 4 MiB of a model of 1.2 G
/// parameters as fast, its 16 MiB 0.92 x.
const STREAM_BYTES: usize = 6 << 20;

/// Panels that already lie in memory.
struct Stored {
    panels: *const u16,
    steps: usize,
}

impl Panels for Stored {
    fn stored(&self, panel: usize, step: usize) -> Option<*const u16> {
        Some(self.panels.wrapping_add((panel * self.steps + step) * TILE_LEN))
    }
    unsafe fn fill(&self, _: usize, _: usize, _: *mut u16) {
        unreachable!("stored panels are read where they are")
    }
    unsafe fn quarter(&self, _: usize, _: usize, _: usize, _: *mut u16) {
        unreachable!("stored panels are read where they are")
    }
    fn prefetch(&self, _: usize, _: usize, _: usize) {}
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
    let panels = Stored { panels: panels.as_ptr(), steps: k.div_ceil(32) };
    // SAFETY: the asserts above establish the required contract.
    unsafe { gemm_bf16_raw(session, m, n, k, a_blocks.as_ptr(), &panels, out.as_mut_ptr(), ldc) }
}

/// [`gemm_bf16`] for panels that are made during the product, and for workers that write different columns of one
/// matrix, which two slices cannot express.
///
/// # Safety
/// `a` points to A blocks of `m` x `k`, `panels` has `ceil(n/16)` panels of `ceil(k/32)` steps, and `out` points
/// to `m` rows of `n` values, `ldc` apart, that nothing else accesses meanwhile.
#[allow(clippy::too_many_arguments)]
pub unsafe fn gemm_bf16_raw(
    session: &mut Session,
    m: usize,
    n: usize,
    k: usize,
    a: *const u16,
    panels: &dyn Panels,
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
    session.renew(&Shapes::SEVEN);
    let (steps, blocks) = (k.div_ceil(32), m.div_ceil(16));
    let fits = |steps: usize| blocks * steps * TILE_BYTES <= PASS_BYTES;
    // A ring needs no room in L2, so a chunk may cover all of K if A fits.
    let tall = blocks == 4 && fits(steps) && panels.ring_of_64();
    let longest = if tall || blocks <= 2 && fits(steps) { steps } else { CHUNK_STEPS };
    let chunks = steps.div_ceil(longest);
    let chunk_steps = steps.div_ceil(chunks);
    let passes = blocks.div_ceil((PASS_BYTES / TILE_BYTES / chunk_steps / 2 * 2).max(2));
    let pass_blocks = blocks.div_ceil(passes).next_multiple_of(2);
    let stream = chunks == 1
        && m * ldc * size_of::<f32>() > STREAM_BYTES
        && ldc.is_multiple_of(16)
        && out.addr().is_multiple_of(64)
        && is_x86_feature_detected!("avx512f");
    let problem = Problem { m, n, steps, tall, stream, a, panels, out, ldc };
    let copied = if chunks > 1 && pass_blocks >= COPY_BLOCKS { pass_blocks * chunk_steps } else { 0 };
    let buffer = (4 * chunk_steps).max(4 * RING);
    scratch::with((copied + buffer) * TILE_BYTES + C_LEN * size_of::<f32>(), |base| {
        let at = |tiles: usize| base.wrapping_add(tiles * TILE_BYTES);
        let scratch = Scratch {
            a: at(0).cast(),
            copy: copied > 0,
            b: at(copied).cast(),
            c: at(copied + buffer).cast(),
        };
        for chunk in 0..chunks {
            let steps = steps * chunk / chunks..steps * (chunk + 1) / chunks;
            for first in (0..blocks).step_by(pass_blocks) {
                let rows = first..blocks.min(first + pass_blocks);
                // SAFETY: shapes SEVEN are loaded; the caller's promises are the problem's; rows and steps exist.
                unsafe { problem.pass(rows, steps.clone(), &scratch) };
            }
        }
    });
    if stream {
        // SAFETY: SSE. Orders the streamed values before the store that publishes them.
        unsafe { _mm_sfence() };
    }
}

/// Values of C in a 32x32, 16x64 or 64x16 block.
const C_LEN: usize = 1024;

/// A thread's working memory: a contiguous copy of a chunk of A if needed, tiles of weights, a block of C.
struct Scratch {
    a: *mut u16,
    copy: bool,
    b: *mut u16,
    c: *mut f32,
}

struct Problem<'a> {
    m: usize,
    n: usize,
    /// K steps of 32.
    steps: usize,
    /// Whether all rows are one block.
    tall: bool,
    /// Whether C is stored with non-temporal stores.
    stream: bool,
    a: *const u16,
    panels: &'a dyn Panels,
    out: *mut f32,
    ldc: usize,
}

impl Problem<'_> {
    /// Multiplies A blocks `rows` by all panels over `steps` of K.
    ///
    /// # Safety
    /// Shapes SEVEN are loaded, the pointers hold what [`gemm_bf16_raw`] asks for, rows and steps exist; the scratch has
    /// room for these rows and steps.
    unsafe fn pass(&self, rows: Range<usize>, steps: Range<usize>, scratch: &Scratch) {
        let len = steps.len();
        // The first tile of a block of A, and the distance to the next block's.
        let (a, a_ld) = if scratch.copy {
            for (i, b) in rows.clone().enumerate() {
                let from = self.a.wrapping_add((b * self.steps + steps.start) * TILE_LEN);
                // SAFETY: `len` tiles of block `b`; room for all of the pass.
                unsafe {
                    scratch.a.add(i * len * TILE_LEN).copy_from_nonoverlapping(from, len * TILE_LEN);
                }
            }
            (scratch.a.cast_const(), len)
        } else {
            (self.a.wrapping_add((rows.start * self.steps + steps.start) * TILE_LEN), self.steps)
        };
        // The 16-row blocks and the panels of a block of C.
        let (most, wide) = match rows.len() {
            1 => (1, 4),
            _ if self.tall => (4, 1),
            _ => (2, 2),
        };
        let calls = rows.len().div_ceil(most);
        let groups = Groups { panels: self.n.div_ceil(16), wide };
        let (lead, slots) = if calls == 1 { (RING_LEAD, RING) } else { (len, 2 * len) };
        let short = len == self.steps && len <= SHORT_STEPS;
        let buffer = (scratch.b, slots);
        // SAFETY: all panels have these steps; the scratch has room for two pairs of panels, and for a ring of four.
        let mut maker = unsafe { Maker::new(self.panels, groups, steps.clone(), calls, buffer, short) };
        maker.begin(lead);
        let mut slot = 0;
        for group in 0..groups.count() {
            let (panel, wide) = groups.get(group);
            for (call, row) in rows.clone().step_by(most).enumerate() {
                let high = (rows.end - row).min(most);
                let tile = |i: usize| a.wrapping_add((most * call + i) * a_ld * TILE_LEN).cast::<u8>();
                let made = |i: usize| {
                    scratch.b.wrapping_add((slot * groups.wide + i) * TILE_LEN).cast::<u8>().cast_const()
                };
                let stored = self.panels.stored(panel, steps.start).is_some();
                let b = |i: usize| match self.panels.stored(panel + i.min(wide - 1), steps.start) {
                    Some(tiles) => tiles.cast::<u8>(),
                    None => made(i),
                };
                let block = Block {
                    steps: len,
                    a: [tile(0), tile(1), tile(2), tile(3)],
                    b: [b(0), b(1), b(2), b(3)],
                    b_step: if stored { TILE_BYTES } else { groups.wide * TILE_BYTES },
                    turn: if stored { usize::MAX } else { slots - slot },
                    ring: slots,
                    from: std::ptr::null(),
                    from_ld: 0,
                    to: self.out.wrapping_add(row * 16 * self.ldc + panel * 16),
                    to_ld: self.ldc,
                };
                // SAFETY: the block's tiles exist: those of its group were made before or during the multiplication of
                // the previous group; rows and columns are the caller's.
                unsafe {
                    self.multiply(block, (row, high), (panel, wide), steps.start > 0, scratch.c, &mut maker)
                };
            }
            slot = (slot + len) % slots;
        }
    }

    /// Computes a block of C whose `to` lies in the matrix: directly if it is whole, through `c` at edges and where it
    /// is streamed. With `more` it adds to the existing values.
    ///
    /// # Safety
    /// As [`Problem::pass`]; (high, wide) is (1..=2, 1..=2), (1, 4) or (4, 1).
    unsafe fn multiply(
        &self,
        mut block: Block,
        (row, high): (usize, usize),
        (panel, wide): (usize, usize),
        more: bool,
        c: *mut f32,
        maker: &mut Maker<'_>,
    ) {
        let (to, ld) = (block.to, wide * 16);
        let (rows, cols) = ((self.m - row * 16).min(high * 16), (self.n - panel * 16).min(ld));
        let whole = rows == high * 16 && cols == ld;
        if !whole || self.stream {
            (block.to, block.to_ld) = (c, ld);
        }
        // SAFETY: SEVEN is loaded; `out` has these rows and columns, `c` a whole block.
        unsafe {
            if more {
                if !whole {
                    (0..rows)
                        .for_each(|r| c.add(r * ld).copy_from_nonoverlapping(to.add(r * self.ldc), cols));
                }
                (block.from, block.from_ld) = (block.to.cast_const(), block.to_ld);
            }
            match (high, wide) {
                (4, _) => rows64_cols16(&block, maker),
                (2, 2) => rows32_cols32(&block, maker),
                (2, _) => rows32_cols16(&block, maker),
                (_, 4) => rows16_cols64(&block, maker),
                (_, 2) => rows16_cols32(&block, maker),
                _ => rows16_cols16(&block, maker),
            }
            if !whole {
                (0..rows).for_each(|r| to.add(r * self.ldc).copy_from_nonoverlapping(c.add(r * ld), cols));
            } else if self.stream {
                stream(c, rows, ld, to, self.ldc);
            }
        }
    }
}

/// Copies `rows` rows of `cols` values, dense in `c`, to rows `ldc` apart, with non-temporal stores.
///
/// # Safety
/// AVX-512 F; whole lines: `to` is a multiple of 64 bytes, `cols` and `ldc` of 16.
#[target_feature(enable = "avx512f")]
unsafe fn stream(c: *const f32, rows: usize, cols: usize, to: *mut f32, ldc: usize) {
    for r in 0..rows {
        for line in (0..cols).step_by(16) {
            // SAFETY: as promised.
            unsafe {
                let v: __m512 = _mm512_loadu_ps(c.add(r * cols + line));
                _mm512_stream_ps(to.add(r * ldc + line), v);
            }
        }
    }
}
