//! The residual stream and its norms.
//!
//!   hidden += post(delta);  x = norm(hidden)
//!
//! A sublayer leaves its output in delta; the next norm adds it, while the row is in the caches anyway.

use std::ops::Range;

use super::{HostContext, HostWorkspace, each_row};
use crate::engine::prepare::{Layer, NormWeight};
use crate::host::Pool;
use crate::model::Norm;
use crate::simd::Kernels;
use crate::tensor::RowsMut;

/// The last sublayer's output, which is still to be added to the residual stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Residual<'a> {
    /// Nothing (before the first sublayer, or after [`HostContext::add_residual`]).
    None,
    /// `delta`.
    Delta,
    /// `delta`, normed with these weights first.
    Normed(&'a [f32]),
}

impl<'a> Residual<'a> {
    /// `delta`, through the norm `post` if the family has one.
    pub fn after(post: Option<&'a [f32]>) -> Residual<'a> {
        post.map_or(Residual::Delta, Residual::Normed)
    }

    /// The row to add, if any, normed in place.
    fn of<'d>(self, k: &Kernels, eps: f32, delta: &'d mut [f32]) -> Option<&'d [f32]> {
        match self {
            Residual::None => None,
            Residual::Delta => Some(delta),
            Residual::Normed(w) => {
                k.rms_norm_heads(delta, w, eps);
                Some(delta)
            }
        }
    }
}

impl Layer {
    /// The residual that [`HostContext::out_proj`] leaves.
    ///
    /// [`HostContext::out_proj`]: super::HostContext::out_proj
    pub fn after_attention(&self) -> Residual<'_> {
        Residual::after(self.post_attn.as_deref())
    }

    /// The residual that [`HostContext::ffn_down`] leaves.
    ///
    /// [`HostContext::ffn_down`]: super::HostContext::ffn_down
    pub fn after_ffn(&self) -> Residual<'_> {
        Residual::after(self.post_ffn.as_deref())
    }
}

/// Rows of the residual stream, the rows added to them, and the destination of their norms.
pub(super) struct NormRows<'a> {
    pub hidden: RowsMut<'a>,
    pub delta: RowsMut<'a>,
    pub out: RowsMut<'a>,
}

/// hidden += residual; out = norm(hidden), or hidden itself without a norm.
pub(super) fn norm_rows(
    pool: &Pool,
    k: &Kernels,
    norm: Norm,
    w: Option<&NormWeight>,
    residual: Residual<'_>,
    rows: NormRows<'_>,
) {
    let (eps, width) = (norm.eps(), rows.hidden.width());
    each_row(pool, (rows.hidden, rows.delta, rows.out), width, |_, (h, delta, out)| {
        let delta = residual.of(k, eps, delta);
        let Some(w) = w else {
            if let Some(delta) = delta {
                k.add(h, delta);
            }
            return out.copy_from_slice(h);
        };
        match (norm, delta) {
            (Norm::Rms { .. }, Some(delta)) => k.add_rms_norm(h, delta, &w.w, eps, out),
            (Norm::Rms { .. }, None) => k.rms_norm(h, &w.w, eps, out),
            (Norm::Layer { .. }, delta) => {
                if let Some(delta) = delta {
                    k.add(h, delta);
                }
                k.layer_norm(h, &w.w, w.b.as_deref().expect("checked when prepared"), eps, out);
            }
        }
    });
}

impl HostContext<'_> {
    /// hidden += residual, so that hidden alone is complete before rows cross to an accelerator. The following norm,
    /// with [`Residual::None`], gives the same bits as if it had done the addition.
    pub fn add_residual(&self, ws: &mut HostWorkspace, residual: Residual<'_>, rows: Range<usize>) {
        let (k, eps) = (self.host.kernels, self.model.spec.norm.eps());
        let (hidden, delta) = (ws.hidden.view_mut(rows.clone()), ws.delta.view_mut(rows));
        let width = hidden.width();
        each_row(self.pool, (hidden, delta), width, |_, (h, delta)| {
            if let Some(delta) = residual.of(k, eps, delta) {
                k.add(h, delta);
            }
        });
    }
}
