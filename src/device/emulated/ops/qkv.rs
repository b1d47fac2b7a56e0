//! Prepares a row of q|k|v for attention: biases, norms of q and k, RoPE.

use crate::model::RopePairing;
use crate::simd::Kernels;

/// Heads of queries and keys, with the bias, norms and RoPE that they receive.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// h_a.
    pub n_heads: usize,
    /// h_kv.
    pub n_kv_heads: usize,
    /// d_h.
    pub head_dim: usize,
    /// Bias of q|k|v, or empty.
    pub bias: &'a [f32],
    /// `[head_dim]`: each head is normed; `[n_heads * head_dim]`: all together; or empty.
    pub q_norm: &'a [f32],
    /// See `q_norm`.
    pub k_norm: &'a [f32],
    /// Epsilon of the norms.
    pub eps: f32,
    /// Pairs of RoPE.
    pub pairing: RopePairing,
}

/// Applies bias, norms and RoPE to one row of q|k|v; `cos` and `sin` are those of its position (empty: no RoPE).
pub fn finish(kernels: &Kernels, h: &Heads<'_>, row: &mut [f32], cos: &[f32], sin: &[f32]) {
    if !h.bias.is_empty() {
        kernels.add(row, h.bias);
    }
    let (q, kv) = row.split_at_mut(h.n_heads * h.head_dim);
    let k = &mut kv[..h.n_kv_heads * h.head_dim];
    for (x, norm, n) in [(q, h.q_norm, h.n_heads), (k, h.k_norm, h.n_kv_heads)] {
        if !norm.is_empty() {
            kernels.rms_norm_heads(x, norm, h.eps);
        }
        if !cos.is_empty() {
            kernels.rope_heads(x, n, h.head_dim, cos, sin, h.pairing);
        }
    }
}
