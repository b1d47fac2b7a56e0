//! What work costs: the seconds of a sublayer on a side, and of bytes over the link.
//!
//! Planners and the virtual machine ask [`Costs`]; the analytic [`roofline`](super::roofline) answers from a hardware
//! description, measured tables answer from timings of the real kernels. Both price the same [`Batch`].

use crate::program::{Phase, Side, Sublayer};

/// Sequences that are alike in one step: each brings `rows` new tokens after `past` stored ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Sequences.
    pub sequences: u64,
    /// New tokens of each.
    pub rows: u64,
    /// Stored tokens that every row of a sequence attends.
    pub past: u64,
    /// Whether a row also attends the new tokens up to itself. Not in partial attention over stored pages.
    pub causal: bool,
}

impl Group {
    /// Whole prompts of `tokens` tokens.
    pub fn prompts(sequences: u64, tokens: u64) -> Group {
        Group { sequences, rows: tokens, past: 0, causal: true }
    }

    /// One new token each, after `past` stored ones.
    pub fn decode(sequences: u64, past: u64) -> Group {
        Group { sequences, rows: 1, past, causal: true }
    }

    /// Rows in all.
    pub fn total_rows(&self) -> u64 {
        self.sequences * self.rows
    }

    /// (row, token) pairs that attention multiplies: a window limits how many tokens a row sees.
    pub fn pairs(&self, window: Option<u64>) -> u64 {
        let Group { sequences, rows, past, causal } = *self;
        let window = window.unwrap_or(u64::MAX);
        if !causal {
            return sequences * rows * past.min(window);
        }
        // Row i sees min(window, past + i + 1) tokens: the first `growing` rows see fewer than the window.
        let growing = window.saturating_sub(past).min(rows);
        let seen_growing = growing * past + growing * (growing + 1) / 2;
        sequences * (seen_growing + (rows - growing) * window.min(past + rows))
    }

    /// Tokens whose keys and values attention reads, each once for all rows of its sequence.
    pub fn tokens_read(&self, window: Option<u64>) -> u64 {
        let Group { sequences, rows, past, causal } = *self;
        let own = if causal { rows } else { 0 };
        // The first row's window reaches `window - 1` tokens back.
        let stored = past.min(window.map_or(past, |w| if causal { w.saturating_sub(1) } else { w }));
        sequences * (stored + own)
    }
}

/// The rows of one operation.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Prompts, or single tokens that continue a sequence.
    pub phase: Phase,
    /// The sequences they belong to.
    pub groups: &'a [Group],
}

impl<'a> Batch<'a> {
    /// A batch of prompts.
    pub fn prefill(groups: &'a [Group]) -> Batch<'a> {
        Batch { phase: Phase::Prefill, groups }
    }

    /// A batch of decode rows.
    pub fn decode(groups: &'a [Group]) -> Batch<'a> {
        Batch { phase: Phase::Decode, groups }
    }

    /// Rows in all.
    pub fn rows(&self) -> u64 {
        self.groups.iter().map(Group::total_rows).sum()
    }

    /// See [`Group::pairs`].
    pub fn pairs(&self, window: Option<u64>) -> u64 {
        self.groups.iter().map(|g| g.pairs(window)).sum()
    }

    /// See [`Group::tokens_read`].
    pub fn tokens_read(&self, window: Option<u64>) -> u64 {
        self.groups.iter().map(|g| g.tokens_read(window)).sum()
    }
}

/// What one pass over keys and values reads and multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scan {
    /// Rows with queries.
    pub rows: u64,
    /// Tokens whose keys and values are read, over all sequences.
    pub kv_tokens: u64,
    /// Pairs of a row and a token that it sees.
    pub pairs: u64,
}

impl Scan {
    /// The scan of a batch in a layer with this window.
    pub fn of(batch: &Batch<'_>, window: Option<u64>) -> Scan {
        Scan { rows: batch.rows(), kv_tokens: batch.tokens_read(window), pairs: batch.pairs(window) }
    }

    /// The scan of `n` such sequences.
    pub fn times(self, n: u64) -> Scan {
        Scan { rows: n * self.rows, kv_tokens: n * self.kv_tokens, pairs: n * self.pairs }
    }

    /// The scan of both batches together.
    pub fn plus(self, other: Scan) -> Scan {
        Scan {
            rows: self.rows + other.rows,
            kv_tokens: self.kv_tokens + other.kv_tokens,
            pairs: self.pairs + other.pairs,
        }
    }
}

/// Which way bytes cross the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Host to device.
    ToDevice,
    /// Device to host.
    ToHost,
}

/// Seconds of operations. Every figure is finite and not negative; zero rows or bytes cost nothing.
pub trait Costs: Sync {
    /// Looking up `rows` rows of the embedding on `side`.
    fn embed(&self, side: Side, rows: u64) -> f64;

    /// One sublayer of block `layer` on `side`, its weights, keys and values in the memory of that side.
    fn sublayer(&self, side: Side, layer: usize, sublayer: Sublayer, batch: &Batch<'_>) -> f64;

    /// Scores and values in one pass over the keys and values.
    fn attention(&self, side: Side, layer: usize, batch: &Batch<'_>) -> f64 {
        self.sublayer(side, layer, Sublayer::Scores, batch)
            + self.sublayer(side, layer, Sublayer::Values, batch)
    }

    /// The product of `rows` rows with the weights of a sublayer: scores and values have none, see
    /// [`attend`](Costs::attend).
    fn product(&self, side: Side, layer: usize, sublayer: Sublayer, rows: u64) -> f64 {
        let groups = [Group::decode(rows, 0)];
        self.sublayer(side, layer, sublayer, &Batch::decode(&groups))
    }

    /// Scores and values in one pass over `scan`, windows applied.
    fn attend(&self, side: Side, layer: usize, scan: &Scan) -> f64;

    /// The last norm and the head for `rows` rows.
    fn head(&self, side: Side, rows: u64) -> f64;

    /// As [`product`](Costs::product), in a step that reads the keys and values of `stored` tokens, in the mean over the
    /// layers: what a step reads beside the weights pushes them out of the CPU's last-level cache.
    fn product_beside(&self, side: Side, layer: usize, sublayer: Sublayer, rows: u64, stored: u64) -> f64 {
        let _ = stored;
        self.product(side, layer, sublayer, rows)
    }

    /// As [`attend`](Costs::attend), in such a step.
    fn attend_beside(&self, side: Side, layer: usize, scan: &Scan, stored: u64) -> f64 {
        let _ = stored;
        self.attend(side, layer, scan)
    }

    /// As [`head`](Costs::head), in such a step.
    fn head_beside(&self, side: Side, rows: u64, stored: u64) -> f64 {
        let _ = stored;
        self.head(side, rows)
    }

    /// Moving `bytes` within the memory of `side` (appending, publishing, merging): read and written once.
    fn copy(&self, side: Side, bytes: u64) -> f64;

    /// Keys and values of `rows` rows, `bytes` of a copy, into the pages of block `layer`.
    fn append(&self, side: Side, layer: usize, rows: u64, bytes: u64) -> f64 {
        let _ = (layer, rows);
        self.copy(side, bytes)
    }

    /// The likeliest tokens of `rows` rows of logits, `bytes` of a copy.
    fn pick(&self, side: Side, rows: u64, bytes: u64) -> f64 {
        let _ = rows;
        self.copy(side, bytes)
    }

    /// What sampling needs of `rows` rows of logits on the device, `bytes` of a copy.
    fn top(&self, rows: u64, bytes: u64) -> f64 {
        let _ = rows;
        self.copy(Side::Device, bytes)
    }

    /// Whole pages, counted per layer, `bytes` in all, between the device's pages and the host's.
    fn pages(&self, direction: Direction, pages: u64, bytes: u64) -> f64 {
        let _ = pages;
        self.transfer(direction, bytes)
    }

    /// Share of its rate that attention on the host keeps while copies over the link read and write the same memory, in (0, 1].
    fn beside_copies(&self) -> f64 {
        1.0
    }

    /// Seconds that so many kernels of the device take beside their work. Products have those of their kernels.
    fn launches(&self, kernels: u32) -> f64 {
        let _ = kernels;
        0.0
    }

    /// Seconds that an operation of the host takes beside its work: from its posting to its end seen.
    fn hand_over(&self) -> f64 {
        0.0
    }

    /// `bytes` over the link in one transfer from or to pinned memory, its latency included.
    fn transfer(&self, direction: Direction, bytes: u64) -> f64;

    /// `bytes` of weights from the host to the device in one transfer: as [`transfer`](Costs::transfer), but at most as
    /// fast as the memory in which weights lie.
    fn stream(&self, bytes: u64) -> f64 {
        self.transfer(Direction::ToDevice, bytes)
    }

    /// As [`stream`](Costs::stream), from pageable memory: the driver copies it to pinned buffers first.
    fn stream_pageable(&self, bytes: u64) -> f64 {
        self.stream(bytes)
    }

    /// Issuing one unit (embedding, block, head) on `side`: `n` of them take at least `n` times this, however small
    /// their work.
    fn issue(&self, side: Side) -> f64;

    /// Least seconds of one operation of a program on `side`, however small its work: a block's share of
    /// [`issue`](Costs::issue).
    fn launch(&self, side: Side) -> f64 {
        self.issue(side) / OPERATIONS_OF_A_BLOCK
    }
}

/// Project, append, attend, out-projection and the two halves of the feed-forward.
const OPERATIONS_OF_A_BLOCK: f64 = 6.0;

#[cfg(test)]
mod tests {
    use super::*;

    /// Row by row.
    fn naive(g: &Group, window: Option<u64>) -> (u64, u64) {
        let window = window.unwrap_or(u64::MAX);
        let mut pairs = 0;
        let mut read = vec![false; (g.past + g.rows) as usize];
        for i in 0..g.rows {
            let end = if g.causal { g.past + i + 1 } else { g.past };
            let start = end.saturating_sub(window);
            pairs += end - start;
            read[start as usize..end as usize].fill(true);
        }
        (g.sequences * pairs, g.sequences * read.iter().filter(|&&r| r).count() as u64)
    }

    #[test]
    fn pairs_and_tokens_match_a_count_row_by_row() {
        for causal in [true, false] {
            for past in [0, 1, 5, 31, 100] {
                for rows in [1, 2, 7, 40] {
                    for window in [None, Some(1), Some(4), Some(33), Some(1000)] {
                        let g = Group { sequences: 3, rows, past, causal };
                        assert_eq!(
                            (g.pairs(window), g.tokens_read(window)),
                            naive(&g, window),
                            "{g:?} {window:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn prompts_and_decode_rows() {
        assert_eq!(Group::prompts(2, 4).pairs(None), 2 * 10);
        assert_eq!(Group::decode(2, 9).pairs(None), 20);
        let groups = [Group::prompts(2, 4), Group::decode(3, 9)];
        assert_eq!(Batch::prefill(&groups).rows(), 11);
        assert_eq!(Batch::prefill(&groups).tokens_read(None), 8 + 30);
    }
}
