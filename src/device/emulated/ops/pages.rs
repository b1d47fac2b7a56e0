//! Pages of keys and values in the device's and the host's layout.
//!
//! device  `[kv_head][K, V]`: elements `[32 tokens][head_dim]`
//! host    `[kv_head]`: K `[2][head_dim/2][16 tokens][2]`, V `[16][head_dim][2 tokens]` (see [`crate::cache`])
//!
//! On both sides the scales of codes, f32 `[32 tokens]`, follow K, and V.

use super::cast::{Number, numbers, numbers_mut};
use crate::cache::{KvType, PAGE_TOKENS, quantise_head};
use crate::device::accelerator::Shape;

/// A CPU cache line, to which the host's pages are aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Line(pub [u8; 64]);

impl Line {
    /// A line of zeros.
    pub const ZERO: Line = Line([0; 64]);
}

/// Sizes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageShape {
    /// h_kv.
    pub n_kv_heads: usize,
    /// d_h.
    pub head_dim: usize,
    /// Type of keys and values.
    pub kv: KvType,
}

impl PageShape {
    /// That of a model's pages.
    pub fn of(shape: &Shape) -> PageShape {
        PageShape { n_kv_heads: shape.n_kv_heads, head_dim: shape.head_dim, kv: shape.kv }
    }

    /// Bytes of one page of one layer.
    pub fn bytes(&self) -> usize {
        self.n_kv_heads * 2 * self.kv.part_bytes(self.head_dim)
    }

    /// The first byte of a head's keys or values, on either side.
    fn part(&self, head: usize, value: bool) -> usize {
        (head * 2 + value as usize) * self.kv.part_bytes(self.head_dim)
    }

    /// The first byte of a token's elements in the device's page.
    pub fn at(&self, head: usize, value: bool, token: usize) -> usize {
        self.part(head, value) + token * self.head_dim * self.kv.element()
    }

    /// The first byte of a token's scale on either side; `None` if the type has none.
    pub fn scale_at(&self, head: usize, value: bool, token: usize) -> Option<usize> {
        let scales = self.at(head, value, PAGE_TOKENS);
        self.kv.is_scaled().then_some(scales + token * size_of::<f32>())
    }

    /// The first byte of a token's element `d` in the host's page.
    pub fn host_at(&self, head: usize, value: bool, token: usize, d: usize) -> usize {
        let hd = self.head_dim;
        let within = match value {
            false => (token / 16 * (hd / 2) + d / 2) * 32 + token % 16 * 2 + d % 2,
            true => (token / 2 * hd + d) * 2 + token % 2,
        };
        self.part(head, value) + within * self.kv.element()
    }

    /// Calls `f(token, first byte on the device, first byte on the host, bytes)` for every element, and for every scale.
    pub fn each(&self, mut f: impl FnMut(usize, usize, usize, usize)) {
        let e = self.kv.element();
        for head in 0..self.n_kv_heads {
            for token in 0..PAGE_TOKENS {
                for value in [false, true] {
                    let device = self.at(head, value, token);
                    // The same as `host_at` of each, pair by pair.
                    let host = self.host_at(head, value, token, 0);
                    let (next, pair) = if value { (2, 4) } else { (1, 32) };
                    for i in 0..self.head_dim / 2 {
                        f(token, device + 2 * i * e, host + i * pair * e, e);
                        f(token, device + (2 * i + 1) * e, host + (i * pair + next) * e, e);
                    }
                    if let Some(scale) = self.scale_at(head, value, token) {
                        f(token, scale, scale, size_of::<f32>());
                    }
                }
            }
        }
    }

    /// Copies the first tokens of the device's page to `host`, which must hold zeros, in the host's layout.
    pub fn to_host(&self, device: &[u8], tokens: usize, host: &mut [u8]) {
        let tokens = tokens.min(PAGE_TOKENS);
        for head in 0..self.n_kv_heads {
            for value in [false, true] {
                let from = &device[self.at(head, value, 0)..self.at(head, value, tokens)];
                let to = &mut host[self.at(head, value, 0)..self.at(head, value, PAGE_TOKENS)];
                match self.kv.element() {
                    1 => arrange(value, self.head_dim, from, to),
                    _ => arrange::<u16>(value, self.head_dim, numbers(from), numbers_mut(to)),
                }
                if let Some(scales) = self.scale_at(head, value, 0) {
                    let scales = scales..scales + tokens * size_of::<f32>();
                    host[scales.clone()].copy_from_slice(&device[scales]);
                }
            }
        }
    }

    /// Stores one token's keys and values (`[kv_heads · head_dim]` each, before the rounding to 16 bits) in the device's page.
    ///
    /// What is quantised was rounded to 16 bits before, as on a GPU, and as what passes through a mailbox; with `exact` results it was
    /// not, as on the CPU.
    pub fn append(&self, page: &mut [u8], token: usize, k: &[f32], v: &[f32], exact: bool) {
        let (hd, half) = (self.head_dim, self.kv.half());
        let mut bits = vec![0u16; hd];
        for (value, x) in [(false, k), (true, v)] {
            for (head, x) in x.chunks_exact(hd).enumerate() {
                let at = self.at(head, value, token);
                let to = &mut page[at..at + hd * self.kv.element()];
                half.narrow(x, &mut bits);
                let Some(scale_at) = self.scale_at(head, value, token) else {
                    numbers_mut::<u16>(to).copy_from_slice(&bits);
                    continue;
                };
                let mut rounded = vec![0.0; hd];
                half.widen(&bits, &mut rounded);
                let scale = quantise_head(if exact { x } else { &rounded }, numbers_mut(to));
                page[scale_at..scale_at + size_of::<f32>()].copy_from_slice(&scale.to_ne_bytes());
            }
        }
    }

    /// Appends a token's keys or values of a head, as floats, to `out`.
    pub fn read(&self, page: &[u8], head: usize, value: bool, token: usize, out: &mut Vec<f32>) {
        let (at, hd) = (self.at(head, value, token), self.head_dim);
        let from = &page[at..at + hd * self.kv.element()];
        match self.scale_at(head, value, token) {
            Some(at) => {
                let [scale] = *numbers::<f32>(&page[at..at + size_of::<f32>()]) else { unreachable!() };
                out.extend(numbers::<i8>(from).iter().map(|&code| scale * f32::from(code)));
            }
            None => {
                let first = out.len();
                out.resize(first + hd, 0.0);
                self.kv.half().widen(numbers(from), &mut out[first..]);
            }
        }
    }
}

/// Copies tokens of `head_dim` elements to the host's order of a page's keys, or of its values.
fn arrange<E: Number>(value: bool, head_dim: usize, tokens: &[E], to: &mut [E]) {
    for (token, x) in tokens.chunks_exact(head_dim).enumerate() {
        if value {
            // Each pair holds one element of two tokens.
            let pairs = to[token / 2 * 2 * head_dim..][..2 * head_dim].chunks_exact_mut(2);
            pairs.zip(x).for_each(|(pair, &x)| pair[token % 2] = x);
        } else {
            // Each line holds a pair of elements of 16 tokens.
            let lines = to[token / 16 * 16 * head_dim..][..16 * head_dim].chunks_exact_mut(32);
            for (line, pair) in lines.zip(x.chunks_exact(2)) {
                line[token % 16 * 2..][..2].copy_from_slice(pair);
            }
        }
    }
}

/// The bytes of lines.
pub fn lines_as_bytes(lines: &mut [Line]) -> &mut [u8] {
    // SAFETY: lines are bytes, without padding, and the borrow is passed on.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{KvGeometry, PagePool};

    /// The host's layout equals the one that the host's own appends write.
    #[test]
    fn host_pages_are_those_of_the_cache() {
        for kv in KvType::ALL {
            let shape = PageShape { n_kv_heads: 2, head_dim: 16, kv };
            let geometry = KvGeometry { n_layers: 1, n_kv_heads: 2, head_dim: 16, dtype: kv };
            let pool = PagePool::new(geometry, 1).unwrap();
            let layer = pool.layer(0);
            let mut memory = vec![Line::ZERO; shape.bytes() / 64];
            let device: &mut [u8] = lines_as_bytes(&mut memory);
            for token in 0..PAGE_TOKENS {
                // Different values, but for some that bf16 rounds to the same.
                let row = |kind: usize| -> Vec<f32> {
                    (0..32)
                        .map(|i| ((kind * 32 + token) % 64 * 4 + i / 8) as f32 + (i % 8) as f32 * 256.0)
                        .collect()
                };
                let (k, v) = (row(0), row(1));
                shape.append(device, token, &k, &v, true);
                // SAFETY: there is one writer, and nothing reads meanwhile.
                unsafe { layer.append(&[0], token, &k, &v) };
            }
            // What is read back is what the host's own oracle reads.
            for token in 0..PAGE_TOKENS {
                for (value, head) in [(false, 0), (true, 0), (false, 1), (true, 1)] {
                    let mut got = Vec::new();
                    shape.read(device, head, value, token, &mut got);
                    for (d, &got) in got.iter().enumerate() {
                        let of =
                            if value { layer.value(0, head, token, d) } else { layer.key(0, head, token, d) };
                        assert_eq!(got, of);
                    }
                }
            }
            let mut host = vec![0u8; shape.bytes()];
            let mut n = 0;
            shape.each(|_, d, h, len| {
                n += len;
                host[h..h + len].copy_from_slice(&device[d..d + len]);
            });
            assert_eq!(n, shape.bytes());
            for tokens in [0, 1, 2, 15, 16, 17, 31, 32, 96] {
                let mut lines = vec![Line::ZERO; shape.bytes() / 64];
                let some = lines_as_bytes(&mut lines);
                shape.to_host(device, tokens, some);
                shape.each(|token, d, h, len| {
                    let want = if token < tokens { &device[d..d + len] } else { &[0; 4][..len] };
                    assert_eq!(&some[h..h + len], want, "token {token} of {tokens}");
                });
            }
            // SAFETY: the layer's one page, written above and alive.
            let want = unsafe { std::slice::from_raw_parts(layer.k_ptr(0, 0), shape.bytes()) };
            assert_eq!(host, want, "{}", kv.name());
        }
    }
}
