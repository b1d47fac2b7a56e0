//! Row blocks of a step shared out over threads: work items, and which of them are parts of one row block.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use super::item::Work;
use crate::host::MAX_RANGES;

/// Bytes of keys and values beyond which an item need not grow: the cost of its ends is then negligible.
const ITEM_BYTES: usize = 512 << 10;

/// Bytes of keys and values below which dividing an item does not pay (about a microsecond).
const MIN_BYTES: usize = 16 << 10;

/// With at most this many rows, a KV head is memory-bound: reading its keys and values takes longer than computing.
const MIN_ROWS: usize = 6;

/// A row block whose segments are spread over several items.
pub(super) struct Split {
    /// The whole row block.
    pub work: Work,
    /// First slot of the segments' results.
    pub slot0: usize,
    /// Index of its first tally; it has one per KV head.
    pub tally0: usize,
}

/// Items that hold a part of one KV head of a split.
pub(super) struct Tally {
    pub n_items: u32,
    /// Items still to finish in this run; the last one merges.
    pub left: AtomicU32,
}

/// A part of a row block, computed by one thread.
pub(super) struct Item {
    pub work: Work,
    /// Index into `splits` if other items hold other segments of its rows.
    pub split: Option<u32>,
    /// Whether the next item belongs to the same range.
    pub goes_on: bool,
}

/// The items of a step, and how they belong together.
#[derive(Default)]
pub(super) struct Shares {
    /// Items in memory order, divided into `ends.len()` ranges of equal cost, one per thread.
    pub items: Vec<Item>,
    pub ends: Vec<usize>,
    pub splits: Vec<Split>,
    pub tallies: Vec<Tally>,
}

impl Shares {
    /// Cuts the row blocks into items, and those into a range for each thread: of `threads`, or of `readers` if all blocks
    /// are memory-bound. Returns how many slots the split blocks need.
    ///
    /// A range begins with large items, for long runs of memory, and ends with small ones: each item takes at most half
    /// of the rest of its range, so that threads that help each other finish at about the same time.
    pub fn rebuild(&mut self, blocks: Vec<Work>, head_dim: usize, threads: usize, readers: usize) -> usize {
        self.items.clear();
        self.ends.clear();
        self.splits.clear();
        self.tallies.clear();
        let reads = blocks.iter().all(|w| w.rows_per_kv_head() <= MIN_ROWS);
        let ranges = if reads { readers } else { threads }.min(MAX_RANGES);
        let total: usize = blocks.iter().map(cost).sum();
        let bytes = |n: usize| n / (4 * head_dim) * MIN_ROWS;
        let most = (total / (8 * ranges)).max(bytes(ITEM_BYTES)).min(total / (2 * ranges));
        let least = bytes(MIN_BYTES);
        let (mut done, mut slots) = (0, 0);
        for block in blocks {
            let first = self.items.len();
            let (mut segment, mut kv_head) = (block.segments.start, block.kv_heads.start);
            while segment < block.segments.end {
                let part = |segments: Range<usize>, kv_heads: Range<usize>| Work {
                    segments,
                    kv_heads,
                    ..block.clone()
                };
                let unit = cost(&part(segment..segment + 1, kv_head..kv_head + 1));
                let range_end = |range: usize| total * (range + 1) / ranges;
                while self.ends.len() + 1 < ranges && done + unit / 2 >= range_end(self.ends.len()) {
                    self.ends.push(self.items.len());
                }
                let lacks = range_end(self.ends.len()).saturating_sub(done);
                let target = if ranges == 1 { usize::MAX } else { (lacks / 2).min(most).max(least) };
                let heads_left = block.kv_heads.end - kv_head;
                let mut end = segment;
                if kv_head == block.kv_heads.start {
                    while end < block.segments.end
                        && cost(&part(segment..end + 1, block.kv_heads.clone())) <= target
                    {
                        end += 1;
                    }
                }
                let work = if end > segment {
                    part(segment..end, block.kv_heads.clone())
                } else {
                    part(segment..segment + 1, kv_head..kv_head + (target / unit).clamp(1, heads_left))
                };
                done += cost(&work);
                (segment, kv_head) = if work.kv_heads.end == block.kv_heads.end {
                    (work.segments.end, block.kv_heads.start)
                } else {
                    (segment, work.kv_heads.end)
                };
                self.items.push(Item { work, split: None, goes_on: true });
            }
            // Parts that hold all segments of their heads need no merge.
            if block.segments.len() > 1 && self.items.len() - first > 1 {
                slots += self.split(block, first, slots);
            }
        }
        self.ends.resize(ranges, self.items.len());
        for &end in self.ends.iter().filter(|&&end| end > 0) {
            self.items[end - 1].goes_on = false;
        }
        slots
    }

    /// Records that the items from `first` on are parts of `block`. Returns the number of slots that it needs.
    fn split(&mut self, block: Work, first: usize, slot0: usize) -> usize {
        let index = self.splits.len() as u32;
        let tally0 = self.tallies.len();
        for kv_head in block.kv_heads.clone() {
            let parts = self.items[first..].iter().filter(|i| i.work.kv_heads.contains(&kv_head));
            let n_items = parts.count() as u32;
            self.tallies.push(Tally { n_items, left: AtomicU32::new(n_items) });
        }
        self.items[first..].iter_mut().for_each(|i| i.split = Some(index));
        let slots = block.segments.len() * block.rows();
        self.splits.push(Split { work: block, slot0, tally0 });
        slots
    }

    /// Bytes of its buffers.
    pub fn bytes(&self) -> usize {
        fn of<T>(v: &Vec<T>) -> usize {
            v.capacity() * size_of::<T>()
        }
        of(&self.items) + of(&self.ends) + of(&self.splits) + of(&self.tallies)
    }
}

/// Relative time: cache lines that come from memory, and rows that compute on them.
fn cost(w: &Work) -> usize {
    let tokens = w.seen.end.min(w.segments.end * w.segment).saturating_sub(w.segments.start * w.segment);
    tokens.max(16) * w.kv_heads.len() * w.rows_per_kv_head().max(MIN_ROWS)
}

#[cfg(test)]
mod tests {
    use super::cost;
    use crate::cache::{PAGE_TOKENS, SeqRows};
    use crate::simd::attention::{AttnPlan, AttnShape};

    /// Each thread begins with a fair share, even with one request of 8000 tokens beside 63 of 100.
    #[test]
    fn a_long_request_beside_short_ones_is_spread_evenly() {
        let pages: Vec<u32> = (0..8000u32.div_ceil(PAGE_TOKENS as u32)).collect();
        let shape =
            AttnShape { n_heads: 32, n_kv_heads: 8, head_dim: 128, scale: 0.1, softcap: None, window: None };
        for long_at in [0, 31, 63] {
            let length = |i| if i == long_at { 8000 } else { 100 };
            let row = |i| SeqRows { pages: &pages, first_pos: length(i) - 1, n_rows: 1, row0: i };
            let rows: Vec<SeqRows<'_>> = (0..64).map(row).collect();
            for (threads, readers) in [(2, 2), (3, 3), (4, 4), (8, 8), (16, 16), (16, 6), (32, 32)] {
                let mut plan = AttnPlan::new(&shape, &[], threads).unwrap().with_readers(readers);
                plan.rebuild(&rows);
                assert_eq!(plan.shares.ends.len(), readers);
                let starts = std::iter::once(0).chain(plan.shares.ends.iter().copied());
                let sum = |(from, &to): (usize, &usize)| {
                    plan.shares.items[from..to].iter().map(|i| cost(&i.work)).sum::<usize>()
                };
                let costs: Vec<usize> = starts.zip(&plan.shares.ends).map(sum).collect();
                let mean = costs.iter().sum::<usize>() as f64 / readers as f64;
                let most = *costs.iter().max().unwrap() as f64;
                assert!(
                    most <= 1.1 * mean,
                    "{threads} threads, {readers} readers: {most} of {mean}: {costs:?}"
                );
            }
        }
    }
}
