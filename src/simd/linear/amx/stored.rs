//! Float weights that were packed into tiles at load. They are multiplied in place and prefetched a pair of panels
//! ahead while products run, four lines per K step (`amx/make.rs`).

use std::arch::x86_64::*;

use super::super::kernel::{ActsForm, LinearKernel, Work};
use super::super::packed::RecordLayout;
use super::{panels, product, session};
use crate::amx::bf16::Panels;
use crate::amx::pack::TILE_LEN;
use crate::tensor::DType;

/// Packed groups of bf16 (or of f16, rounded) as panels.
struct StoredPanels<'a> {
    groups: &'a [u8],
    /// Tiles of a group.
    steps: usize,
}

impl<'a> StoredPanels<'a> {
    /// Groups of `k` columns.
    fn new(groups: &'a [u8], k: usize) -> StoredPanels<'a> {
        let bytes = RecordLayout::of(DType::BF16).expect("packed").group_bytes(k);
        StoredPanels { groups, steps: bytes / (2 * TILE_LEN) }
    }

    /// Tile `step` of `panel`, followed by the next tiles.
    fn at(&self, panel: usize, step: usize) -> *const u16 {
        assert!(step < self.steps, "step {step} of {}", self.steps);
        let bytes = 2 * TILE_LEN * self.steps;
        self.groups[panel * bytes..(panel + 1) * bytes][2 * TILE_LEN * step..].as_ptr().cast()
    }
}

impl Panels for StoredPanels<'_> {
    fn stored(&self, panel: usize, step: usize) -> Option<*const u16> {
        Some(self.at(panel, step))
    }

    unsafe fn fill(&self, panel: usize, step: usize, out: *mut u16) {
        // SAFETY: a whole tile is there (checked); the caller's contract.
        unsafe { out.copy_from_nonoverlapping(self.at(panel, step), TILE_LEN) };
    }

    unsafe fn quarter(&self, panel: usize, step: usize, quarter: usize, out: *mut u16) {
        let part = TILE_LEN / 4;
        // SAFETY: as above.
        unsafe {
            out.add(quarter * part).copy_from_nonoverlapping(self.at(panel, step).add(quarter * part), part);
        }
    }

    fn prefetch(&self, panel: usize, step: usize, quarter: usize) {
        let line = self.at(panel, step).wrapping_add(quarter * TILE_LEN / 4);
        for i in 0..4 {
            // SAFETY: prefetching any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(i * 32).cast()) };
        }
    }
}

pub(in super::super) static KERNEL: LinearKernel = LinearKernel {
    name: "amx_stored",
    takes: |a| a.packed && !a.dtype.is_quantised(),
    pays: |_| true,
    any_rows: true,
    reads: ActsForm::FineTiles,
    chunk: panels,
    run,
};

/// `out[t·ldo + r] = Σ_k w[r][k]·x[t][k]`.
///
/// # Safety
/// AMX and AVX-512 BF16 are usable; the work's weights are groups of tiles, its activations tiles.
unsafe fn run(w: &Work<'_>) {
    // SAFETY: the caller's contract.
    unsafe { product(&mut session(), w, &StoredPanels::new(w.w, w.k)) }
}
