//! The feed-forward: dense, or experts ([`experts`](super::experts)).

use std::ops::Range;

use super::residual::{NormRows, Residual, norm_rows};
use super::{HostContext, HostWorkspace, each_row};
use crate::engine::prepare::{FeedForward, Layer, Mlp};
use crate::model::Ffn;
use crate::simd::Kernels;
use crate::simd::linear::{Acts, Out, linear, linear_rows};
use crate::tensor::RowsMut;

impl HostContext<'_> {
    /// hidden += residual; act = activation(W·norm(hidden) + bias), of the chosen experts if there are experts.
    pub fn ffn_up(&self, ws: &mut HostWorkspace, layer: &Layer, residual: Residual<'_>, rows: Range<usize>) {
        let (spec, n, k) = (&self.model.spec, rows.len(), self.host.kernels);
        let d = spec.d_model;
        let norm = NormRows {
            hidden: ws.hidden.view_mut(rows.clone()),
            delta: ws.delta.view_mut(rows.clone()),
            out: RowsMut::new(ws.acts.reset(n, d), d),
        };
        norm_rows(self.pool, k, spec.norm, layer.ffn_norm.as_ref(), residual, norm);
        match &layer.ffn {
            FeedForward::Dense(mlp) => {
                let (act, up) = (ws.act.rows_mut(rows.clone()), ws.up.rows_mut(rows));
                self.activations(mlp, &mut ws.acts, act, up);
            }
            FeedForward::Experts(mixture) => self.experts_up(ws, mixture, rows),
        }
    }

    /// delta = W·act + bias; of experts, the weighted sum.
    pub fn ffn_down(&self, ws: &mut HostWorkspace, layer: &Layer, rows: Range<usize>) {
        match &layer.ffn {
            FeedForward::Dense(mlp) => {
                let out = ws.delta.rows_mut(rows.clone());
                let delta = &mut [Out { w: &mlp.down, ldo: self.model.spec.d_model, out }];
                linear_rows(self.pool, self.host.mode, ws.act.view(rows), &mut ws.acts, delta);
            }
            FeedForward::Experts(mixture) => self.experts_down(ws, mixture, rows),
        }
    }

    /// act = activation(W·x + bias) of one feed-forward, in consecutive rows; `up` has as many, if there is a gate.
    pub(super) fn activations(&self, mlp: &Mlp, x: &mut Acts, act: &mut [f32], up: &mut [f32]) {
        let (ff, k) = (mlp.up.n(), self.host.kernels);
        let out = Out { w: mlp.gate.as_ref().unwrap_or(&mlp.up), out: &mut *act, ldo: ff };
        if mlp.gate.is_some() {
            let up = Out { w: &mlp.up, out: &mut *up, ldo: ff };
            linear(self.pool, self.host.mode, x, &mut [out, up]);
        } else {
            linear(self.pool, self.host.mode, x, &mut [out]);
        }
        let (ffn, up) = (self.model.spec.ffn, &*up);
        each_row(self.pool, RowsMut::new(act, ff), ff, |r, act| {
            activate(k, ffn, act, if mlp.gate.is_some() { &up[r * ff..(r + 1) * ff] } else { &[] });
        });
    }
}

/// The activation of a row, in place; `up` is the factor of a gated one.
pub(super) fn activate(k: &Kernels, ffn: Ffn, act: &mut [f32], up: &[f32]) {
    match ffn {
        Ffn::SwiGlu => k.silu_mul_inplace(act, up),
        Ffn::ClampedSwiGlu => k.clamped_swiglu_inplace(act, up),
        Ffn::GeGlu => k.gelu_tanh_mul_inplace(act, up),
        Ffn::Relu => k.relu(act),
    }
}
