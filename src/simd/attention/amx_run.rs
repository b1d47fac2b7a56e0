//! Consecutive blocks on AMX tiles; the softmax of each block overlaps with the products of its neighbours.
//!
//! ```text
//! block j    S(j+1) = Q K(j+1)^T, then O = O·alpha(j-1) + P(j-1) V(j-1); between their steps the softmax of S(j), the
//!            factors alpha(j-1), and requests for K(j+2) and V(j), a few lines at a time
//! memory     two copies of S and P, 16 + 8 KiB for 32 rows; the factors of two blocks
//! order      each row's sums have the same bits as with the kernels called one after the other
//! bound      counted for a block of 32 x 64: softmax 915 cycles of ports 0 and 5 (exponentials and rounding 64 x 11, maxima 8 x
//!            13, sums and factors the rest), products 512 (head_dim 64) or 1024 (128), whichever is longer
//! measured   quiet, 2 threads: 0.64 TFLOP/s a thread at head_dim 128, 4096 tokens, some 6000 cycles a block; whole models lose 6% without
//!            the interleaving (decision 0057)
//! why inside the core looks 512 operations ahead. A step is 64 cycles of products; what stands after a whole call
//!            waits for it (decision 0023)
//! ```

use std::arch::x86_64::*;

use super::avx512_bf16::{dp, exp2};
use super::kernels::{MAX_ROWS, PAGES, Run, RunBlock, S_STRIDE};
use super::vector::BlockSimd;
use crate::amx::attention_steps::{COLUMNS, Pv, Qk};
use crate::cache::PAGE_TOKENS;
use crate::simd::avx512::Avx512;
use crate::simd::generic::activation::Softcap;
use crate::simd::generic::exp::exp_nonpositive;
use crate::simd::generic::map::Map1;
use crate::simd::vector::Simd;

/// Rows of a half: lanes of a vector.
const HALF: usize = 16;
/// Rows whose maxima are folded together.
const QUAD: usize = 4;

/// Approximate cycles of the parts of the softmax: the maxima of four rows, the factors of a half, P of a row.
const COST: [usize; 3] = [13, 16, 22];
/// Those of soft-capping four rows with their maxima: 32 instructions and two divisions for 16 scores.
const CAP_COST: usize = 16 * 32;

/// A line of 16 values.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([f32; 16]);

const ZERO: Line = Line([0.0; 16]);

/// Pieces of memory of equal size to prefetch, a few lines of each at a time.
struct Ahead {
    from: [*const u8; 2 * PAGES],
    pieces: usize,
    /// Lines of each piece, and lines per step.
    lines: usize,
    share: usize,
    asked: usize,
}

impl Ahead {
    /// Prefetches the keys and values over `steps`.
    fn new(
        head_dim: usize,
        k: Option<[*const u8; PAGES]>,
        v: Option<[*const u8; PAGES]>,
        steps: usize,
    ) -> Ahead {
        let mut from = [std::ptr::null(); 2 * PAGES];
        let mut pieces = 0;
        for page in [k, v].into_iter().flatten().flatten() {
            from[pieces] = page;
            pieces += 1;
        }
        let lines = PAGE_TOKENS * head_dim * 2 / 64;
        Ahead { from, pieces, lines, share: lines.div_ceil(steps.max(1)), asked: 0 }
    }

    /// Prefetches one step's share.
    #[inline(always)]
    fn ask(&mut self) {
        let to = (self.asked + self.share).min(self.lines);
        for from in &self.from[..self.pieces] {
            for line in self.asked..to {
                // SAFETY: prefetching any address is harmless.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line * 64).cast()) };
            }
        }
        self.asked = to;
    }
}

/// The softmax of a block, divided into parts. For each half of 16 rows: the maxima of four rows at a time, then the
/// factors, then P row by row.
struct Softmax<'a> {
    block: &'a RunBlock,
    rows: usize,
    softcap: Option<f32>,
    /// Cost of the maxima of four rows.
    maxima_cost: usize,
    s: *mut f32,
    p: *mut u16,
    m: *mut f32,
    sum: *mut [f32; 16],
    /// Out: [`MAX_ROWS`] factors.
    alpha: *mut f32,
    /// Maxima of four rows each: lane `i + 4·l` is a maximum of row `i`.
    top: [Line; HALF / QUAD],
    base: Line,
    half: usize,
    part: usize,
    /// Cost done so far, cost due by now, cost of all parts, and cost per step.
    done: usize,
    due: usize,
    cost: usize,
    share: usize,
    ahead: Ahead,
}

impl Softmax<'_> {
    /// The softmax of block `j`, spread over `steps` of products.
    fn new<'a>(run: &Run<'a>, j: usize, alpha: *mut f32, steps: usize, ahead: Ahead) -> Softmax<'a> {
        let halves = [run.rows.min(HALF), run.rows.saturating_sub(HALF)];
        let maxima_cost = COST[0] + run.softcap.map_or(0, |_| CAP_COST);
        let cost = halves.map(|rows| match rows {
            0 => 0,
            _ => rows.div_ceil(QUAD) * maxima_cost + COST[1] + rows * COST[2],
        });
        Softmax {
            block: &run.blocks[j],
            rows: run.rows,
            softcap: run.softcap,
            maxima_cost,
            s: s_of(run, j),
            p: p_of(run, j),
            m: run.m,
            sum: run.sum,
            alpha,
            top: [ZERO; 4],
            base: ZERO,
            half: 0,
            part: 0,
            done: 0,
            due: 0,
            cost: cost[0] + cost[1],
            share: (cost[0] + cost[1]).div_ceil(steps.max(1)),
            ahead,
        }
    }

    /// Does one step's share.
    ///
    /// # Safety
    /// The run's promises; S of this block is complete, P of two blocks before is no longer needed.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn advance(&mut self) {
        self.due = (self.due + self.share).min(self.cost);
        while self.done < self.due {
            // SAFETY: the caller's promise.
            unsafe { self.one() };
        }
        self.ahead.ask();
    }

    /// Does the next part.
    ///
    /// # Safety
    /// As [`Softmax::advance`]; there are parts left.
    #[inline(always)]
    unsafe fn one(&mut self) {
        let first = self.half * HALF;
        let rows = (self.rows - first).min(HALF);
        let quads = rows.div_ceil(QUAD);
        // SAFETY: the caller's promise; rows first..first + rows exist.
        unsafe {
            if self.part < quads {
                self.done += self.maxima_cost;
                self.maxima(first, self.part);
            } else if self.part == quads {
                self.done += COST[1];
                self.factors(first, rows);
            } else {
                self.done += COST[2];
                self.exponentials(first, self.part - quads - 1);
            }
        }
        self.part += 1;
        if self.part == quads + 1 + rows {
            (self.half, self.part) = (self.half + 1, 0);
        }
    }

    /// Groups of 16 tokens whose scores exist.
    #[inline(always)]
    fn groups(&self) -> usize {
        2 * self.block.pages()
    }

    /// The maxima of four rows; caps and masks their scores.
    ///
    /// # Safety
    /// As [`Softmax::advance`].
    #[inline(always)]
    unsafe fn maxima(&mut self, first: usize, quad: usize) {
        // SAFETY: rows exist (the last stands in for those that do not), S has the groups.
        unsafe {
            let simd = Avx512::token();
            // (Not by `from_fn`: its closure is no part of a function with these instructions.)
            let mut top = [simd.splat(f32::NEG_INFINITY); QUAD];
            for (i, top) in top.iter_mut().enumerate() {
                let row = (first + quad * QUAD + i).min(self.rows - 1);
                let s = self.s.add(row * S_STRIDE);
                if let Some(cap) = self.softcap.filter(|_| first + quad * QUAD + i == row) {
                    for g in 0..self.groups() {
                        let s = s.add(g * 16);
                        simd.store(s, Softcap(cap).apply(simd, simd.load(s)));
                    }
                }
                if self.block.whole {
                    for g in 0..2 * PAGES {
                        *top = simd.max(*top, simd.load(s.add(g * 16)));
                    }
                } else {
                    let (lo, hi) = self.block.visible[row];
                    for g in 0..self.groups() {
                        let x = simd.keep(simd.load(s.add(g * 16)), g * 16, lo as usize, hi as usize);
                        simd.store(s.add(g * 16), x);
                        *top = simd.max(*top, x);
                    }
                }
            }
            // Two rows take half of the lanes each, then four rows a quarter each.
            let two = |a, b| _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let (a, b) = (_mm512_castps_pd(two(top[0], top[1])), _mm512_castps_pd(two(top[2], top[3])));
            let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            let four = _mm512_max_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            simd.store(self.top[quad].0.as_mut_ptr(), four);
        }
    }

    /// Computes the new maxima, the values to subtract from scores, and the factors of old sums, like
    /// `f32_body::maxima` with one row per lane.
    ///
    /// # Safety
    /// As [`Softmax::advance`]; the half's maxima have been computed.
    #[inline(always)]
    unsafe fn factors(&mut self, first: usize, rows: usize) {
        // SAFETY: only the lanes of rows that exist are loaded from and stored to `m`; `alpha` has MAX_ROWS values.
        unsafe {
            let simd = Avx512::token();
            let [a, b, c, d] = self.top.each_ref().map(|t| simd.load(t.0.as_ptr()));
            // By 128-bit lanes: two vectors take half each, then four a quarter each.
            let two = |a, b| {
                _mm512_max_ps(
                    _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
                    _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
                )
            };
            let (ab, cd) = (two(a, b), two(c, d));
            let top = _mm512_max_ps(
                _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
            );
            let lanes = ((1u32 << rows) - 1) as __mmask16;
            let old = _mm512_maskz_loadu_ps(lanes, self.m.add(first));
            // Keeps the old maximum unless the new one is larger, so also if the new one is NaN.
            let m = _mm512_max_ps(top, old);
            _mm512_mask_storeu_ps(self.m.add(first), lanes, m);
            // No token visible so far: handled as in `maxima`.
            let nothing = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(m, simd.splat(f32::NEG_INFINITY));
            let base = _mm512_mask_mov_ps(m, nothing, _mm512_setzero_ps());
            let fall = _mm512_mul_ps(_mm512_sub_ps(old, base), simd.splat(std::f32::consts::LN_2));
            simd.store(self.base.0.as_mut_ptr(), base);
            simd.store(self.alpha.add(first), exp_nonpositive(simd, fall));
        }
    }

    /// Computes P of a row, and its sum, like `avx512_bf16::softmax`.
    ///
    /// # Safety
    /// As [`Softmax::advance`]; the half's factors have been computed.
    #[inline(always)]
    unsafe fn exponentials(&mut self, first: usize, lane: usize) {
        let row = first + lane;
        // SAFETY: the row exists, S and P have the groups.
        unsafe {
            let simd = Avx512::token();
            let ones = _mm512_set1_epi32(0x3f80_3f80);
            let (s, p) = (self.s.add(row * S_STRIDE), self.p.add(row * S_STRIDE));
            let base = simd.splat(self.base.0[lane]);
            let lanes = (*self.sum.add(row)).as_mut_ptr();
            let mut sum = simd.mul(simd.load(lanes), simd.splat(*self.alpha.add(row)));
            for g in (0..self.groups()).step_by(2) {
                let e0 = exp2(_mm512_sub_ps(simd.load(s.add(g * 16)), base));
                let e1 = exp2(_mm512_sub_ps(simd.load(s.add(g * 16 + 16)), base));
                let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(e1, e0));
                _mm512_storeu_si512(p.add(g * 16).cast(), rounded);
                sum = dp(sum, rounded, ones);
            }
            simd.store(lanes, sum);
        }
    }
}

/// Address of the scores of block `j`; blocks alternate between two buffers.
fn s_of(run: &Run<'_>, j: usize) -> *mut f32 {
    run.s.wrapping_add(j % 2 * MAX_ROWS * S_STRIDE)
}

fn p_of(run: &Run<'_>, j: usize) -> *mut u16 {
    run.p.cast::<u16>().wrapping_add(j % 2 * MAX_ROWS * S_STRIDE)
}

/// `O[row] *= alpha[row]` for `rows`.
///
/// # Safety
/// O and the factors have these rows; AVX-512.
#[inline(always)]
unsafe fn shrink(o: *mut f32, head_dim: usize, alpha: *const f32, rows: std::ops::Range<usize>) {
    for row in rows {
        // SAFETY: the caller's promise.
        unsafe {
            let simd = Avx512::token();
            let factor = *alpha.add(row);
            if factor != 1.0 {
                let factor = simd.splat(factor);
                for d in (0..head_dim).step_by(16) {
                    let o = o.add(row * head_dim + d);
                    simd.store(o, simd.mul(simd.load(o), factor));
                }
            }
        }
    }
}

/// # Safety
/// As [`Run`] says, P in bf16, scores in powers of two; tiles are configured for [`crate::amx::attention_steps`], and the
/// CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn run(run: &Run<'_>) {
    let n = run.blocks.len();
    let hd = run.head_dim;
    let q_steps = |j: usize| run.blocks.get(j).map_or(0, |b| b.pages() * Qk::steps(hd));
    let v_steps = |j: usize| run.blocks[j].pages() * (hd / COLUMNS);
    let keys = |j: usize| run.blocks.get(j).map(|b| b.k).or(if j == n { run.next } else { None });
    // The factors of this block and of the one before.
    let mut alpha = [[0.0f32; MAX_ROWS]; 2];
    // SAFETY: the caller's promises; blocks j - 1, j and j + 1 alternate between the two buffers of S and P, so that
    // none is written while it is read.
    unsafe {
        let mut ahead = Ahead::new(hd, keys(1), None, q_steps(0));
        qk(run, 0, || ahead.ask());
        for j in 0..n {
            let [even, odd] = &mut alpha;
            let (now, before) = if j % 2 == 0 { (even, odd) } else { (odd, even) };
            let first = q_steps(j + 1);
            let steps = first + if j > 0 { v_steps(j - 1) } else { 0 };
            let ahead = Ahead::new(hd, keys(j + 2), Some(run.blocks[j].v), steps);
            let mut softmax = Softmax::new(run, j, now.as_mut_ptr(), steps, ahead);
            let mut shrunk = if j > 0 { 0 } else { run.rows };
            let mut shrink_by = |rows: usize| {
                let to = (shrunk + rows).min(run.rows);
                shrink(run.o, hd, before.as_ptr(), shrunk..to);
                shrunk = to;
            };
            if first > 0 {
                let rows = run.rows.div_ceil(first);
                qk(run, j + 1, || {
                    shrink_by(rows);
                    softmax.advance();
                });
            } else {
                shrink_by(run.rows);
            }
            if j > 0 {
                pv(run, j - 1, || softmax.advance());
            }
            if steps == 0 {
                // A single block has no products to overlap with.
                softmax.advance();
            }
        }
        shrink(run.o, hd, alpha[(n - 1) % 2].as_ptr(), 0..run.rows);
        pv(run, n - 1, || ());
    }
}

/// Computes the scores of block `j`; calls `beside` after each step.
///
/// # Safety
/// As [`run`]; `beside` uses no tiles.
#[inline(always)]
unsafe fn qk(run: &Run<'_>, j: usize, mut beside: impl FnMut()) {
    let block = &run.blocks[j];
    for page in 0..block.pages() {
        let qk = Qk {
            q: run.q.cast(),
            rows: run.rows,
            head_dim: run.head_dim,
            k: block.k[page].cast(),
            s: s_of(run, j).wrapping_add(page * PAGE_TOKENS),
            s_stride: S_STRIDE,
        };
        // SAFETY: the caller's promise: Q, the page and S have these sizes.
        unsafe {
            qk.begin();
            for i in 0..Qk::steps(run.head_dim) {
                qk.step(i);
                beside();
            }
            qk.store();
        }
    }
}

/// Adds block `j` to O; `beside` as in [`qk`].
///
/// # Safety
/// As [`run`]; `beside` uses no tiles.
#[inline(always)]
unsafe fn pv(run: &Run<'_>, j: usize, mut beside: impl FnMut()) {
    let block = &run.blocks[j];
    for column in (0..run.head_dim).step_by(COLUMNS) {
        let pv = Pv {
            p: p_of(run, j),
            p_stride: S_STRIDE,
            rows: run.rows,
            head_dim: run.head_dim,
            column,
            o: run.o,
        };
        // SAFETY: the caller's promise: P, the pages and O have these sizes.
        unsafe {
            pv.begin();
            for (i, &v) in block.v[..block.pages()].iter().enumerate() {
                pv.step(i, v.cast());
                beside();
            }
            pv.store();
        }
    }
}
