//! Norm, projection of queries, keys and values, their own norms, RoPE; storing keys and values in their pages.

use std::ops::Range;

use super::residual::{NormRows, Residual, norm_rows};
use super::{HostContext, HostStep, HostWorkspace, PARALLEL_ELEMENTS, ROWS_PER_CHUNK, check_rows, each_row};
use crate::cache::{KvElement, LayerKv};
use crate::engine::prepare::Layer;
use crate::simd::linear::{Out, linear};
use crate::tensor::Rows;

impl HostContext<'_> {
    /// hidden += residual; q, k, v = W·norm(hidden) + bias, norms of q and k, RoPE.
    ///
    /// # Panics
    /// If `rows` are not rows of the step.
    pub fn project(
        &self,
        ws: &mut HostWorkspace,
        step: &HostStep,
        layer: &Layer,
        residual: Residual<'_>,
        rows: Range<usize>,
    ) {
        check_rows(step, &rows);
        let (spec, n) = (&self.model.spec, rows.len());
        let (qd, kvd, hd) = (spec.q_dim(), spec.kv_dim(), spec.head_dim);
        let acts = &mut ws.acts;
        let norm = NormRows {
            hidden: ws.hidden.view_mut(rows.clone()),
            delta: ws.delta.view_mut(rows.clone()),
            out: crate::tensor::RowsMut::new(acts.reset(n, spec.d_model), spec.d_model),
        };
        norm_rows(self.pool, self.host.kernels, spec.norm, layer.attn_norm.as_ref(), residual, norm);
        let outs = &mut [
            Out { w: &layer.q, out: ws.q.rows_mut(rows.clone()), ldo: qd },
            Out { w: &layer.k, out: ws.k.rows_mut(rows.clone()), ldo: kvd },
            Out { w: &layer.v, out: ws.v.rows_mut(rows.clone()), ldo: kvd },
        ];
        linear(self.pool, self.host.mode, acts, outs);
        let rope = self.host.rope(layer.windowed);
        if rope.is_none() && layer.q_norm.is_none() && layer.k_norm.is_none() {
            return;
        }
        let (kernels, eps, pairing) = (self.host.kernels, spec.norm.eps(), self.host.pairing);
        let positions = step.positions(&rows);
        let (q, k) = (ws.q.view_mut(rows.clone()), ws.k.view_mut(rows));
        each_row(self.pool, (q, k), qd + kvd, |r, (q, k)| {
            // Weights of one head: each head is normed. Weights of a row: the row is.
            if let Some(w) = &layer.q_norm {
                kernels.rms_norm_heads(q, w, eps);
            }
            if let Some(w) = &layer.k_norm {
                kernels.rms_norm_heads(k, w, eps);
            }
            if let Some(rope) = rope {
                let (cos, sin) = rope.at(positions[r]);
                kernels.rope_heads(q, spec.n_heads, hd, cos, sin, pairing);
                kernels.rope_heads(k, spec.n_kv_heads, hd, cos, sin, pairing);
            }
        });
    }

    /// Stores keys and values of `rows` in their pages in `kv`.
    ///
    /// # Panics
    /// If `rows` are not rows of the step.
    pub fn append(&self, ws: &HostWorkspace, step: &HostStep, kv: &LayerKv<'_>, rows: Range<usize>) {
        let (k, v) = (ws.k.view(rows.clone()), ws.v.view(rows.clone()));
        self.append_from(step, kv, rows, k, v);
    }

    /// [`HostContext::append`] for keys and values in other memory: `k` and `v` have a row for each of `rows`, in
    /// order.
    ///
    /// # Panics
    /// If `rows` are not rows of the step, or the step's pages end before them.
    pub fn append_from<T: KvElement>(
        &self,
        step: &HostStep,
        kv: &LayerKv<'_>,
        rows: Range<usize>,
        k: Rows<'_, T>,
        v: Rows<'_, T>,
    ) {
        check_rows(step, &rows);
        assert!(
            k.len() >= rows.len() && v.len() >= rows.len(),
            "{} rows, keys of {}, values of {}",
            rows.len(),
            k.len(),
            v.len()
        );
        let positions = step.positions(&rows);
        let n = rows.len();
        let parallel = n * (k.width() + v.width()) >= PARALLEL_ELEMENTS;
        self.pool.run_if(parallel, n.div_ceil(ROWS_PER_CHUNK), &|chunk, _| {
            for r in chunk * ROWS_PER_CHUNK..((chunk + 1) * ROWS_PER_CHUNK).min(n) {
                let pages = step.pages_of(rows.start + r);
                // SAFETY: sequences of a step never share pages, and each (sequence, position) is one row.
                unsafe { kv.append(pages, positions[r], k.row(r), v.row(r)) };
            }
        });
    }
}
