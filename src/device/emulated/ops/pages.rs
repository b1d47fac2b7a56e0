//! Pages of keys and values in the device's and the host's layout.
//!
//! device  `[kv_head][K, V][32 tokens][head_dim]`
//! host    `[kv_head]`: K `[2][head_dim/2][16 tokens][2]`, V `[16][head_dim][2 tokens]` (see [`crate::cache`])

use crate::cache::PAGE_TOKENS;

/// A CPU cache line, to which the host's pages are aligned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Line(pub [u16; 32]);

/// Sizes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageShape {
    /// h_kv.
    pub n_kv_heads: usize,
    /// d_h.
    pub head_dim: usize,
}

impl PageShape {
    /// Elements of one page of one layer.
    pub fn len(&self) -> usize {
        self.n_kv_heads * 2 * PAGE_TOKENS * self.head_dim
    }

    /// Whether a page has no elements; never true for a model's heads.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Index of a token's `head_dim` elements in the device's page.
    pub fn at(&self, head: usize, value: bool, token: usize) -> usize {
        ((head * 2 + value as usize) * PAGE_TOKENS + token) * self.head_dim
    }

    /// Index of a token's element `d` in the host's page.
    pub fn host_at(&self, head: usize, value: bool, token: usize, d: usize) -> usize {
        let hd = self.head_dim;
        let within = match value {
            false => (token / 16 * (hd / 2) + d / 2) * 32 + token % 16 * 2 + d % 2,
            true => (token / 2 * hd + d) * 2 + token % 2,
        };
        self.at(head, value, 0) + within
    }

    /// Calls `f(token, device's index, host's index)` for every element.
    pub fn each(&self, mut f: impl FnMut(usize, usize, usize)) {
        for head in 0..self.n_kv_heads {
            for token in 0..PAGE_TOKENS {
                let (k, v) = (self.at(head, false, token), self.at(head, true, token));
                // The same indices as `host_at`, pair by pair.
                let (host_k, host_v) =
                    (self.host_at(head, false, token, 0), self.host_at(head, true, token, 0));
                for pair in 0..self.head_dim / 2 {
                    let d = 2 * pair;
                    f(token, k + d, host_k + 32 * pair);
                    f(token, k + d + 1, host_k + 32 * pair + 1);
                    f(token, v + d, host_v + 2 * d);
                    f(token, v + d + 1, host_v + 2 * d + 2);
                }
            }
        }
    }

    /// Copies the first tokens of the device's page to `host`, which must hold zeros, in the host's layout. The indices
    /// are those of [`PageShape::each`], line by line.
    pub fn to_host(&self, device: &[u16], tokens: usize, host: &mut [Line]) {
        let (hd, tokens) = (self.head_dim, tokens.min(PAGE_TOKENS));
        for head in 0..self.n_kv_heads {
            let of = |value| self.at(head, value, 0)..self.at(head, value, tokens);
            let keys = &mut host[self.at(head, false, 0) / 32..][..PAGE_TOKENS * hd / 32];
            // Each line holds a pair of elements of 16 tokens.
            for (token, key) in device[of(false)].chunks_exact(hd).enumerate() {
                let lines = keys[token / 16 * (hd / 2)..].iter_mut();
                for (line, pair) in lines.zip(key.chunks_exact(2)) {
                    line.0[token % 16 * 2..][..2].copy_from_slice(pair);
                }
            }
            // Each pair holds one element of two tokens.
            let values = &mut host[self.at(head, true, 0) / 32..][..PAGE_TOKENS * hd / 32];
            for (token, value) in device[of(true)].chunks_exact(hd).enumerate() {
                let lines = values[token / 2 * hd / 16..].iter_mut();
                for (line, some) in lines.zip(value.chunks(16)) {
                    for (i, &x) in some.iter().enumerate() {
                        line.0[2 * i + token % 2] = x;
                    }
                }
            }
        }
    }

    /// Stores one token's keys and values (`[kv_heads · head_dim]` each) in the device's page.
    pub fn append(&self, page: &mut [u16], token: usize, k: &[u16], v: &[u16]) {
        let hd = self.head_dim;
        for (value, x) in [(false, k), (true, v)] {
            for (head, x) in x.chunks_exact(hd).enumerate() {
                let at = self.at(head, value, token);
                page[at..at + hd].copy_from_slice(x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{KvGeometry, PagePool};
    use crate::tensor::Half;

    /// The host's layout equals the one that the host's own appends write.
    #[test]
    fn host_pages_are_those_of_the_cache() {
        let shape = PageShape { n_kv_heads: 2, head_dim: 16 };
        let geometry = KvGeometry { n_layers: 1, n_kv_heads: 2, head_dim: 16, dtype: Half::BF16 };
        let pool = PagePool::new(geometry, 1).unwrap();
        let layer = pool.layer(0);
        let mut device = vec![0u16; shape.len()];
        for token in 0..PAGE_TOKENS {
            // All values are exact in bf16 and different.
            let row = |kind: usize| -> Vec<f32> {
                (0..32)
                    .map(|i| ((kind * 32 + token) % 64 * 4 + i / 8) as f32 + (i % 8) as f32 * 256.0)
                    .collect()
            };
            let (k, v) = (row(0), row(1));
            let half =
                |x: &[f32]| -> Vec<u16> { x.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect() };
            shape.append(&mut device, token, &half(&k), &half(&v));
            // SAFETY: there is one writer, and nothing reads meanwhile.
            unsafe { layer.append(&[0], token, &k, &v) };
        }
        let mut host = vec![0u16; shape.len()];
        let mut n = 0;
        shape.each(|token, d, h| {
            n += 1;
            host[h] = device[d];
            let (head, value) = (d / shape.at(1, false, 0), d / shape.at(0, true, 0) % 2 == 1);
            assert_eq!(h, shape.host_at(head, value, token, d % 16));
        });
        assert_eq!(n, shape.len());
        for tokens in [0, 1, 2, 15, 16, 17, 31, 32, 96] {
            let mut lines = vec![Line::default(); shape.len() / 32];
            shape.to_host(&device, tokens, &mut lines);
            shape.each(|token, d, h| {
                let want = if token < tokens { device[d] } else { 0 };
                assert_eq!(lines[h / 32].0[h % 32], want, "token {token} of {tokens}");
            });
        }
        // SAFETY: the layer's one page, written above and alive.
        let want = unsafe { std::slice::from_raw_parts(layer.k_ptr(0, 0), shape.len()) };
        assert_eq!(host, want);
    }
}
