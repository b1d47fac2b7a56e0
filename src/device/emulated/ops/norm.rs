//! The residual stream and its norms.

use crate::model::Norm;
use crate::simd::Kernels;

/// A row to add to the residual stream, and the weights of its own norm (empty: none).
#[derive(Clone, Copy)]
pub struct Delta<'a> {
    /// `[d]`.
    pub row: &'a [f32],
    /// `[d]`, or empty.
    pub post: &'a [f32],
}

/// hidden += delta, for one row.
pub fn add(kernels: &Kernels, norm: Norm, hidden: &mut [f32], delta: Delta<'_>) {
    if delta.post.is_empty() {
        return kernels.add(hidden, delta.row);
    }
    let mut normed = delta.row.to_vec();
    kernels.rms_norm_heads(&mut normed, delta.post, norm.eps());
    kernels.add(hidden, &normed);
}

/// out = norm(hidden), for one row; hidden itself without weights.
pub fn norm(kernels: &Kernels, norm: Norm, hidden: &[f32], w: &[f32], b: &[f32], out: &mut [f32]) {
    if w.is_empty() {
        return out.copy_from_slice(hidden);
    }
    match norm {
        Norm::Rms { eps } => kernels.rms_norm(hidden, w, eps, out),
        Norm::Layer { eps } if b.is_empty() => kernels.layer_norm(hidden, w, &vec![0.0; w.len()], eps, out),
        Norm::Layer { eps } => kernels.layer_norm(hidden, w, b, eps, out),
    }
}
