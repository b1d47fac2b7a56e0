//! Which kernel multiplies a matrix by how many rows.
//!
//! ```text
//! rows        dense                 quantised
//! 1..=4       gemv                  gemv, codes to halves in registers
//! ..=128      linear_dense          linear_quant
//! more        gemm                  rows decoded to a buffer, slice after slice, then gemm
//! ```

use super::super::gemm;
use super::super::linear::{self, Epilogue, LinearArgs};
use super::super::quant::{self, Layout, QuantLinearArgs, RowsArgs};
use crate::Result;
use crate::device::accelerator::{Half, LinearWeight};
use crate::device::runtime::{DevPtr, DeviceInfo, Lane, Runtime};

/// Most rows for the kernels that read weights once per 128 tokens and split k over the device; beyond, tiles of
/// the prefill GEMM reuse both sides.
const DECODE_ROWS: usize = 128;

/// Bytes of quantised weights decoded at a time for the prefill GEMM: small against a device's memory, large
/// against what its multiprocessors take at once.
const SLICE_BYTES: usize = 64 << 20;

/// Rows of a packed matrix times rows of activations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matmul<'a> {
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

impl Matmul<'_> {
    /// Enqueues it.
    pub fn run(&self, rt: &dyn Runtime, lane: Lane) -> Result<()> {
        let Matmul { w, act, x, ldx, y, ldy, m, epilogue, scratch } = *self;
        let LinearWeight { ptr, n, k, bias, .. } = *w;
        if m == 0 {
            return Ok(());
        }
        if let Some(layout) = Layout::new(w.dtype, n, k) {
            return self.quantised(rt, lane, &layout);
        }
        let args = LinearArgs { dtype: act, w: ptr, x, bias, y, scratch, m, n, k, ldx, ldy, epilogue };
        if m <= DECODE_ROWS { linear::linear(rt, lane, &args) } else { gemm::gemm(rt, lane, &args) }
    }

    fn quantised(&self, rt: &dyn Runtime, lane: Lane, layout: &Layout) -> Result<()> {
        let Matmul { w, act, x, ldx, y, ldy, m, epilogue, scratch } = *self;
        let LinearWeight { ptr, n, k, bias, .. } = *w;
        if m <= DECODE_ROWS {
            let layout = *layout;
            let args = QuantLinearArgs { layout, w: ptr, act, x, bias, y, scratch, m, ldx, ldy, epilogue };
            return quant::linear(rt, lane, &args);
        }
        let (dense, rows) = (scratch.add(gemm::scratch_bytes(rt.info())), slice_rows(w));
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

/// Rows decoded at a time: whole tiles of gates and ups.
fn slice_rows(w: &LinearWeight) -> usize {
    (SLICE_BYTES / (2 * w.k)).max(128) / 128 * 128
}

/// Bytes of scratch for one matrix and up to `rows` rows.
pub(super) fn scratch_bytes(info: &DeviceInfo, w: &LinearWeight, rows: usize) -> usize {
    let decode_rows = rows.min(DECODE_ROWS);
    let layout = Layout::new(w.dtype, w.n, w.k);
    let (decode, dense) = match &layout {
        Some(layout) => (quant::scratch_bytes(info, layout, decode_rows), slice_rows(w).min(w.n) * w.k * 2),
        None => (linear::scratch_bytes(info, decode_rows, w.n, w.k), 0),
    };
    if rows > DECODE_ROWS { decode.max(gemm::scratch_bytes(info) + dense) } else { decode }
}
