//! Runs products as jobs of the pool, dividing their rows among threads.

use std::cell::RefCell;

use super::acts::{Acts, Input, Need};
use super::chunks::Chunks;
use super::kernel::{GROUP, LinearKernel, Work};
use super::mode::Mode;
use super::weight::Linear;
use crate::host::Pool;
use crate::simd::{Isa, Kernels};
use crate::tensor::Rows;

/// Computes groups `g0..g1` of `w` for all rows of `x`.
///
/// # Safety
/// `kernel` takes `w` and that many rows; `out` has `x.m()` rows of `ldo >= n`; nothing else touches the columns of
/// these groups.
pub(super) unsafe fn groups(
    w: &Linear,
    kernel: &LinearKernel,
    g0: usize,
    g1: usize,
    x: Input<'_>,
    out: *mut f32,
    ldo: usize,
) {
    let m = x.m();
    let (r0, r1) = (g0 * GROUP, (g1 * GROUP).min(w.n()));
    let n = r1 - r0;
    let (dtype, rows, tuning) = (w.dtype(), w.groups(g0, g1), w.tuning());
    let run = |plane, out, ldo| {
        let work = Work { dtype, w: rows, n, k: w.k(), x, plane, out, ldo, tuning };
        // SAFETY: the tier was checked when the weight was made, the kernel when it was chosen; shapes by `multiply`'s checks; the
        // outputs are `m` rows of `n` columns, `ldo` apart, and ours.
        unsafe { (kernel.run)(&work) };
    };
    run(0, out.wrapping_add(r0), ldo);
    if kernel.planes(w.is_fine()) > 1 {
        with_scratch(m * n, |fine| {
            run(1, fine.as_mut_ptr(), n);
            // SAFETY: columns r0..r1 of every row are ours.
            unsafe { add_columns(fine, m, n, out.add(r0), ldo) };
        });
    }
    if let Some(bias) = w.bias() {
        for t in 0..m {
            for (n, b) in bias.iter().enumerate().take(r1).skip(r0) {
                // SAFETY: t < m and n < r1: our columns.
                unsafe { *out.add(t * ldo + n) += b };
            }
        }
    }
}

/// A cache line, so that stores of whole vectors do not cross lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

thread_local! {
    /// A thread's products of a fine plane.
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` with `len` values of this thread's scratch, of unspecified contents.
fn with_scratch(len: usize, f: impl FnOnce(&mut [f32])) {
    SCRATCH.with_borrow_mut(|lines| {
        let count = len.div_ceil(16);
        if lines.len() < count {
            lines.resize(count, Line([0.0; 16]));
        }
        // SAFETY: the lines consist of exactly this many values.
        f(&mut unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<f32>(), 16 * lines.len()) }
            [..len]);
    });
}

/// Adds the `[m][n]` products of a fine plane to `m` rows of `out`, `ldo` apart.
///
/// # Safety
/// These columns of `out` exist and belong to the caller.
unsafe fn add_columns(fine: &[f32], m: usize, n: usize, out: *mut f32, ldo: usize) {
    for t in 0..m {
        for (c, v) in fine[t * n..(t + 1) * n].iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *out.add(t * ldo + c) += v };
        }
    }
}

/// One product of a [`linear`] call.
pub struct Out<'a> {
    /// The weight.
    pub w: &'a Linear,
    /// Destination `[m][ldo]`, of which columns `0..n` are written.
    pub out: &'a mut [f32],
    /// Distance between rows of `out`.
    pub ldo: usize,
}

struct Piece {
    kernel: &'static LinearKernel,
    chunks: Chunks,
    out: *mut f32,
    ldo: usize,
}

/// Several weights times the same activations, as one parallel job.
///
/// `x` is prepared here as the weights need.
///
/// # Panics
/// If shapes disagree.
pub fn linear(pool: &Pool, mode: Mode, x: &mut Acts, outs: &mut [Out<'_>]) {
    let (need, kernels) = (need(mode, x.m(), outs), kernels(outs));
    multiply(pool, mode, x.input(pool, kernels, need), outs);
}

/// [`linear`] for activations that lie elsewhere in consecutive rows, which are read in place. `acts` holds their
/// forms; its own rows have none afterwards.
///
/// # Panics
/// If shapes disagree, or the rows are not consecutive.
pub fn linear_rows(pool: &Pool, mode: Mode, x: Rows<'_>, acts: &mut Acts, outs: &mut [Out<'_>]) {
    let (need, kernels) = (need(mode, x.len(), outs), kernels(outs));
    multiply(pool, mode, acts.input_of(pool, kernels, x.dense(), x.width(), need), outs);
}

fn need(mode: Mode, m: usize, outs: &[Out<'_>]) -> Need {
    outs.iter().fold(Need::default(), |a, o| a.or(o.w.need(m, mode)))
}

/// The kernels that prepare activations: those of the weights' tier, which all weights of a model share.
fn kernels(outs: &[Out<'_>]) -> &'static Kernels {
    let isa = outs.first().map_or(Isa::Reference, |o| o.w.isa());
    assert!(outs.iter().all(|o| o.w.isa() == isa), "weights of one tier in one job");
    Kernels::for_isa(isa)
}

fn multiply(pool: &Pool, mode: Mode, x: Input<'_>, outs: &mut [Out<'_>]) {
    let m = x.m();
    if m == 0 {
        return;
    }
    const MAX: usize = 4;
    assert!(outs.len() <= MAX, "{} weights in one job", outs.len());
    let mut chunks = 0;
    let pieces: [Option<Piece>; MAX] = std::array::from_fn(|i| {
        let o = outs.get_mut(i)?;
        assert_eq!(x.k(), o.w.k(), "activations of {} columns, weight [{}, {}]", x.k(), o.w.n(), o.w.k());
        assert!(
            o.ldo >= o.w.n() && o.out.len() >= (m - 1) * o.ldo + o.w.n(),
            "outputs too small for {m} rows"
        );
        let kernel = o.w.kernel(m, mode);
        let own = o.w.chunks(kernel, m, pool.threads(), chunks);
        chunks = own.end;
        Some(Piece { kernel, chunks: own, out: o.out.as_mut_ptr(), ldo: o.ldo })
    });
    let weights: [Option<&Linear>; MAX] = std::array::from_fn(|i| outs.get(i).map(|o| o.w));
    let job = Shared { pieces, weights };
    pool.run_streams(chunks, &|chunks, _| {
        let job = &job;
        for (piece, w) in job.pieces.iter().zip(&job.weights) {
            let (Some(piece), Some(w)) = (piece, w) else { return };
            for (g0, g1) in piece.chunks.runs(&chunks) {
                // SAFETY: outputs were checked above; each group belongs to exactly one chunk.
                unsafe { groups(w, piece.kernel, g0, g1, x, piece.out, piece.ldo) };
            }
        }
    });
}

struct Shared<'a> {
    pieces: [Option<Piece>; 4],
    weights: [Option<&'a Linear>; 4],
}
// SAFETY: the output pointers are written in disjoint columns, see `linear`.
unsafe impl Sync for Shared<'_> {}
