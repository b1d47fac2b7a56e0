//! Rotary position embedding: pairs (a, b) become (a cos - b sin, b cos + a sin).
//!
//! layout     cos, sin  one value per pair, for one position (`RopeTable::cos_sin`)
//!            half         a = x[i], b = x[i + dim/2]: two straight streams
//!            interleaved  a = x[2i], b = x[2i + 1]: cos and sin doubled on load, x swapped in a register

use crate::reference;
use crate::rope::RopePairing;
use crate::simd::vector::{Simd, SimdOp};

/// Rotates the first `2·cos.len()` elements of each head of `head_dim` elements of `x`.
pub(crate) struct RopeHeads<'a> {
    pub x: &'a mut [f32],
    pub head_dim: usize,
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    pub pairing: RopePairing,
}

impl SimdOp for RopeHeads<'_> {
    type Output = ();

    fn reference(self) {
        reference::rope::rope_heads(self.x, self.head_dim, self.cos, self.sin, self.pairing)
    }

    #[inline(always)]
    fn vectors<S: Simd>(self, s: S) {
        let RopeHeads { x, head_dim, cos, sin, pairing } = self;
        assert!(cos.len() == sin.len() && 2 * cos.len() <= head_dim);
        for head in x.chunks_exact_mut(head_dim.max(1)) {
            match pairing {
                RopePairing::Half => half(s, head, cos, sin),
                RopePairing::Interleaved => interleaved(s, head, cos, sin),
            }
        }
    }
}

#[inline(always)]
fn half<S: Simd>(s: S, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let pairs = cos.len();
    let (pc, ps) = (cos.as_ptr(), sin.as_ptr());
    let (a, b) = head[..2 * pairs].split_at_mut(pairs);
    let (pa, pb) = (a.as_mut_ptr(), b.as_mut_ptr());
    let mut i = 0;
    // SAFETY: all four runs have `pairs` elements; accesses are at i..i + LANES <= pairs, or a tail.
    unsafe {
        while i + S::LANES <= pairs {
            let (c, n) = (s.load(pc.add(i)), s.load(ps.add(i)));
            let (ya, yb) = rotate(s, s.load(pa.add(i)), s.load(pb.add(i)), c, n);
            s.store(pa.add(i), ya);
            s.store(pb.add(i), yb);
            i += S::LANES;
        }
        let k = pairs - i;
        if k > 0 {
            let (c, n) = (s.load_tail(pc.add(i), k, 0.0), s.load_tail(ps.add(i), k, 0.0));
            let (va, vb) = (s.load_tail(pa.add(i), k, 0.0), s.load_tail(pb.add(i), k, 0.0));
            let (ya, yb) = rotate(s, va, vb, c, n);
            s.store_tail(pa.add(i), k, ya);
            s.store_tail(pb.add(i), k, yb);
        }
    }
}

#[inline(always)]
fn rotate<S: Simd>(s: S, a: S::F, b: S::F, cos: S::F, sin: S::F) -> (S::F, S::F) {
    let minus_sin = s.sub(s.splat(0.0), sin);
    (s.fma(a, cos, s.mul(b, minus_sin)), s.fma(b, cos, s.mul(a, sin)))
}

#[inline(always)]
fn interleaved<S: Simd>(s: S, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let pairs = cos.len();
    let head = &mut head[..2 * pairs];
    let p = head.as_mut_ptr();
    let step = S::LANES / 2;
    let mut i = 0;
    // SAFETY: i + LANES/2 <= pairs, so 2i + LANES <= head.len().
    unsafe {
        while i + step <= pairs {
            let (c, n) = (s.load_twice(cos.as_ptr().add(i)), s.load_twice(sin.as_ptr().add(i)));
            let x = s.load(p.add(2 * i));
            s.store(p.add(2 * i), s.fma_sub_add(x, c, s.mul(s.swap_pairs(x), n)));
            i += step;
        }
    }
    // The last few pairs; same operations, same rounding.
    for ((pair, &c), &n) in head[2 * i..].chunks_exact_mut(2).zip(&cos[i..]).zip(&sin[i..]) {
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a.mul_add(c, -(b * n));
        pair[1] = b.mul_add(c, a * n);
    }
}
