//! Rows of the file, converted to bf16 tiles while products run.

use std::arch::x86_64::*;

use super::super::float::panel::{RowBlock, panel_bf16};
use super::super::kernel::{ActsForm, GROUP, LinearKernel, Work};
use super::transpose::{transpose_quarter, transpose_tile};
use super::{panels, product, session};
use crate::amx::bf16::Panels;
use crate::tensor::DType;

/// Rows of the file as panels.
struct RowPanels {
    dtype: DType,
    w: *const u8,
    n: usize,
    k: usize,
}

impl Panels for RowPanels {
    fn stored(&self, _: usize, _: usize) -> Option<*const u16> {
        None
    }

    unsafe fn fill(&self, panel: usize, step: usize, out: *mut u16) {
        // SAFETY: rows of the panel exist, and the caller's contract; whole tiles read elements below k only.
        unsafe {
            match self.whole(panel, step) {
                Some(w) => transpose_tile(w, self.stride(), out),
                None => self.edge(panel, step, out),
            }
        }
    }

    unsafe fn quarter(&self, panel: usize, step: usize, quarter: usize, out: *mut u16) {
        // SAFETY: as above.
        unsafe {
            match self.whole(panel, step) {
                Some(w) => transpose_quarter(w, self.stride(), quarter, out),
                None if quarter == 0 => self.edge(panel, step, out),
                None => {}
            }
        }
    }

    fn prefetch(&self, panel: usize, step: usize, quarter: usize) {
        let w = self.w.wrapping_add(panel * GROUP * self.stride() + step * 64);
        for row in (4 * quarter..4 * quarter + 4).take_while(|row| panel * GROUP + row < self.n) {
            // SAFETY: prefetching any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(row * self.stride()).cast()) };
        }
    }
}

impl RowPanels {
    /// Bytes of a row.
    fn stride(&self) -> usize {
        self.k * self.dtype.block_bytes()
    }

    /// Where tile `step` of `panel` lies, if it is 16 rows of 32 bf16.
    #[inline]
    fn whole(&self, panel: usize, step: usize) -> Option<*const u8> {
        let whole = self.dtype == DType::BF16 && (panel + 1) * GROUP <= self.n && (step + 1) * 32 <= self.k;
        whole.then(|| self.w.wrapping_add(panel * GROUP * self.stride() + step * 64))
    }

    /// A tile of fewer rows, at the end of k, or of f16.
    ///
    /// # Safety
    /// The panel exists; `out` has room for a tile.
    unsafe fn edge(&self, panel: usize, step: usize, out: *mut u16) {
        let (first, k0) = (panel * GROUP, step * 32);
        let rows = (self.n - first).min(GROUP);
        let kc = self.k.saturating_sub(k0).min(32);
        let w = self.w.wrapping_add(first * self.stride());
        // SAFETY: as promised; elements k0..k0 + kc exist.
        unsafe { panel_bf16(RowBlock { dtype: self.dtype, w, rows, k: self.k }, k0, kc, 32, out) };
    }
}

pub(in super::super) static KERNEL: LinearKernel = LinearKernel {
    name: "amx_rows",
    takes: |a| !a.packed && matches!(a.dtype, DType::F16 | DType::BF16),
    pays: |_| true,
    any_rows: true,
    reads: ActsForm::FineTiles,
    chunk: panels,
    run,
};

/// `out[t·ldo + r] = Σ_k w[r][k]·x[t][k]`.
///
/// # Safety
/// AMX and AVX-512 BF16 are usable; the work's weights are rows of f16 or bf16, its activations tiles.
pub(super) unsafe fn run(w: &Work<'_>) {
    let rows = RowPanels { dtype: w.dtype, w: w.w.as_ptr(), n: w.n, k: w.k };
    // SAFETY: the caller's contract.
    unsafe { product(&mut session(), w, &rows) }
}
