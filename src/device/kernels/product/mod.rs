//! Product of a packed matrix, dense or quantised, with rows of activations, by the kernel that [`choose`] names.

pub mod choose;

use self::choose::{Choice, DECODE_ROWS};
use super::gemm;
use super::linear::{self, Epilogue, LinearArgs};
use super::quant::{self, PackedLayout, QuantLinearArgs, RowsArgs};
use crate::Result;
use crate::device::accelerator::LinearWeight;
use crate::device::runtime::{DevPtr, DeviceInfo, Lane, Runtime};
use crate::tensor::Half;

/// Most bytes of quantised weights decoded at a time for the prefill GEMM: small against a device's memory, large
/// against what its multiprocessors take at once.
const MAX_SLICE_BYTES: usize = 64 << 20;
/// Slices shorter than this leave multiprocessors idle (2048 rows of 4096 columns are 16 tiles a token tile).
const MIN_SLICE_BYTES: usize = 16 << 20;

/// Rows of a packed matrix times rows of activations.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProductArgs<'a> {
    pub w: &'a LinearWeight,
    pub act: Half,
    pub x: DevPtr,
    pub ldx: usize,
    pub y: DevPtr,
    pub ldy: usize,
    pub m: usize,
    pub epilogue: Epilogue,
    pub scratch: DevPtr,
}

impl ProductArgs<'_> {
    /// Enqueues it.
    pub fn run(&self, rt: &dyn Runtime, lane: Lane) -> Result<()> {
        let ProductArgs { w, act, x, ldx, y, ldy, m, epilogue, scratch } = *self;
        let LinearWeight { ptr, n, k, bias, .. } = *w;
        if m == 0 {
            return Ok(());
        }
        if let Some(layout) = PackedLayout::new(w.dtype, n, k) {
            return self.quantised(rt, lane, &layout);
        }
        let args = LinearArgs { dtype: act, w: ptr, x, bias, y, scratch, m, n, k, ldx, ldy, epilogue };
        match Choice::of(m) {
            Choice::Gemv | Choice::Tiles => linear::linear(rt, lane, &args),
            Choice::Gemm => gemm::gemm(rt, lane, &args),
        }
    }

    fn quantised(&self, rt: &dyn Runtime, lane: Lane, layout: &PackedLayout) -> Result<()> {
        let ProductArgs { w, act, x, ldx, y, ldy, m, epilogue, scratch } = *self;
        let LinearWeight { ptr, n, k, bias, .. } = *w;
        if Choice::of(m) != Choice::Gemm {
            let layout = *layout;
            let args = QuantLinearArgs { layout, w: ptr, act, x, bias, y, scratch, m, ldx, ldy, epilogue };
            return quant::linear(rt, lane, &args);
        }
        let (dense, rows) = (scratch.add(gemm::scratch_bytes(rt.info())), slice_rows(rt.info(), w));
        for first in (0..n).step_by(rows) {
            let count = rows.min(n - first);
            let args = RowsArgs { layout: *layout, w: ptr, to: act, y: dense, ldy: k, first, count };
            quant::rows(rt, lane, &args)?;
            // Gates and ups make half as many columns, of the activations' type.
            let at = if epilogue.is_gated() { first / 2 } else { first };
            let element = if epilogue == Epilogue::F32 { 4 } else { 2 };
            let (y, bias) = (y.add(at * element), if bias.is_null() { bias } else { bias.add(4 * first) });
            let (dtype, w, n) = (act, dense, count);
            let args = LinearArgs { dtype, w, x, bias, y, scratch, m, n, k, ldx, ldy, epilogue };
            gemm::gemm(rt, lane, &args)?;
        }
        Ok(())
    }
}

/// Bytes decoded at a time: what the decoding kernel writes, the GEMM should read from the level-two cache.
///
/// Two fifths of it (24 MiB of an H200's 60 MiB): A100 and Hopper keep their cache in two halves, and a line that
/// multiprocessors of both sides read takes room in both; the rest is for activations, sums and packed weights that
/// stream past. Where that is too little (6 MiB of an A10), decoded weights pass through memory whatever the slice, and
/// long ones waste least at their ends.
fn slice_bytes(info: &DeviceInfo) -> usize {
    let share = info.l2_bytes as usize / 5 * 2;
    if share < MIN_SLICE_BYTES { MAX_SLICE_BYTES } else { share.min(MAX_SLICE_BYTES) }
}

/// Rows decoded at a time: whole tiles of gates and ups.
fn slice_rows(info: &DeviceInfo, w: &LinearWeight) -> usize {
    (slice_bytes(info) / (2 * w.k)).max(128) / 128 * 128
}

/// Bytes of scratch for one matrix and up to `rows` rows.
pub(super) fn scratch_bytes(info: &DeviceInfo, w: &LinearWeight, rows: usize) -> usize {
    let decode_rows = rows.min(DECODE_ROWS);
    let layout = PackedLayout::new(w.dtype, w.n, w.k);
    let (decode, dense) = match &layout {
        Some(layout) => {
            (quant::scratch_bytes(info, layout, decode_rows), slice_rows(info, w).min(w.n) * w.k * 2)
        }
        None => (linear::scratch_bytes(info, decode_rows, w.n, w.k), 0),
    };
    if Choice::of(rows) == Choice::Gemm { decode.max(gemm::scratch_bytes(info) + dense) } else { decode }
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
            driver: 0,
        }
    }

    /// Graphs are recorded per bucket: its rows run the same decode kernels, with the same splits of k.
    #[test]
    fn rows_of_a_bucket_run_the_same_decode_kernel() {
        let info = device(60 << 20);
        for m in 1..=DECODE_ROWS {
            let bucket = choose::row_bucket(m);
            for (n, k) in [(576, 1536), (4096, 14336), (28672, 4096)] {
                let dense = |m| linear::DensePlan::new(&info, Half::BF16, m, n, k);
                let (at, of) = (dense(m), dense(bucket));
                assert_eq!((&at.kernel, at.k_split), (&of.kernel, of.k_split), "{m} rows by {n} x {k}");
                let layout = PackedLayout::new(DType::Q4_K, n, k).expect("whole super-blocks");
                let packed = |m| quant::QuantPlan::new(&info, &layout, Half::F16, m);
                let (at, of) = (packed(m), packed(bucket));
                assert_eq!((&at.kernel, at.k_split), (&of.kernel, of.k_split), "{m} rows by {layout:?}");
            }
        }
    }

    #[test]
    fn decoded_slices_fit_the_level_two_cache() {
        // H200, H100, A100, L40S; then caches that hold no useful slice: A10, T4, one that is not known.
        let mib = [60, 50, 40, 96, 6, 4, 0].map(|mib| slice_bytes(&device(mib << 20)) >> 20);
        assert_eq!(mib, [24, 20, 16, 38, 64, 64, 64]);
        for (n, k, rows) in [(28672, 4096, 3072), (4096, 14336, 768), (128, 1 << 20, 128)] {
            let w = LinearWeight { ptr: DevPtr::NULL, dtype: DType::Q4_K, n, k, bias: DevPtr::NULL };
            assert_eq!(slice_rows(&device(60 << 20), &w), rows, "{n} x {k}");
        }
    }
}
