//! Attention over host pages, complete or partial, and the output projection.

use std::ops::Range;

use super::{HostContext, HostStep, HostWorkspace, check_rows};
use crate::cache::LayerKv;
use crate::engine::prepare::Layer;
use crate::simd::attention::AttnOut;
use crate::simd::linear::{Out, linear_rows};
use crate::tensor::{Rows, RowsMut};

/// The destination of attention over all tokens, which a layer's sinks join.
pub(in crate::engine) fn whole<'a>(out: RowsMut<'a>, sinks: Option<&'a [f32]>) -> AttnOut<'a> {
    match sinks {
        None => AttnOut::Whole(out),
        Some(sinks) => AttnOut::WithSinks(out, sinks),
    }
}

impl HostContext<'_> {
    /// attn = attention of `rows` over the tokens that their sequences attend on the host ([`super::HostSeq::tokens`]).
    ///
    /// # Panics
    /// If `rows` are not rows of the step.
    pub fn attend(
        &self,
        ws: &mut HostWorkspace,
        step: &mut HostStep,
        layer: &Layer,
        kv: &LayerKv<'_>,
        rows: Range<usize>,
    ) {
        let out = whole(ws.attn.view_mut(rows.clone()), layer.sinks.as_deref());
        self.attend_rows(step, layer.windowed, kv, rows.clone(), ws.q.view(rows), out);
    }

    /// [`HostContext::attend`] for queries and results in other memory, or for partial results: `q` and `out` have a
    /// row for each of `rows`, in order. `windowed` says whether the layer has a window.
    ///
    /// # Panics
    /// If `rows` are not rows of the step, `q` or `out` has fewer, the step's pages end before the tokens, or the model has sinks that
    /// whole rows lack.
    pub fn attend_rows(
        &self,
        step: &mut HostStep,
        windowed: bool,
        kv: &LayerKv<'_>,
        rows: Range<usize>,
        q: Rows<'_>,
        out: AttnOut<'_>,
    ) {
        check_rows(step, &rows);
        // Parts are merged elsewhere, where sinks join.
        let sinks = match out {
            AttnOut::Whole(_) => Some(false),
            AttnOut::WithSinks(..) => Some(true),
            AttnOut::Partial(_) => None,
        };
        assert!(
            sinks.is_none_or(|with| with == self.model.spec.sinks),
            "attention without the sinks of its model"
        );
        let plan = step.plan(self.host, windowed, rows);
        plan.run_rows(self.pool, self.host.isa, kv, q, out);
    }

    /// delta = W·attn + bias.
    pub fn out_proj(&self, ws: &mut HostWorkspace, layer: &Layer, rows: Range<usize>) {
        let delta = &mut [Out { w: &layer.o, ldo: ws.delta.width(), out: ws.delta.rows_mut(rows.clone()) }];
        linear_rows(self.pool, self.host.mode, ws.attn.view(rows), &mut ws.acts, delta);
    }
}
