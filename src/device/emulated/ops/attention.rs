//! Attention of rows over pages, in full or in part, and the merge of parts.
//!
//!   m = max e_t,  s = Σ exp(e_t − m),  o = Σ exp(e_t − m)·v_t,  e_t = cap(scale·q·k_t);   out = o / s
//!   cap(e) = e, or c·tanh(e/c);   a sink e_0 of the head adds exp(e_0 − m) to s when a row is normalised

use std::ops::Range;

use super::linear::dot;
use super::pages::PageShape;
use crate::cache::PAGE_TOKENS;

/// One KV head's keys and values of consecutive tokens, as floats.
pub struct Tokens {
    first: usize,
    head_dim: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Tokens {
    /// Reads `tokens`; `page(i)` is the device's page of tokens `32·i..`.
    pub fn read<'a>(
        shape: &PageShape,
        head: usize,
        tokens: Range<usize>,
        page: impl Fn(usize) -> &'a [u8],
    ) -> Tokens {
        let hd = shape.head_dim;
        let mut sides = [Vec::new(), Vec::new()];
        for (value, side) in [false, true].into_iter().zip(&mut sides) {
            for t in tokens.clone() {
                shape.read(page(t / PAGE_TOKENS), head, value, t % PAGE_TOKENS, side);
            }
        }
        let [k, v] = sides;
        Tokens { first: tokens.start, head_dim: hd, k, v }
    }

    /// Unnormalised attention of one head's query over `tokens` (some of those read). Writes `o` and returns (m, s).
    /// Without tokens these are zeros and (−∞, 0).
    pub fn attend(
        &self,
        tokens: Range<usize>,
        (scale, softcap): (f32, Option<f32>),
        q: &[f32],
        o: &mut [f32],
    ) -> (f32, f32) {
        let hd = self.head_dim;
        let at = |t: usize| (t - self.first) * hd..(t - self.first + 1) * hd;
        let dot = dot();
        let capped = |e: f32| softcap.map_or(e, |cap| cap * (e / cap).tanh());
        let scores: Vec<f32> = tokens.clone().map(|t| capped(scale * dot(q, &self.k[at(t)]))).collect();
        let m = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        o.fill(0.0);
        let mut s = 0.0;
        for (t, e) in tokens.zip(scores) {
            let p = (e - m).exp();
            s += p;
            for (o, &v) in o.iter_mut().zip(&self.v[at(t)]) {
                *o += p * v;
            }
        }
        (m, s)
    }
}

/// The tokens that a query at `pos` sees, from `from` on and within the window.
pub fn seen(pos: usize, from: usize, window: Option<usize>) -> Range<usize> {
    let first = window.map_or(0, |w| (pos + 1).saturating_sub(w)).max(from);
    first.min(pos + 1)..pos + 1
}

/// Divides by the sum, which a sink joins; the result is 0 if no token was seen.
pub fn normalise((m, s): (f32, f32), sink: Option<f32>, o: &mut [f32]) {
    let (s, factor) = match sink {
        Some(sink) if s != 0.0 => {
            let top = m.max(sink);
            (s * (m - top).exp() + (sink - top).exp(), (m - top).exp())
        }
        _ => (s, 1.0),
    };
    let by = if s == 0.0 { 0.0 } else { factor / s };
    o.iter_mut().for_each(|o| *o *= by);
}

/// Merges a partial result over other tokens into `(m, s, o)`.
pub fn merge(acc: (&mut f32, &mut f32, &mut [f32]), part: (f32, f32, &[f32])) {
    let (m, s, o) = acc;
    let top = m.max(part.0);
    if top == f32::NEG_INFINITY {
        return;
    }
    let (a, b) = ((*m - top).exp(), (part.0 - top).exp());
    *m = top;
    *s = *s * a + part.1 * b;
    for (o, &x) in o.iter_mut().zip(part.2) {
        *o = *o * a + x * b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_counts_the_query_itself() {
        assert_eq!(seen(9, 0, None), 0..10);
        assert_eq!(seen(9, 0, Some(4)), 6..10);
        assert_eq!(seen(2, 0, Some(4)), 0..3);
        assert_eq!(seen(9, 8, Some(4)), 8..10);
        assert_eq!(seen(9, 32, None), 10..10, "all of it is elsewhere");
    }

    #[test]
    fn parts_merge_to_the_whole() {
        let hd = 4;
        let k: Vec<f32> = (0..40).map(|i| (i * 7 % 11) as f32 / 4.0 - 1.0).collect();
        let v: Vec<f32> = (0..40).map(|i| (i * 5 % 13) as f32 - 6.0).collect();
        let tokens = Tokens { first: 0, head_dim: hd, k, v };
        let q = [0.5, -1.0, 0.25, 2.0];
        let part = |r: Range<usize>| {
            let mut o = vec![f32::NAN; hd];
            let (m, s) = tokens.attend(r, (0.5, None), &q, &mut o);
            (m, s, o)
        };
        let whole = part(0..10);
        let (mut m, mut s, mut o) = part(0..0);
        assert_eq!((m, s, &o[..]), (f32::NEG_INFINITY, 0.0, &[0.0; 4][..]));
        for r in [3..3, 0..3, 3..9, 9..10] {
            let p = part(r);
            merge((&mut m, &mut s, &mut o), (p.0, p.1, &p.2));
        }
        assert_eq!(m, whole.0);
        // Ten terms, each rescaled at most three times, with a few roundings each.
        let eps = 10.0 * 4.0 * f32::EPSILON;
        assert!((s - whole.1).abs() <= eps * whole.1, "{s} {}", whole.1);
        let bound: f32 = eps * 6.0 * whole.1;
        assert!(o.iter().zip(&whole.2).all(|(a, b)| (a - b).abs() <= bound), "{o:?} {:?}", whole.2);
        let whole_ms = (m, s);
        // A sink is one more part, without a value.
        for sink in [2.0, -200.0, 200.0, f32::NEG_INFINITY] {
            let (mut m, mut s, mut want) = (m, s, o.clone());
            if sink > f32::NEG_INFINITY {
                merge((&mut m, &mut s, &mut want), (sink, 1.0, &[0.0; 4]));
            }
            normalise((m, s), None, &mut want);
            let mut row = o.clone();
            normalise(whole_ms, Some(sink), &mut row);
            assert!(row.iter().zip(&want).all(|(a, b)| (a - b).abs() <= eps * 6.0), "{row:?} {want:?}");
        }
        normalise((m, 0.0), Some(1.0), &mut o);
        assert_eq!(o, [0.0; 4]);
    }
}
