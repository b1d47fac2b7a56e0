//! Packed groups of quantised weights, converted to bf16 tiles while products run.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::super::kernel::{ActsForm, Ask, LinearKernel, Work};
use super::super::quant::format::RecordFormat;
use super::{dequantise, panels, product, session};
use crate::amx::bf16::Panels;
use crate::amx::half_arithmetic;
use crate::tensor::formats::with_format;

/// Packed groups as panels. With `HALF` they are made with f16 arithmetic.
struct QuantisedPanels<'a, F, const NIBBLES: bool, const HALF: bool> {
    groups: &'a [u8],
    /// Bytes of a group.
    bytes: usize,
    _format: PhantomData<F>,
}

impl<'a, F: RecordFormat, const NIBBLES: bool, const HALF: bool> QuantisedPanels<'a, F, NIBBLES, HALF> {
    fn new(groups: &'a [u8], k: usize) -> Self {
        QuantisedPanels { groups, bytes: F::LAYOUT.group_bytes(k), _format: PhantomData }
    }

    /// The packed rows of `panel`, which have tile `step`.
    #[inline]
    fn group(&self, panel: usize, step: usize) -> *const u8 {
        assert!((step + 1) * 32 * F::LAYOUT.record_bytes <= self.bytes * F::LAYOUT.record_k);
        self.groups[panel * self.bytes..(panel + 1) * self.bytes].as_ptr()
    }
}

impl<F: RecordFormat, const NIBBLES: bool, const HALF: bool> Panels
    for QuantisedPanels<'_, F, NIBBLES, HALF>
{
    fn stored(&self, _: usize, _: usize) -> Option<*const u16> {
        None
    }

    unsafe fn fill(&self, panel: usize, step: usize, out: *mut u16) {
        let group = self.group(panel, step);
        // SAFETY: the group has this step (checked); the caller's contract; f16 arithmetic is available where it is
        // chosen.
        unsafe {
            if HALF {
                dequantise::half_whole::<F, NIBBLES>(group, step, out);
            } else {
                dequantise::whole::<F, NIBBLES>(group, step, out);
            }
        }
    }

    unsafe fn quarter(&self, panel: usize, step: usize, quarter: usize, out: *mut u16) {
        let group = self.group(panel, step);
        // SAFETY: as above.
        unsafe {
            if HALF {
                dequantise::half_quarter::<F, NIBBLES>(group, step, quarter, out);
            } else {
                dequantise::quarter::<F, NIBBLES>(group, step, quarter, out);
            }
        }
    }

    fn ring_of_64(&self) -> bool {
        HALF
    }

    fn prefetch(&self, panel: usize, step: usize, quarter: usize) {
        // Each step takes its share of the record's lines.
        let per_step = F::LAYOUT.record_bytes * 32 / F::LAYOUT.record_k;
        let from = (4 * step + quarter) * per_step / 4;
        for byte in (from..from + per_step / 4).step_by(64) {
            let line = self.groups.as_ptr().wrapping_add(panel * self.bytes + byte);
            // SAFETY: prefetching any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
        }
    }
}

/// Whether there are enough tokens for tiles.
fn pays(a: &Ask<'_>) -> bool {
    a.m >= a.tiles_from()
}

pub(in super::super) static KERNEL: LinearKernel = LinearKernel {
    name: "amx_quantised",
    takes: |a| a.quantised(),
    pays,
    any_rows: false,
    reads: ActsForm::Tiles,
    chunk: panels,
    run: by::<false>,
};

/// The kernel that makes tiles with f16 arithmetic: in fewer cycles, and with an additional f16 rounding of the
/// weights.
pub(in super::super) static HALF: LinearKernel = LinearKernel {
    name: "amx_half",
    takes: |a| a.quantised() && half_arithmetic(),
    pays: |a| pays(a) && a.m <= a.tuning.half_up_to,
    any_rows: false,
    reads: ActsForm::Tiles,
    chunk: panels,
    run: by::<true>,
};

/// # Safety
/// AMX and AVX-512 BF16 are usable, with `HALF` f16 arithmetic; the work's weights are whole groups of a quantised dtype, its
/// activations tiles.
unsafe fn by<const HALF: bool>(w: &Work<'_>) {
    // SAFETY: the caller's contract.
    unsafe { with_format!(w.dtype, F => groups::<F, { <F as RecordFormat>::NIBBLES }, HALF>(w)) }
}

/// # Safety
/// As [`by`], of groups of `F`.
unsafe fn groups<F: RecordFormat, const NIBBLES: bool, const HALF: bool>(w: &Work<'_>) {
    // SAFETY: the caller's contract.
    unsafe { product(&mut session(), w, &QuantisedPanels::<F, NIBBLES, HALF>::new(w.w, w.k)) }
}
