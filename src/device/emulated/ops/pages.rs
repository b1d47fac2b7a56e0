//! Pages of keys and values: the device's layout, and the host's.
//!
//! device  `[kv_head][K, V][32 tokens][head_dim]`
//! host    `[kv_head]`: K `[2][head_dim/2][16 tokens][2]`, V `[16][head_dim][2 tokens]` (see [`crate::cache`])

use crate::cache::PAGE_TOKENS;

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

    /// Never, for a model's heads.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the `head_dim` elements of a token are in the device's page.
    pub fn at(&self, head: usize, value: bool, token: usize) -> usize {
        ((head * 2 + value as usize) * PAGE_TOKENS + token) * self.head_dim
    }

    /// Where element `d` of a token is in the host's page.
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
            for value in [false, true] {
                for token in 0..PAGE_TOKENS {
                    for d in 0..self.head_dim {
                        f(token, self.at(head, value, token) + d, self.host_at(head, value, token, d));
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
    use crate::cache::{KvDType, KvGeometry, PagePool};

    /// The host's layout is the one that its own appends write.
    #[test]
    fn host_pages_are_those_of_the_cache() {
        let shape = PageShape { n_kv_heads: 2, head_dim: 16 };
        let geometry = KvGeometry { n_layers: 1, n_kv_heads: 2, head_dim: 16, dtype: KvDType::BF16 };
        let pool = PagePool::new(geometry, 1).unwrap();
        let layer = pool.layer(0);
        let mut device = vec![0u16; shape.len()];
        for token in 0..PAGE_TOKENS {
            // Exact in bf16, and all different.
            let row = |kind: usize| -> Vec<f32> {
                (0..32)
                    .map(|i| ((kind * 32 + token) % 64 * 4 + i / 8) as f32 + (i % 8) as f32 * 256.0)
                    .collect()
            };
            let (k, v) = (row(0), row(1));
            let half =
                |x: &[f32]| -> Vec<u16> { x.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect() };
            shape.append(&mut device, token, &half(&k), &half(&v));
            // SAFETY: one writer, and nobody reads meanwhile.
            unsafe { layer.append(&[0], token, &k, &v) };
        }
        let mut host = vec![0u16; shape.len()];
        shape.each(|_, d, h| host[h] = device[d]);
        // SAFETY: the layer's one page, written above and alive.
        let want = unsafe { std::slice::from_raw_parts(layer.k_ptr(0, 0), shape.len()) };
        assert_eq!(host, want);
    }
}
