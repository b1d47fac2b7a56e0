//! Partial results of attention, and merging them.
//!
//!   m' = max(m, m₂);  s' = e^{m−m'}·s + e^{m₂−m'}·s₂;  o' = e^{m−m'}·o + e^{m₂−m'}·o₂;  out = o / s
//!
//! A part with nothing visible is (−∞, 0, 0), and merging it changes nothing. The same merge joins the
//! segments of one row, the threads that split a row, and devices that hold different pages of it.

use crate::simd::exp::exp1;
use crate::tensor::RowsMut;

/// Attention of some rows over some of their tokens, not yet normalised.
#[derive(Debug, Clone, PartialEq)]
pub struct Partial {
    /// `[rows][n_heads]`: the largest score; −∞ where nothing was visible.
    pub m: Vec<f32>,
    /// `[rows][n_heads]`: Σ exp(score − m).
    pub s: Vec<f32>,
    /// `[rows][n_heads · head_dim]`: Σ exp(score − m)·v.
    pub o: Vec<f32>,
}

impl Partial {
    /// A partial result of `rows` rows with `n_heads` heads of `head_dim` that has seen no token.
    pub fn empty(rows: usize, n_heads: usize, head_dim: usize) -> Partial {
        let n = rows * n_heads;
        Partial { m: vec![f32::NEG_INFINITY; n], s: vec![0.0; n], o: vec![0.0; n * head_dim] }
    }

    /// Mutable access, for rows with `n_heads` heads of `head_dim`.
    pub fn rows_mut(&mut self, n_heads: usize, head_dim: usize) -> PartialMut<'_> {
        PartialMut {
            m: RowsMut::new(&mut self.m, n_heads),
            s: RowsMut::new(&mut self.s, n_heads),
            o: RowsMut::new(&mut self.o, n_heads * head_dim),
        }
    }
}

/// The parts of a [`Partial`], whose rows may lie anywhere.
#[derive(Debug)]
pub struct PartialMut<'a> {
    /// Rows of `n_heads` elements.
    pub m: RowsMut<'a>,
    /// Rows of `n_heads` elements.
    pub s: RowsMut<'a>,
    /// Rows of `n_heads · head_dim` elements.
    pub o: RowsMut<'a>,
}

/// The destination of attention's results, and their form.
#[derive(Debug)]
pub enum AttnOut<'a> {
    /// Normalised rows of `n_heads · head_dim` elements: no other tokens are attended elsewhere.
    Whole(RowsMut<'a>),
    /// The same with a sink in each head, a logit that takes part in the softmax and has no value; `[n_heads]`.
    ///
    /// A sink joins when a row is normalised, once, after all its parts were merged. Partial results therefore have none.
    WithSinks(RowsMut<'a>, &'a [f32]),
    /// Not normalised: other tokens are attended elsewhere.
    Partial(PartialMut<'a>),
}

/// Adds `part` to `acc`. Always inlined, so that each tier compiles it with its own instructions (but
/// never with fused operations: Rust does not contract).
#[inline(always)]
pub(super) fn merge_body(acc: (&mut f32, &mut f32, &mut [f32]), part: (f32, f32, &[f32])) {
    let (m, s, o) = acc;
    let (m2, s2, o2) = part;
    // The part with the larger maximum keeps its scale. (−∞ − −∞ would be NaN: equal ones are told apart first.)
    let fall = if m2 == *m { 1.0 } else { exp1(-(m2 - *m).abs()) };
    let (a, b) = if m2 > *m { (fall, 1.0) } else { (1.0, fall) };
    *m = if m2 > *m { m2 } else { *m };
    *s = *s * a + s2 * b;
    for (o, &o2) in o.iter_mut().zip(o2) {
        *o = *o * a + o2 * b;
    }
}

/// Divides by the sum; without a visible token the result is 0. Adding +0 turns −0 into +0, the only trace that
/// multiplications by an exact 0 (masked tokens) can leave.
#[inline(always)]
pub(super) fn normalise(s: f32, o: &[f32], mut out: impl FnMut(usize, f32)) {
    let inv = if s == 0.0 { 0.0 } else { 1.0 / s };
    for (d, &o) in o.iter().enumerate() {
        out(d, o * inv + 0.0);
    }
}

/// The (m, s) of a row whose softmax also has `sink`, and the factor that `o` gets for it.
///
///   m' = max(m, sink);  s' = e^{m−m'}·s + e^{sink−m'};  o' = e^{m−m'}·o
#[inline(always)]
pub(super) fn with_sink((m, s): (f32, f32), sink: f32) -> (f32, f32, f32) {
    let (mut m, mut s, mut factor) = (m, s, [1.0]);
    merge_body((&mut m, &mut s, &mut factor), (sink, 1.0, &[0.0]));
    (m, s, factor[0])
}

/// Merges parts that saw disjoint tokens of the same rows, in the order given, and writes the normalised
/// attention `[rows][n_heads · head_dim]` into `out`. A model's `sinks`, `[n_heads]`, join here, as in [`AttnOut::WithSinks`].
///
/// # Panics
/// If the parts or `out` differ in shape, or there are no parts.
pub fn merge_partials(parts: &[&Partial], head_dim: usize, sinks: Option<&[f32]>, out: &mut [f32]) {
    let mut acc = (*parts.first().expect("at least one part")).clone();
    assert!(
        acc.o.len() == acc.m.len() * head_dim && out.len() == acc.o.len(),
        "{} rows x heads of {head_dim}, o of {}, out of {}",
        acc.m.len(),
        acc.o.len(),
        out.len()
    );
    for part in &parts[1..] {
        assert!(
            part.m.len() == acc.m.len() && part.s.len() == acc.s.len() && part.o.len() == acc.o.len(),
            "parts of {} and {} rows x heads",
            acc.m.len(),
            part.m.len()
        );
        for (r, o) in acc.o.chunks_exact_mut(head_dim).enumerate() {
            let o2 = &part.o[r * head_dim..(r + 1) * head_dim];
            merge_body((&mut acc.m[r], &mut acc.s[r], o), (part.m[r], part.s[r], o2));
        }
    }
    for (r, o) in acc.o.chunks_exact_mut(head_dim).enumerate() {
        let mut s = acc.s[r];
        if let Some(sinks) = sinks {
            let factor;
            (_, s, factor) = with_sink((acc.m[r], s), sinks[r % sinks.len()]);
            o.iter_mut().for_each(|o| *o *= factor);
        }
        normalise(s, o, |d, x| out[r * head_dim + d] = x);
    }
}
