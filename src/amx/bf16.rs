//! bf16 matrix product on tiles: `C[M,N] = X[M,K] * W[N,K]^T`, f32 out (AMX-BF16).
//!
//! ```text
//! layout     X as A blocks, W as panels of 16 rows (see pack.rs): every tile is one contiguous KiB
//! tile       32x32 (2 A x 2 B) for M > 16; 16x64 (1 A x 4 B) for M <= 16
//! registers  tmm0-3 C, tmm4-5 A, tmm6-7 B (32x32); tmm0-3 C, tmm4 A, tmm5-7 B in turn (16x64); shapes FULL
//! blocking   a *round* is a pair of panels over a slab of K (at most 10 steps), times all A rows of a pass (512): the
//!            panels stay in L1, the A rows come from L2. If A's rows fit there (1 MiB) K is innermost; if not, a
//!            slab of A serves a strip of 256 columns, and C of the strip waits in scratch for the next slab
//! pipeline   panels are made (transposed, dequantised) for the next round in pieces between this round's calls,
//!            and the memory of the round after that is asked for at the same pace: each call leaves up to
//!            hundreds of cycles of products queued, beside which vector units and loads are free
//! bound      the tile unit: a K step of 32 is 4 products of 16 cycles, 64 in all (512 multiply-adds a cycle), against
//!            4 tile loads of 8; 2 KiB of them from L2, 32 bytes a cycle of 44. Few rows: memory, 12 cycles a line
//! measured   not measured: no AMX machine at hand. Predicted (scripts/mca --shapes, decision 0010): M >= 512 82% of
//!            the tile unit if the pipeline hides what it should, 46-55% if it hides nothing; M = 16..64 93-99% and
//!            56-72% of read bandwidth. Such loops were seen at 2.7 of 2.9 TFLOP/s a thread with one operand from L2
//! error      f32 accumulation: even and odd k of each step of 32 are summed apart, then joined, then added.
//!            Slabs store and reload exact f32, and all kernels add K steps in order, so a row's bits
//!            depend neither on M nor on which kernel ran
//! refs       Intel Optimization Reference Manual ch. 20 (2x2 blocking, tile latencies); Goto & van de Geijn 2008
//! ```

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::cell::RefCell;
use std::ops::Range;

use super::TILE_BYTES;
use super::microkernel::microkernel;
use super::pack::{TILE_LEN, a_blocks_len, panel_len};
use super::session::{Session, Shapes};

/// K steps (of 32) per slab, at most. Between two uses of a pair of panels in L1 pass the panels (2 KiB a step), the
/// A rows of a call (2 KiB a step) and a block of C: 10 steps fill 44 of 48 KiB.
const SLAB_STEPS: usize = 10;
/// A blocks (of 16 rows) per pass over the weights.
const PASS_BLOCKS: usize = 32;
/// Panels (of 16 columns) whose C (512 KiB for 512 rows) stays in L2 across slabs, when A does not: A then
/// crosses from L3 once per 256 columns, 4 bytes a cycle of about 10.
pub const STRIP_PANELS: usize = 16;
/// Bytes of A that stay in L2 (2 MiB) beside what streams past.
const A_NEAR: usize = 1 << 20;

microkernel! {
    /// 32 rows x 32 columns.
    gemm_bf16_32x32(a0 a1; b0 b1; "1024") -> f32,
    rows 0 from0 to0, 16 from1 to1;
    c "0" in from0 to0 + "0", c "1" in from0 to0 + "64", c "2" in from1 to1 + "0", c "3" in from1 to1 + "64";
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
    rows 0 from0 to0, 16 from1 to1;
    c "0" in from0 to0 + "0", c "2" in from1 to1 + "0";
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
    rows 0 from0 to0;
    c "0" in from0 to0 + "0", c "1" in from0 to0 + "64";
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
    rows 0 from0 to0;
    c "0" in from0 to0 + "0";
    step
        "tileloadd tmm4, [{a0} + {s}*1]",
        "tileloadd tmm6, [{b0} + {s}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
}

microkernel! {
    /// 16 rows x 64 columns: four chains, where there is one A block only.
    gemm_bf16_16x64(a0; b0 b1 b2 b3; "1024") -> f32,
    rows 0 from0 to0;
    c "0" in from0 to0 + "0", c "1" in from0 to0 + "64", c "2" in from0 to0 + "128", c "3" in from0 to0 + "192";
    step
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

/// Where B tiles come from.
pub trait Panels {
    /// Tile `step` of panel `panel`, if the panel lies in memory as tiles, one after the other.
    fn stored(&self, panel: usize, step: usize) -> Option<*const u16>;

    /// Writes the tiles of `steps` of `panel` (16 rows of W, 32 of K each) to `out`, as
    /// [`pack_panel_bf16`](super::pack::pack_panel_bf16) lays them out.
    ///
    /// # Safety
    /// The panel has these steps, and `out` room for a KiB each.
    unsafe fn fill(&self, panel: usize, steps: Range<usize>, out: *mut u16);

    /// Asks for the memory that [`Panels::fill`] will read.
    fn prefetch(&self, panel: usize, steps: Range<usize>);
}

/// Panels that were made before.
struct Stored {
    panels: *const u16,
    steps: usize,
}

impl Panels for Stored {
    fn stored(&self, panel: usize, step: usize) -> Option<*const u16> {
        Some(self.panels.wrapping_add((panel * self.steps + step) * TILE_LEN))
    }
    unsafe fn fill(&self, _: usize, _: Range<usize>, _: *mut u16) {
        unreachable!("stored panels are read where they are")
    }
    fn prefetch(&self, _: usize, _: Range<usize>) {}
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
    // SAFETY: the asserts above are the promises asked for.
    unsafe { gemm_bf16_raw(session, m, n, k, a_blocks.as_ptr(), &panels, out.as_mut_ptr(), ldc) }
}

/// [`gemm_bf16`] for panels that are made on the way, and for workers that write different columns of one
/// matrix, which no two slices can express.
///
/// # Safety
/// `a` points to A blocks of `m` x `k`, `panels` has `ceil(n/16)` panels of `ceil(k/32)` steps, and `out` points
/// to `m` rows of `n` values, `ldc` apart, that nobody else accesses meanwhile.
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
    session.load(&Shapes::FULL);
    let (steps, blocks) = (k.div_ceil(32), m.div_ceil(16));
    let wide = if blocks == 1 { 4 } else { 2 };
    let near = blocks.min(PASS_BLOCKS) * steps * TILE_BYTES <= A_NEAR;
    let problem = Problem { m, n, steps, wide, near, a, panels, out, ldc };
    for first in (0..blocks).step_by(PASS_BLOCKS) {
        let rows = first..blocks.min(first + PASS_BLOCKS);
        let columns = n.div_ceil(16);
        let strip = if near { columns } else { STRIP_PANELS };
        for column in (0..columns).step_by(strip) {
            // SAFETY: shapes FULL are loaded; the caller's promises are the problem's; rows and columns exist.
            unsafe { problem.strip(rows.clone(), column..columns.min(column + strip)) };
        }
    }
}

/// A line of scratch.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

thread_local! {
    /// Two rounds of panels, then blocks of C.
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Elements of C in a 32x32 or 16x64 block.
const C_LEN: usize = 1024;

struct Problem<'a> {
    m: usize,
    n: usize,
    /// K steps of 32.
    steps: usize,
    /// Panels of a round: four for a lone A block, otherwise two.
    wide: usize,
    /// A's rows of a pass stay in L2: K innermost.
    near: bool,
    a: *const u16,
    panels: &'a dyn Panels,
    out: *mut f32,
    ldc: usize,
}

/// What is multiplied between two changes of panels: some panels over one slab of K, with all A blocks of the pass.
struct Round {
    panel: usize,
    wide: usize,
    steps: Range<usize>,
    /// Index of the column group in its strip.
    column: usize,
    slab: usize,
}

impl Round {
    fn tiles(&self) -> usize {
        self.wide * self.steps.len()
    }

    /// The tiles `units` of this round, counted along one panel after the other: (panel, steps, first unit).
    fn each(&self, units: Range<usize>, mut f: impl FnMut(usize, Range<usize>, usize)) {
        let steps = self.steps.len();
        let mut u = units.start;
        while u < units.end {
            let (panel, step) = (u / steps, u % steps);
            let n = (steps - step).min(units.end - u);
            f(self.panel + panel, self.steps.start + step..self.steps.start + step + n, u);
            u += n;
        }
    }
}

impl Problem<'_> {
    /// A blocks `rows` times panels `columns`.
    ///
    /// # Safety
    /// Shapes FULL are loaded, the pointers hold what [`gemm_bf16_raw`] asks for, rows and columns exist.
    unsafe fn strip(&self, rows: Range<usize>, columns: Range<usize>) {
        let slabs = self.steps.div_ceil(SLAB_STEPS);
        let longest = self.steps.div_ceil(slabs);
        let high = rows.len().min(2);
        let calls = rows.len().div_ceil(2);
        let groups = group_count(columns.len(), self.wide);
        // C between slabs: of one group of columns if K is innermost, else of the strip.
        let c_blocks = calls * if self.near { 1 } else { groups };
        let panel_floats = self.wide * longest * TILE_LEN / 2;
        let round = |i: usize| {
            let (column, slab) = if self.near { (i / slabs, i % slabs) } else { (i % groups, i / groups) };
            let (first, wide) = group(columns.len(), self.wide, column);
            let steps = self.steps * slab / slabs..self.steps * (slab + 1) / slabs;
            Round { panel: columns.start + first, wide, steps, column, slab }
        };
        let rounds = slabs * groups;
        let copies = self.panels.stored(columns.start, 0).is_none();
        SCRATCH.with_borrow_mut(|scratch| {
            let lines = (2 * panel_floats + c_blocks * C_LEN) / 16;
            if scratch.len() < lines {
                scratch.resize(lines, Line([0.0; 16]));
            }
            let base = scratch.as_mut_ptr().cast::<f32>();
            let buffer = |i: usize| base.wrapping_add(i % 2 * panel_floats).cast::<u16>();
            let c_block = |i: usize| base.wrapping_add(2 * panel_floats + i * C_LEN);
            let fill = |r: &Round, units: Range<usize>, to: *mut u16| {
                r.each(units, |p, steps, u| {
                    // SAFETY: a round has at most `wide` panels of `longest` steps; each buffer has room for them.
                    unsafe { self.panels.fill(p, steps, to.add(u * TILE_LEN)) }
                });
            };
            let prefetch =
                |r: &Round, units: Range<usize>| r.each(units, |p, s, _| self.panels.prefetch(p, s));
            let part = |r: &Round, call: usize| r.tiles() * call / calls..r.tiles() * (call + 1) / calls;
            if copies {
                let first = round(0);
                prefetch(&first, 0..first.tiles());
                if rounds > 1 {
                    prefetch(&round(1), 0..round(1).tiles());
                }
                fill(&first, 0..first.tiles(), buffer(0));
            }
            for i in 0..rounds {
                let now = round(i);
                let (next, after) = (round((i + 1).min(rounds - 1)), round((i + 2).min(rounds - 1)));
                for (call, b) in rows.clone().step_by(2).enumerate() {
                    let c = c_block(if self.near { call } else { now.column * calls + call });
                    // SAFETY: the round's panels are in the buffer; its blocks, panels and steps exist.
                    unsafe { self.multiply(b, high.min(rows.end - b), &now, buffer(i), c) };
                    // The tile unit has hundreds of cycles of products queued now, which the vector units and the
                    // load ports need not wait for.
                    if copies && i + 1 < rounds {
                        fill(&next, part(&next, call), buffer(i + 1));
                    }
                    if copies && i + 2 < rounds {
                        prefetch(&after, part(&after, call));
                    }
                    if !self.near && now.slab + 1 < slabs {
                        self.prefetch_a(b..rows.end.min(b + 2), &now, groups);
                    }
                }
            }
        });
    }

    /// Asks for this round's share of the next slab of A blocks, which come from L3.
    fn prefetch_a(&self, blocks: Range<usize>, now: &Round, groups: usize) {
        let next = now.steps.end..self.steps.min(now.steps.end + now.steps.len() + 1);
        let lines = next.len() * (TILE_BYTES / 64);
        for b in blocks {
            let from = self.a.wrapping_add((b * self.steps + next.start) * TILE_LEN);
            for line in lines * now.column / groups..lines * (now.column + 1) / groups {
                // SAFETY: prefetching any address is harmless.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line * 32).cast()) };
            }
        }
    }

    /// A blocks `b..b+high` times the panels of a round. Sums start at zero in the first slab, come from `c`
    /// in later ones, and go to `c`, after the last slab to `out`.
    ///
    /// # Safety
    /// Blocks, panels and steps are within the problem; (high, wide) is (1..=2, 1..=2) or (1, 4); `buffer` holds
    /// the round's panels unless they are stored; `c` is a scratch block, of these columns and rows.
    unsafe fn multiply(&self, b: usize, high: usize, r: &Round, buffer: *const u16, c: *mut f32) {
        let (row, col) = (b * 16, r.panel * 16);
        let rows = (self.m - row).min(high * 16);
        let cols = (self.n - col).min(r.wide * 16);
        let (first, steps) = (r.steps.start, r.steps.len());
        let a = |i: usize| self.a.wrapping_add(((b + i) * self.steps + first) * TILE_LEN).cast::<u8>();
        let w = |i: usize| match self.panels.stored(r.panel + i, first) {
            Some(tiles) => tiles.cast::<u8>(),
            None => buffer.wrapping_add(i * steps * TILE_LEN).cast::<u8>(),
        };
        let ld = r.wide * 16;
        let from = if first > 0 { c.cast_const() } else { std::ptr::null() };
        let to = self.out.wrapping_add(row * self.ldc + col);
        let last = r.steps.end == self.steps;
        let whole = rows == high * 16 && cols == ld;
        let (dst, dst_ld) = if last && whole { (to, self.ldc) } else { (c, ld) };
        // SAFETY: FULL shapes; sources have `steps` KiB from there on; `c` is a whole block of tiles, and so is
        // what `out` has from `to` on if all rows and columns exist.
        unsafe {
            match (high, r.wide) {
                (2, 2) => gemm_bf16_32x32(steps, a(0), a(1), w(0), w(1), from, ld, dst, dst_ld),
                (2, _) => gemm_bf16_32x16(steps, a(0), a(1), w(0), from, ld, dst, dst_ld),
                (_, 4) => gemm_bf16_16x64(steps, a(0), w(0), w(1), w(2), w(3), from, ld, dst, dst_ld),
                (_, 2) => gemm_bf16_16x32(steps, a(0), w(0), w(1), from, ld, dst, dst_ld),
                _ => gemm_bf16_16x16(steps, a(0), w(0), from, ld, dst, dst_ld),
            }
            // An edge: whole tiles went to scratch, and only what exists is copied.
            if last && !whole {
                for r in 0..rows {
                    std::ptr::copy_nonoverlapping(c.add(r * ld), to.add(r * self.ldc), cols);
                }
            }
        }
    }
}

/// How many groups of at most `wide` (a power of two) `panels` make, and which panels the one of index `i` has:
/// whole groups, then halves of them.
fn group_count(panels: usize, wide: usize) -> usize {
    panels / wide + (panels % wide).count_ones() as usize
}

/// See [`group_count`]: (first panel, panels).
fn group(panels: usize, wide: usize, i: usize) -> (usize, usize) {
    let whole = panels / wide;
    if i < whole {
        return (i * wide, wide);
    }
    let (mut first, mut rest) = (whole * wide, panels % wide);
    for _ in whole..i {
        let largest = 1 << rest.ilog2();
        (first, rest) = (first + largest, rest - largest);
    }
    (first, 1 << rest.ilog2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_all_panels_in_order() {
        for wide in [2, 4] {
            for panels in 1..20 {
                let mut at = 0;
                for i in 0..group_count(panels, wide) {
                    let (first, n) = group(panels, wide, i);
                    assert!(first == at && n <= wide && n.is_power_of_two(), "{panels} by {wide}: group {i}");
                    at += n;
                }
                assert_eq!(at, panels);
            }
        }
    }
}
