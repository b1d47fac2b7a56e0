//! Runs the CPU's own kernels, in deterministic mode, on the device's memory: a row gets the same bits as on the CPU,
//! whatever the other rows are (docs/decisions/0018).
//!
//! Weights stay as their files store them and are packed for each product in the layout of the tier's kernels; pages
//! are copied to the host's layout for each attention. That costs time but no memory, and nothing outside deterministic
//! mode.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::matrix::Matrix;
use super::pages::{Line, PageShape, lines_as_bytes};
use crate::Result;
use crate::cache::{KvGeometry, PAGE_TOKENS, PagePool, SeqRows};
use crate::host::Pool;
use crate::simd::Isa;
use crate::simd::attention::{AttnOut, AttnPlan, AttnRows, AttnShape, Partial, merge_partials};
use crate::simd::linear::{Acts, Linear, Mode, Out, linear_rows, pack};
use crate::tensor::{Bytes, Rows, RowsMut, Tensor};

/// The kernels of a tier, on the thread of a lane alone.
#[derive(Clone)]
pub struct CpuKernels {
    isa: Isa,
    pool: Arc<Pool>,
    plans: Arc<Plans>,
}

/// Idle attention plans, kept for reuse: allocating their buffers takes longer than a short attention does.
#[derive(Default)]
pub struct Plans(Mutex<Vec<AttnPlan>>);

/// Most plans that are kept.
const MOST_PLANS: usize = 8;

impl Plans {
    /// Calls `run` with a plan of `seq` that sums page by page, as the CPU does in deterministic mode.
    fn with(&self, shape: &AttnShape, seq: &SeqPages, run: impl FnOnce(&mut AttnPlan)) -> Result<()> {
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let take = |mut kept: MutexGuard<'_, Vec<AttnPlan>>| {
            let at = kept.iter().position(|plan| plan.shape() == shape)?;
            Some(kept.swap_remove(at))
        };
        let mut plan = match take(kept()) {
            Some(plan) => plan,
            None => AttnPlan::new(shape, &[], 1)?.in_segments_of(PAGE_TOKENS),
        };
        plan.rebuild_rows(&[seq.rows()]);
        run(&mut plan);
        let mut kept = kept();
        if kept.len() < MOST_PLANS {
            kept.push(plan);
        }
        Ok(())
    }
}

/// Consecutive rows of one sequence, over pages of a [`PagePool`].
#[derive(Debug, Clone)]
pub struct SeqPages {
    /// The pages from that of token 0 on; entries of tokens that are not attended may be any number.
    pub pages: Vec<u32>,
    /// Position of the first row.
    pub first_pos: usize,
    /// Number of rows, equal to that of queries and results.
    pub n_rows: usize,
    /// The tokens to attend, among those that position and window let a row see.
    pub tokens: Range<usize>,
}

impl SeqPages {
    fn rows(&self) -> AttnRows<'_> {
        let SeqPages { first_pos, n_rows, .. } = *self;
        AttnRows {
            rows: SeqRows { pages: &self.pages, first_pos, n_rows, row0: 0 },
            tokens: self.tokens.clone(),
            kv_heads: AttnRows::ALL_HEADS,
        }
    }
}

impl CpuKernels {
    /// The kernels of `isa`.
    pub fn new(isa: Isa, pool: &Arc<Pool>, plans: &Arc<Plans>) -> CpuKernels {
        CpuKernels { isa, pool: pool.clone(), plans: plans.clone() }
    }

    /// `y[m][column + n] = x·Wᵀ + b`, rows of `y` are `ldy` long. `fine`: a weight whose activations the CPU quantises finely.
    pub fn linear(&self, w: &Matrix<'_>, fine: bool, x: &[f32], y: &mut [f32], ldy: usize, column: usize) {
        if x.is_empty() {
            return;
        }
        // SAFETY: the tensor and everything made from it are dropped below, while the caller still lends the bytes.
        let data = unsafe { Bytes::borrowed(w.data) };
        let rows = Tensor { dtype: w.dtype, shape: vec![w.n(), w.k], data };
        let weight = match Linear::wants_packing(w.dtype, self.isa) {
            true => Linear::from_packed(pack(&rows), self.isa),
            false => Linear::from_rows(rows, self.isa),
        };
        let weight = weight.with_bias((!w.bias.is_empty()).then(|| w.bias.to_vec()));
        let weight = if fine { weight.with_fine_activations() } else { weight };
        let out = &mut [Out { w: &weight, out: &mut y[column..], ldo: ldy }];
        linear_rows(&self.pool, Mode::Deterministic, Rows::new(x, w.k), &mut Acts::default(), out);
    }

    /// Copies pages to the host's layout, in this order; each holds the given number of tokens, followed by zeros.
    ///
    /// # Errors
    /// If the CPU's kernels do not cover such heads.
    pub fn pages<'a>(
        &self,
        shape: PageShape,
        pages: impl ExactSizeIterator<Item = (&'a [u8], usize)>,
    ) -> Result<PagePool> {
        let PageShape { n_kv_heads, head_dim, kv } = shape;
        let geometry = KvGeometry { n_layers: 1, n_kv_heads, head_dim, dtype: kv };
        // At least one page, because a pool of no bytes has no address.
        let n = pages.len().max(1);
        let mut lines = vec![Line::ZERO; n * shape.bytes() / 64].into_boxed_slice();
        for ((device, tokens), host) in pages.zip(lines_as_bytes(&mut lines).chunks_exact_mut(shape.bytes()))
        {
            shape.to_host(device, tokens, host);
        }
        let base = NonNull::from(&mut lines[..]).cast();
        // SAFETY: the lines stay in place when their box moves into the pool, which keeps them; nothing else refers to
        // them.
        unsafe { PagePool::over(geometry, n, base, size_of_val(&lines[..]), Box::new(lines)) }
    }

    /// Writes the normalised attention of `q` to `out`; both are `[rows][n_heads · head_dim]`. A model's sinks join it.
    ///
    /// # Errors
    /// If the CPU's kernels do not cover such heads.
    pub fn attend(
        &self,
        shape: &AttnShape,
        kv: &PagePool,
        seq: &SeqPages,
        q: &[f32],
        sinks: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<()> {
        let width = shape.n_heads * shape.head_dim;
        let out = RowsMut::new(out, width);
        let out = match sinks {
            None => AttnOut::Whole(out),
            Some(sinks) => AttnOut::WithSinks(out, sinks),
        };
        self.plans.with(shape, seq, |plan| {
            plan.run_rows(&self.pool, self.isa, &kv.layer(0), Rows::new(q, width), out)
        })
    }

    /// [`CpuKernels::attend`] before normalisation.
    ///
    /// # Errors
    /// As [`CpuKernels::attend`].
    pub fn attend_part(
        &self,
        shape: &AttnShape,
        kv: &PagePool,
        seq: &SeqPages,
        q: &[f32],
    ) -> Result<Partial> {
        let mut part = Partial::empty(seq.n_rows, shape.n_heads, shape.head_dim);
        self.plans
            .with(shape, seq, |plan| plan.run_partial(&self.pool, self.isa, &kv.layer(0), q, &mut part))?;
        Ok(part)
    }

    /// Attention of rows whose tokens before those of `seq` were attended elsewhere, with result `before`. The bits are
    /// those of attending all tokens here: sums are accumulated page after page, so `before` holds them as they were
    /// before the first of these pages.
    ///
    /// # Errors
    /// As [`CpuKernels::attend`].
    pub fn attend_rest(
        &self,
        shape: &AttnShape,
        kv: &PagePool,
        seq: &SeqPages,
        q: &[f32],
        before: Partial,
        sinks: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<()> {
        let mut parts = vec![before];
        let end = seq.tokens.end.min(seq.first_pos + seq.n_rows);
        for page in (seq.tokens.start..end).step_by(PAGE_TOKENS) {
            let one = SeqPages { tokens: page..page + PAGE_TOKENS, ..seq.clone() };
            parts.push(self.attend_part(shape, kv, &one, q)?);
        }
        merge_partials(&parts.iter().collect::<Vec<_>>(), shape.head_dim, sinks, out);
        Ok(())
    }
}
