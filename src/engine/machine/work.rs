//! The work of an operation of the host's workers, from which its emulated time follows by the CPU's rates.
//!
//! Bytes are those of the prepared weights (packed, or as the file has them), of the keys and values that some row sees (keys in
//! groups of 16 tokens, values in pairs, as their lines in a page: decision 0001), and of 16-bit inputs; data that
//! passes from one operation to the next stays in the caches if it fits. Weights in slower memory count as so many more bytes.

use std::ops::Range;

use crate::device::{Clock, Work};
use crate::engine::divided::Divided;
use crate::engine::host::HostSeq;
use crate::engine::prepare::{FeedForward, Mlp, Prepared};
use crate::model::{ModelSpec, RouterProfile, distinct, share_read};
use crate::program::{Kind, Op, Part as Tokens, Placement};
use crate::simd::linear::Linear;

/// Bytes of activations that the cores' caches keep from one operation to the next: 8 MiB, as on small CPUs.
const CACHE: usize = 8 << 20;

/// Tokens of a line of keys, and of a line of values.
const KEYS: usize = 16;
const VALUES: usize = 2;

/// A sequence of a step: its rows, and its tokens that are attended on the host.
#[derive(Debug, Clone)]
struct Extent {
    rows: Range<usize>,
    first_pos: usize,
    tokens: Range<usize>,
    /// The first token whose page is not away from the device.
    boundary: usize,
}

/// A matrix, or several with one input.
#[derive(Debug, Clone, Copy, Default)]
struct Product {
    bytes: usize,
    k: usize,
    elements: usize,
    /// Of experts: the bytes of all their matrices, how many those are, and how many a row uses.
    experts: Option<(usize, usize, usize)>,
}

impl Product {
    /// `slower`: see [`Rates::weights_bytes`](crate::device::Rates::weights_bytes).
    fn of(parts: &[&Linear], slower: f64, k: usize, n: usize) -> Product {
        let bytes: usize = parts.iter().map(|w| w.bytes()).sum();
        Product { bytes: (bytes as f64 * slower).round() as usize, k, elements: k * n, experts: None }
    }

    /// What each row multiplies by `used` of these weights of the same shape, beside `rest`.
    fn with_experts(self, parts: &[&Linear], slower: f64, used: usize) -> Product {
        let (count, each) = (parts.len(), parts.first().map_or(0, |w| w.n() * w.k()));
        let bytes: usize = parts.iter().map(|w| w.bytes()).sum();
        let experts = Some(((bytes as f64 * slower).round() as usize, count, used.min(count)));
        Product { elements: self.elements + used * each, experts, ..self }
    }

    /// Bytes of the weights that so many rows read, each expert as likely as any other.
    fn read(&self, rows: usize) -> usize {
        let Some((bytes, count, used)) = self.experts else { return self.bytes };
        self.bytes + (bytes as f64 * share_read(count, used, rows as u64)).round() as usize
    }

    fn times(&self, rows: usize) -> Work {
        match rows {
            0 => Work::default(),
            _ => Work {
                flops: 2 * (rows * self.elements) as u64,
                bytes: (self.read(rows) + 2 * rows * self.k) as u64,
            },
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Block {
    qkv: Product,
    out: Product,
    up: Product,
    down: Product,
    window: Option<usize>,
    /// Which of its experts the device computes, if they are divided.
    divided: Option<Divided>,
}

/// The two products of a feed-forward.
fn feed_forward(ffn: &FeedForward, slower: f64) -> (Product, Product) {
    let of = |parts: &[&Linear]| {
        let (k, n) = (parts.first().map_or(0, |w| w.k()), parts.iter().map(|w| w.n()).sum());
        Product::of(parts, slower, k, n)
    };
    match ffn {
        FeedForward::Dense(mlp) => (of(&mlp.first()), of(&[&mlp.down])),
        FeedForward::Experts(m) => {
            let shared = m.shared.as_ref();
            let mut beside = vec![&m.router];
            beside.extend(shared.iter().flat_map(|s| s.mlp.first()).chain(shared.map(|s| &s.gate)));
            let down: Vec<&Linear> = shared.iter().map(|s| &s.mlp.down).collect();
            let ups: Vec<&Linear> = m.experts.iter().flat_map(Mlp::first).collect();
            let downs: Vec<&Linear> = m.experts.iter().map(|e| &e.down).collect();
            // Gate and up of an expert are read together.
            let used = m.used * ups.len() / m.experts.len();
            (of(&beside).with_experts(&ups, slower, used), of(&down).with_experts(&downs, slower, m.used))
        }
    }
}

/// The host's matrices, and the rows of a step.
#[derive(Debug, Clone, Default)]
pub(super) struct HostWork {
    blocks: Vec<Block>,
    head: Product,
    /// Bytes of a row of the embedding.
    row_bytes: usize,
    d_model: usize,
    q_dim: usize,
    kv_dim: usize,
    d_ff: usize,
    vocab: usize,
    /// The rows of each sub-batch.
    parts: Vec<Part>,
}

/// The rows of a sub-batch.
#[derive(Debug, Clone, Default)]
struct Part {
    seqs: Vec<Extent>,
    /// Rows that want logits, ascending.
    wanted: Vec<usize>,
}

impl HostWork {
    /// The work for the weights that have been prepared for the host, in the time of `clock`.
    pub fn new(spec: &ModelSpec, model: &Prepared, clock: Option<&Clock>) -> HostWork {
        let slower = clock.map_or(1.0, |clock| clock.rates().weights_bytes());
        let (d, q, kv, ff) = (spec.d_model, spec.q_dim(), spec.kv_dim(), spec.d_ff);
        let block = |l: usize| {
            let window = spec.window_of(l);
            let Some(w) = model.layer_if(l) else { return Block { window, ..Block::default() } };
            let (up, down) = feed_forward(&w.ffn, slower);
            Block {
                qkv: Product::of(&[&w.q, &w.k, &w.v], slower, d, q + 2 * kv),
                out: Product::of(&[&w.o], slower, q, d),
                up,
                down,
                window,
                divided: None,
            }
        };
        HostWork {
            blocks: (0..spec.n_layers).map(block).collect(),
            head: model.head_if().map_or(Product::default(), |w| Product::of(&[w], slower, d, spec.vocab)),
            row_bytes: model.embed.row_bytes(),
            d_model: d,
            q_dim: q,
            kv_dim: kv,
            d_ff: ff,
            vocab: spec.vocab,
            parts: Vec::new(),
        }
    }

    /// The same for a placement that may divide experts.
    pub fn dividing(
        mut self,
        spec: &ModelSpec,
        placement: &Placement,
        router: Option<&RouterProfile>,
    ) -> HostWork {
        for (l, block) in self.blocks.iter_mut().enumerate() {
            block.divided = Divided::of(spec, placement, router, l);
        }
        self
    }

    /// Of the experts of a divided layer that the device has, a row is expected to choose so many.
    pub fn expect(&mut self, layer: usize, uses: f64) {
        if let Some(divided) = &mut self.blocks[layer].divided {
            divided.uses = uses;
        }
    }

    /// Begins a step of a sub-batch of these sequences. `wanted` are the rows that want logits, ascending; `boundaries`
    /// are the numbers of tokens of each sequence whose pages have left the device, empty if none has left.
    pub fn begin(&mut self, sub_batch: usize, seqs: &[HostSeq<'_>], boundaries: &[usize], wanted: &[usize]) {
        self.parts.resize_with(self.parts.len().max(sub_batch + 1), Part::default);
        let part = &mut self.parts[sub_batch];
        part.seqs.clear();
        part.wanted.clear();
        part.wanted.extend_from_slice(wanted);
        let mut row = 0;
        for (i, s) in seqs.iter().enumerate() {
            let rows = row..row + s.n_rows;
            let boundary = boundaries.get(i).copied().unwrap_or_default();
            row = rows.end;
            part.seqs.push(Extent { rows, first_pos: s.first_pos, tokens: s.tokens.clone(), boundary });
        }
    }

    /// The work of an operation; with `compact` only on its rows that want logits.
    pub fn of(&self, op: &Op, compact: bool) -> Work {
        let rows = if compact { op.work.rows as usize } else { (op.rows.end - op.rows.start) as usize };
        let passing = |elements: usize| Work { flops: 0, bytes: (4 * elements).saturating_sub(CACHE) as u64 };
        let block = || &self.blocks[op.layer.unwrap_or_default() as usize];
        match op.kind {
            Kind::Embed => plus(memory(rows * self.row_bytes), passing(rows * self.d_model)),
            Kind::Project { .. } => {
                let width = 3 * self.d_model + self.q_dim + 2 * self.kv_dim;
                plus(block().qkv.times(rows), passing(rows * width))
            }
            Kind::Append { .. } => plus(memory(4 * rows * self.kv_dim), passing(rows * 2 * self.kv_dim)),
            Kind::Attend { .. } => self.attention(op, compact),
            Kind::OutProj => plus(block().out.times(rows), passing(rows * self.d_model)),
            Kind::FfnUp { .. } => {
                plus(block().up.times(rows), passing(rows * (3 * self.d_model + self.d_ff)))
            }
            Kind::Experts => {
                let all = plus(block().up.times(rows), block().down.times(rows));
                let divided = block().divided.as_ref();
                let [bytes, flops] = divided.map_or([1.0; 2], |of| {
                    let (n, uses) = (of.count - of.on_device.len(), of.used as f64 - of.uses);
                    let every = of.count as f64 * share_read(of.count, of.used, rows as u64);
                    [distinct(n, uses, rows as u64) / every, uses / of.used as f64]
                });
                let part = |n: u64, share: f64| (n as f64 * share).round() as u64;
                Work { flops: part(all.flops, flops), bytes: part(all.bytes, bytes) }
            }
            Kind::FfnDown => plus(block().down.times(rows), passing(rows * self.d_model)),
            Kind::Head { .. } => {
                let wanted = op.work.rows as usize;
                plus(self.head.times(wanted), passing(wanted * self.vocab))
            }
            Kind::Pick => passing(op.work.rows as usize * self.vocab),
            _ => Work::default(),
        }
    }

    /// The work of copying rows of `bytes` bytes in total to or from the link's memory.
    pub fn copy(bytes: usize) -> Work {
        Work { flops: 0, bytes: (2 * bytes).saturating_sub(CACHE) as u64 }
    }

    fn attention(&self, op: &Op, compact: bool) -> Work {
        let window = self.blocks[op.layer.unwrap_or_default() as usize].window;
        let (from, to) = (op.rows.start as usize, op.rows.end as usize);
        let (mut lines, mut pairs, mut n) = (0, 0, 0);
        let part = &self.parts[op.sub_batch as usize];
        for s in &part.seqs {
            let computed = |row: &usize| !compact || part.wanted.binary_search(row).is_ok();
            let mut own = (s.rows.start.max(from)..s.rows.end.min(to)).filter(computed).peekable();
            let sees = |row: usize| {
                let end = s.first_pos + row - s.rows.start + 1;
                let first = window.map_or(0, |w| end.saturating_sub(w)).max(s.tokens.start);
                let last = match op.kind {
                    Kind::Attend { part: Tokens::UpToBoundary, .. } => s.boundary,
                    _ => s.tokens.end,
                };
                first.min(end.min(last))..end.min(last)
            };
            let Some(&first) = own.peek() else { continue };
            let mut seen = sees(first);
            for row in own {
                let more = sees(row);
                pairs += more.len();
                n += 1;
                seen.end = more.end;
            }
            // Tokens whose keys, and whose values, are read.
            let whole = |of: usize| seen.end.next_multiple_of(of) - seen.start / of * of;
            if !seen.is_empty() {
                lines += whole(KEYS) + whole(VALUES);
            }
        }
        Work {
            flops: 4 * (pairs * self.q_dim) as u64,
            bytes: (lines * 2 * self.kv_dim + 4 * n * self.q_dim) as u64,
        }
    }
}

/// The work of packing so many bytes: read in one layout, and written in another, which reads what is there.
pub(super) fn copied(bytes: usize) -> Work {
    Work { flops: 0, bytes: 3 * bytes as u64 }
}

fn plus(a: Work, b: Work) -> Work {
    Work { flops: a.flops + b.flops, bytes: a.bytes + b.bytes }
}

fn memory(bytes: usize) -> Work {
    Work { flops: 0, bytes: bytes as u64 }
}
