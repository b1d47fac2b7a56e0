//! Attention of one query head over a range of cached tokens, in f64.
//!
//!   m = max e_t,  s = Σ exp(e_t − m),  o = Σ exp(e_t − m)·v_t,  e_t = scale·q·k_t, or cap·tanh(scale·q·k_t / cap);   out = o / s
//!
//! Two passes, no online rescaling, one token at a time through the cache's checked accessors.

use std::ops::Range;

use crate::cache::{LayerKv, PAGE_TOKENS};

/// Unnormalised attention of query `q` (one head) over `tokens` of the sequence with `pages`; its scores are scaled, then
/// soft-capped. Writes
/// Σ exp(e − m)·v into `o` and returns (m, s). No tokens, or scores of −∞ only: (−∞, 0) and zeroes.
pub fn segment(
    kv: &LayerKv<'_>,
    pages: &[u32],
    kv_head: usize,
    tokens: Range<usize>,
    (scale, softcap): (f32, Option<f32>),
    q: &[f32],
    o: &mut [f32],
) -> (f32, f32) {
    assert!(q.len() == kv.head_dim() && o.len() == kv.head_dim(), "q {}, o {}", q.len(), o.len());
    let scores: Vec<f64> = tokens
        .clone()
        .map(|t| {
            let (page, slot) = (pages[t / PAGE_TOKENS], t % PAGE_TOKENS);
            let dot: f64 =
                q.iter().enumerate().map(|(d, &q)| q as f64 * kv.key(page, kv_head, slot, d) as f64).sum();
            let e = dot * scale as f64;
            softcap.map_or(e, |cap| cap as f64 * (e / cap as f64).tanh())
        })
        .collect();
    let m = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    let mut acc = vec![0.0f64; o.len()];
    if m > f64::NEG_INFINITY {
        for (t, e) in tokens.zip(scores) {
            let (page, slot) = (pages[t / PAGE_TOKENS], t % PAGE_TOKENS);
            let p = (e - m).exp();
            sum += p;
            for (d, acc) in acc.iter_mut().enumerate() {
                *acc += p * kv.value(page, kv_head, slot, d) as f64;
            }
        }
    }
    for (o, acc) in o.iter_mut().zip(acc) {
        *o = acc as f32;
    }
    (m as f32, sum as f32)
}
