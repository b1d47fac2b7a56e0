//! Decodes one row of weights, times a scale, for embeddings.
//!
//! The results equal those of `reference::dequant` bit for bit: the same product and sum, rounded one after the other, then the
//! final scaling.
//!
//! bound      the row is read once, in tens of nanoseconds; negligible against a whole model per token

use super::convert::{Bf16, F16, widen_bytes};
use crate::reference;
use crate::simd::vector::{Simd, SimdOp};
use crate::tensor::DType;
use crate::tensor::formats::{BlockFormat, with_format};

/// `out = scale·row`.
pub(crate) struct EmbedRow<'a> {
    pub dtype: DType,
    pub row: &'a [u8],
    pub scale: f32,
    pub out: &'a mut [f32],
}

impl SimdOp for EmbedRow<'_> {
    type Output = ();

    fn reference(self) {
        reference::embed::embed_row(self.dtype, self.row, self.scale, self.out)
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) {
        let EmbedRow { dtype, row, scale, out } = self;
        assert_eq!(
            Some(row.len()),
            dtype.row_bytes(out.len()),
            "embed_row: {} bytes for {} elements of {dtype}",
            row.len(),
            out.len()
        );
        let blocks = row.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len()));
        match dtype {
            DType::F32 => f32_row(s, row, scale, out),
            // SAFETY: two bytes per element, as asserted.
            DType::F16 => unsafe { widen_bytes(s, row.as_ptr(), scale, out, F16) },
            // SAFETY: two bytes per element, as asserted.
            DType::BF16 => unsafe { widen_bytes(s, row.as_ptr(), scale, out, Bf16) },
            quantised => with_format!(quantised, F => {
                for (b, o) in blocks {
                    block::<S, F>(s, b, scale, o);
                }
            }),
        }
    }
}

#[inline(always)]
fn f32_row<S: Simd>(s: S, row: &[u8], scale: f32, out: &mut [f32]) {
    let n = out.len();
    assert!(row.len() == 4 * n);
    let (p, k) = (row.as_ptr().cast::<f32>(), s.splat(scale));
    let mut i = 0;
    // SAFETY: every access is at i..i + LANES <= n, or a tail of n - i elements; loads need no alignment.
    unsafe {
        while i + S::LANES <= n {
            s.store(out.as_mut_ptr().add(i), s.mul(s.load(p.add(i)), k));
            i += S::LANES;
        }
        if i < n {
            s.store_tail(out.as_mut_ptr().add(i), n - i, s.mul(s.load_tail(p.add(i), n - i, 0.0), k));
        }
    }
}

#[inline(always)]
fn block<S: Simd, F: BlockFormat>(s: S, b: &[u8], scale: f32, o: &mut [f32]) {
    let (scales, zero, k) = (F::scales(b), s.splat(f32::from(F::ZERO)), s.splat(scale));
    for (i, o) in o.chunks_exact_mut(32).enumerate() {
        let values = F::values(b, i);
        for from in (0..32).step_by(F::SUB) {
            let (d, m) = F::scale_min(&scales, (32 * i + from) / F::SUB);
            let (d, m) = (s.splat(d), s.splat(m));
            for j in (from..from + F::SUB).step_by(S::LANES) {
                // SAFETY: LANES (8 or 16) divides SUB (16 or 32), and SUB 32, the length of `o` and `values`.
                unsafe {
                    let q = s.sub(s.load_bytes(values.as_ptr().add(j)), zero);
                    s.store(o.as_mut_ptr().add(j), s.mul(s.add(s.mul(d, q), m), k));
                }
            }
        }
    }
}
