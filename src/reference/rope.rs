//! Rotary position embedding.

use crate::rope::RopePairing;

/// Rotates the first `2·cos.len()` elements of each head of `head_dim` elements.
pub fn rope_heads(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], pairing: RopePairing) {
    let pairs = cos.len();
    for head in x.chunks_exact_mut(head_dim.max(1)) {
        for i in 0..pairs {
            let (ia, ib) = match pairing {
                RopePairing::Half => (i, i + pairs),
                RopePairing::Interleaved => (2 * i, 2 * i + 1),
            };
            let (a, b) = (head[ia] as f64, head[ib] as f64);
            let (c, s) = (cos[i] as f64, sin[i] as f64);
            head[ia] = (a * c - b * s) as f32;
            head[ib] = (b * c + a * s) as f32;
        }
    }
}
