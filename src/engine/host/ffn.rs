//! The feed-forward.

use std::ops::Range;

use super::residual::{NormRows, Residual, norm_rows};
use super::{HostContext, HostWorkspace, each_row};
use crate::engine::prepare::Layer;
use crate::model::Ffn;
use crate::simd::linear::{Out, linear, linear_rows};
use crate::tensor::RowsMut;

impl HostContext<'_> {
    /// hidden += residual; act = activation(W·norm(hidden) + bias).
    pub fn ffn_up(&self, ws: &mut HostWorkspace, layer: &Layer, residual: Residual<'_>, rows: Range<usize>) {
        let (spec, n, k) = (&self.model.spec, rows.len(), self.host.kernels);
        let (d, ff) = (spec.d_model, spec.d_ff);
        let norm = NormRows {
            hidden: ws.hidden.view_mut(rows.clone()),
            delta: ws.delta.view_mut(rows.clone()),
            out: RowsMut::new(ws.acts.reset(n, d), d),
        };
        norm_rows(self.pool, k, spec.norm, layer.ffn_norm.as_ref(), residual, norm);
        let act =
            Out { w: layer.gate.as_ref().unwrap_or(&layer.up), out: ws.act.rows_mut(rows.clone()), ldo: ff };
        if layer.gate.is_some() {
            let up = Out { w: &layer.up, out: ws.up.rows_mut(rows.clone()), ldo: ff };
            linear(self.pool, self.host.mode, &mut ws.acts, &mut [act, up]);
        } else {
            linear(self.pool, self.host.mode, &mut ws.acts, &mut [act]);
        }
        let (act, up) = (ws.act.view_mut(rows.clone()), &ws.up);
        each_row(self.pool, act, ff, |r, act| {
            let up = || up.rows(rows.start + r..rows.start + r + 1);
            match spec.ffn {
                Ffn::SwiGlu => k.silu_mul_inplace(act, up()),
                Ffn::GeGlu => k.gelu_tanh_mul_inplace(act, up()),
                Ffn::Relu => k.relu(act),
            }
        });
    }

    /// delta = W·act + bias.
    pub fn ffn_down(&self, ws: &mut HostWorkspace, layer: &Layer, rows: Range<usize>) {
        let delta =
            &mut [Out { w: &layer.down, ldo: ws.delta.width(), out: ws.delta.rows_mut(rows.clone()) }];
        linear_rows(self.pool, self.host.mode, ws.act.view(rows), &mut ws.acts, delta);
    }
}
