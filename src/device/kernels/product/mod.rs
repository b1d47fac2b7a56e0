//! Product of a packed matrix, dense or quantised, with rows of activations, by the kernel that [`choose`] names.
//!
//! | file | kernels | rows |
//! |---|---|---|
//! | `gemv` | `gemv.cu`, `gemv_quant.cu` | up to [`GEMV_ROWS`](choose::GEMV_ROWS) |
//! | `tiles` | `linear_dense.cu` | up to [`DECODE_ROWS`], to half of it where there is wgmma |
//! | [`quant`] | `linear_quant.cu` | up to [`DECODE_ROWS`], with quantised weights |
//! | `grouped` | `experts_gemv.cu`, `experts_dense.cu`, ... | of many matrices, the rows of each in groups |
//! | [`gemm`] | `gemm.cu`, `gemm_sm90a.cu` | more; quantised weights are decoded, slice after slice, then multiplied |

mod args;
pub mod choose;
pub mod decode;
pub mod gemm;
mod gemv;
pub(super) mod grouped;
mod plan;
pub mod quant;
mod tiles;

pub use self::args::{COUNTER_BYTES, Epilogue, Matrix, ProductArgs, Weight, gate_up_row};
pub use self::decode::{decode, decode_as};
pub use self::plan::DecodePlan;

use self::choose::{Choice, DECODE_ROWS};
use super::quant::{PackedLayout, RowsArgs, rows};
use crate::Result;
use crate::device::accelerator::LinearWeight;
use crate::device::runtime::{DeviceInfo, Lane, Runtime};
use crate::tensor::Half;

/// Most bytes of quantised weights decoded at a time for the prefill GEMM: small against a device's memory, large
/// against the tiles that its multiprocessors compute at once.
const MAX_SLICE_BYTES: usize = 64 << 20;
/// Slices shorter than this leave multiprocessors idle (2048 rows of 4096 columns are 16 tiles a token tile).
const MIN_SLICE_BYTES: usize = 16 << 20;

/// Enqueues a product of any number of rows.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If sizes or strides are not as [`ProductArgs`] says.
pub fn product(rt: &dyn Runtime, lane: Lane, args: &ProductArgs) -> Result<()> {
    match (Choice::of(args.m), args.w.matrix) {
        _ if args.m == 0 => return Ok(()),
        (Choice::Tiles, matrix) if by_wgmma(rt, &matrix, args.act, args.m) => {}
        (Choice::Gemv | Choice::Tiles, matrix) => {
            let plan = DecodePlan::new(rt.info(), &matrix, args.act, args.m);
            if rt.has_kernel(&plan.kernel) {
                return decode_as(rt, lane, args, &plan);
            }
            // A kernel that failed its self-test is missing: those of many rows take any number.
        }
        (Choice::Gemm, _) => {}
    }
    match args.w.matrix {
        Matrix::Dense { .. } => gemm::gemm(rt, lane, args),
        Matrix::Quantised(layout) => sliced(rt, lane, args, layout),
    }
}

/// Whether wgmma is faster than the kernels for few rows: it reads weights as fast, and has tensor cores to spare. On an H200, layers of
/// Llama 3 8B at 128 rows, µs: qkv 35.6 and 21.6, o 25.3 and 16.8, gate and up 112 and 70, down 56 and 40; at 64 rows each wins two.
fn by_wgmma(rt: &dyn Runtime, matrix: &Matrix, act: Half, rows: usize) -> bool {
    let few = DECODE_ROWS / 2 + 1..=DECODE_ROWS;
    few.contains(&rows)
        && matches!(matrix, Matrix::Dense { .. })
        && gemm::Path::of(rt, act) == gemm::Path::Tma
}

/// Whether a kernel for few rows is missing, so that [`product`] may take those of many rows for any number.
fn lacks_decode_kernels(rt: &dyn Runtime, matrix: &Matrix, rows: usize) -> bool {
    let halves: &[Half] = if rt.info().sm >= 80 { &[Half::F16, Half::BF16] } else { &[Half::F16] };
    let buckets = (1..=rows.min(DECODE_ROWS)).filter(|&m| choose::row_bucket(m) == m || m == rows);
    let plans = buckets.flat_map(|m| halves.iter().map(move |&act| (m, act)));
    plans.into_iter().any(|(m, act)| !rt.has_kernel(&DecodePlan::new(rt.info(), matrix, act, m).kernel))
}

/// The GEMM of quantised weights, which are decoded slice after slice.
fn sliced(rt: &dyn Runtime, lane: Lane, args: &ProductArgs, layout: PackedLayout) -> Result<()> {
    let (n, k, element) = (layout.n(), layout.k(), if args.epilogue == Epilogue::F32 { 4 } else { 2 });
    let (dense, step) = (args.scratch.add(gemm::scratch_bytes(rt.info())), slice_rows(rt.info(), k));
    for first in (0..n).step_by(step) {
        let count = step.min(n - first);
        let decoded = RowsArgs { layout, w: args.w.ptr, to: args.act, y: dense, ldy: k, first, count };
        rows(rt, lane, &decoded)?;
        // A gated epilogue writes half as many columns, in the activations' type.
        let at = if args.epilogue.is_gated() { first / 2 } else { first };
        let bias = if args.w.bias.is_null() { args.w.bias } else { args.w.bias.add(4 * first) };
        let w = Weight { ptr: dense, matrix: Matrix::Dense { n: count, k }, bias };
        gemm::gemm(rt, lane, &ProductArgs { w, y: args.y.add(at * element), ..*args })?;
    }
    Ok(())
}

/// Bytes decoded at a time, chosen so that the GEMM reads from the level-two cache what the decoding kernel wrote.
///
/// A slice takes two fifths of the cache (24 MiB of an H200's 60 MiB): A100 and Hopper divide the cache into two
/// halves, and a line that multiprocessors of both halves read occupies space in both; the rest is for activations,
/// sums and packed weights that stream past. Where that is too little (6 MiB of an A10), decoded weights pass through
/// memory whatever the slice, and long slices waste least at their ends.
fn slice_bytes(info: &DeviceInfo) -> usize {
    let share = info.l2_bytes as usize / 5 * 2;
    if share < MIN_SLICE_BYTES { MAX_SLICE_BYTES } else { share.min(MAX_SLICE_BYTES) }
}

/// Rows decoded at a time, a whole number of gate-and-up tiles.
fn slice_rows(info: &DeviceInfo, k: usize) -> usize {
    (slice_bytes(info) / (2 * k)).max(128) / 128 * 128
}

/// Bytes of scratch for one matrix and up to `rows` rows.
pub(super) fn scratch_bytes(rt: &dyn Runtime, w: &LinearWeight, rows: usize) -> usize {
    let info = rt.info();
    let matrix = Matrix::of(w.dtype, w.n, w.k);
    let decode = decode::scratch_bytes(info, &matrix, rows.min(DECODE_ROWS));
    let dense = match matrix {
        Matrix::Dense { .. } => 0,
        Matrix::Quantised(_) => slice_rows(info, w.k).min(w.n) * w.k * 2,
    };
    let wgmma = [Half::F16, Half::BF16].iter().any(|&act| by_wgmma(rt, &matrix, act, rows));
    match Choice::of(rows) == Choice::Gemm || wgmma || lacks_decode_kernels(rt, &matrix, rows) {
        true => decode.max(gemm::scratch_bytes(info) + dense),
        false => decode,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn device(l2_bytes: u32) -> DeviceInfo {
        DeviceInfo {
            name: "test".into(),
            sm: 90,
            multiprocessors: 132,
            memory_total: 1 << 30,
            shared_per_block: 227 << 10,
            l2_bytes,
            memory_bw: 0,
            clock_khz: 0,
            driver: 0,
        }
    }

    /// Graphs are recorded per bucket, so all row counts of a bucket run the same decode kernels with the same splits
    /// of k.
    #[test]
    fn rows_of_a_bucket_run_the_same_decode_kernel() {
        let info = device(60 << 20);
        for m in 1..=DECODE_ROWS {
            let bucket = choose::row_bucket(m);
            for (n, k) in [(576, 1536), (4096, 14336), (28672, 4096)] {
                for matrix in [Matrix::Dense { n, k }, Matrix::of(DType::Q4_K, n, k)] {
                    let plan = |m| DecodePlan::new(&info, &matrix, Half::F16, m);
                    let (at, of) = (plan(m), plan(bucket));
                    assert_eq!((&at.kernel, at.k_split), (&of.kernel, of.k_split), "{m} rows by {matrix:?}");
                }
            }
        }
    }

    #[test]
    fn decoded_slices_fit_the_level_two_cache() {
        // H200, H100, A100, L40S; then caches that hold no useful slice: A10, T4, an unknown size.
        let mib = [60, 50, 40, 96, 6, 4, 0].map(|mib| slice_bytes(&device(mib << 20)) >> 20);
        assert_eq!(mib, [24, 20, 16, 38, 64, 64, 64]);
        for (n, k, rows) in [(28672, 4096, 3072), (4096, 14336, 768), (128, 1 << 20, 128)] {
            assert_eq!(slice_rows(&device(60 << 20), k), rows, "{n} x {k}");
        }
    }
}
