//! Parts of the rows of activations times weights of their own, as one parallel job: the chosen experts of a step.
//!
//! ```text
//! rows (sorted by expert)   │ 3 3 3 │ 7 │ 8 8 │            a part: rows that follow each other, and a weight, or two
//! chunks                    │ groups 0..4 of expert 3 │ 4..8 of 3 │ … │ 0..4 of 7 │ …      each claimed by one thread
//! ```
//! A chunk computes some columns of a part for all of its rows, so an expert's weights are read once. With a second weight of the
//! same shape it computes those columns of both and combines them (gate and up), so that no job follows for the activation.

use std::ops::Range;

use super::acts::{Acts, Input, Need};
use super::chunks::Chunks;
use super::kernel::{GROUP, LinearKernel};
use super::mode::Mode;
use super::multiply::groups;
use super::weight::Linear;
use crate::host::Pool;
use crate::simd::Kernels;

/// Some rows of the activations, and what they are multiplied by.
pub struct Part<'a> {
    /// The weight.
    pub w: &'a Linear,
    /// A second weight of the same shape, and memory for its products, as much as `out`.
    pub second: Option<(&'a Linear, &'a mut [f32])>,
    /// Rows of the activations. They begin at a multiple of [`Linear::part_alignment`].
    pub rows: Range<usize>,
    /// The products, `[rows][n]`.
    pub out: &'a mut [f32],
}

/// A part, divided into chunks.
struct Job<'a> {
    w: (&'a Linear, &'static LinearKernel),
    second: Option<(&'a Linear, &'static LinearKernel, *mut f32)>,
    x: Input<'a>,
    out: *mut f32,
    chunks: Chunks,
}

// SAFETY: the output pointers are written in disjoint columns, see `linear_parts`.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    /// Computes groups `g0..g1`.
    ///
    /// # Safety
    /// The outputs have the part's rows of `n` columns; nothing else touches the columns of these groups.
    unsafe fn run(&self, g0: usize, g1: usize, combine: &(dyn Fn(&mut [f32], &[f32]) + Sync)) {
        let (w, kernel) = self.w;
        let (m, n) = (self.x.m(), w.n());
        // SAFETY: the caller's promise.
        unsafe { groups(w, kernel, g0, g1, self.x, self.out, n) };
        let Some((w, kernel, second)) = self.second else { return };
        // SAFETY: as above.
        unsafe { groups(w, kernel, g0, g1, self.x, second, n) };
        let (from, to) = (g0 * GROUP, (g1 * GROUP).min(n));
        for row in 0..m {
            let at = row * n + from;
            // SAFETY: columns of these groups, which nothing else touches, of both outputs.
            let (a, b) = unsafe {
                (
                    std::slice::from_raw_parts_mut(self.out.add(at), to - from),
                    std::slice::from_raw_parts(second.add(at), to - from),
                )
            };
            combine(a, b);
        }
    }
}

/// The products of all parts, as one parallel job. `combine` is called with columns of a row of the first product, which it
/// changes, and the same columns of the second; not for parts without a second weight.
///
/// # Panics
/// If shapes disagree, rows do not begin where they must, or activations of a weight are fine.
pub fn linear_parts(
    pool: &Pool,
    mode: Mode,
    x: &mut Acts,
    parts: &mut [Part<'_>],
    combine: &(dyn Fn(&mut [f32], &[f32]) + Sync),
) {
    let Some(isa) = parts.first().map(|p| p.w.isa()) else { return };
    let mut readers = Vec::with_capacity(parts.len());
    for p in parts.iter() {
        let mut need = Need::default();
        for w in std::iter::once(p.w).chain(p.second.iter().map(|(w, _)| *w)) {
            assert!(w.isa() == isa && !w.is_fine(), "weights of one tier, with plain activations");
            assert!((w.n(), w.k()) == (p.w.n(), x.k()), "weight [{}, {}], {} columns", w.n(), w.k(), x.k());
            need = need.or(w.need(p.rows.len(), mode));
            assert!(p.rows.start.is_multiple_of(w.part_alignment(p.rows.len(), mode)), "rows {:?}", p.rows);
        }
        readers.push((p.rows.clone(), need));
        let len = p.rows.len() * p.w.n();
        assert!(p.out.len() == len && p.second.as_ref().is_none_or(|(_, up)| up.len() == len), "outputs");
    }
    // An expert of few rows reads another form of them than one of many, so most rows are read in one form.
    let (readers, kernels) = (apart(readers), Kernels::for_isa(isa));
    let of_all = readers.iter().find(|(rows, _)| *rows == (0..x.m())).map(|(_, need)| *need);
    let input = match of_all {
        Some(need) => x.input(pool, kernels, need),
        None => x.input_for(pool, kernels, &readers),
    };
    // Parts run beside each other, so that fewer and longer chunks of each occupy all threads.
    let threads = pool.threads().div_ceil(parts.len());
    let mut chunks = 0;
    let jobs: Vec<Job<'_>> = parts
        .iter_mut()
        .filter(|p| !p.rows.is_empty())
        .map(|p| {
            let m = p.rows.len();
            let kernel = p.w.kernel(m, mode);
            let own = p.w.chunks(kernel, m, threads, chunks);
            chunks = own.end;
            let second = p.second.as_mut().map(|(w, out)| (*w, w.kernel(m, mode), out.as_mut_ptr()));
            Job {
                w: (p.w, kernel),
                second,
                x: input.rows(p.rows.clone()),
                out: p.out.as_mut_ptr(),
                chunks: own,
            }
        })
        .collect();
    pool.run_streams(chunks, &|chunks, _| {
        let first = jobs.partition_point(|job| job.chunks.end <= chunks.start);
        for job in jobs[first..].iter().take_while(|job| job.chunks.first < chunks.end) {
            for (g0, g1) in job.chunks.runs(&chunks) {
                // SAFETY: outputs of m rows of n were checked above; each group of a part belongs to exactly one chunk, and parts
                // have outputs of their own.
                unsafe { job.run(g0, g1, combine) };
            }
        }
    });
    if of_all.is_none() {
        x.forget_forms();
    }
}

/// Ranges of rows that do not overlap, in their order: those that did become one, with the forms of all.
fn apart(mut readers: Vec<(Range<usize>, Need)>) -> Vec<(Range<usize>, Need)> {
    readers.sort_by_key(|(rows, _)| rows.start);
    readers.dedup_by(|(rows, need), (before, all)| {
        let joined = rows.start < before.end || rows == before;
        if joined {
            (before.end, *all) = (before.end.max(rows.end), all.or(*need));
        }
        joined
    });
    readers
}
