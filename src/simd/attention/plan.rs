//! From the sequences of a step to work items, and running them.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use super::item::{Inputs, Scratch, Sink, Work, merge_split, run_work};
use super::kernels::{BlockKernels, MAX_ROWS};
use super::shape::Seq;
use super::{AttnOut, AttnShape, Partial, SEGMENT, tiers};
use crate::Result;
use crate::cache::{LayerKv, PAGE_TOKENS, SeqRows};
use crate::host::{MAX_RANGES, Pool};
use crate::simd::Isa;
use crate::tensor::{Rows, RowsMut};

/// Bytes of keys and values from which an item needs not grow: long enough that its ends do not show.
const ITEM_BYTES: usize = 512 << 10;

/// Bytes of keys and values below which an item is not worth cutting (about a microsecond).
const MIN_BYTES: usize = 16 << 10;

/// With at most this many rows, a KV head is memory-bound: reading its keys and values takes longer than computing.
const MIN_ROWS: usize = 6;

/// Rows of a sequence, and what of it they attend.
#[derive(Debug, Clone)]
pub struct AttnRows<'a> {
    /// The rows; the pages are those of position 0 and on, up to the last token attended.
    pub rows: SeqRows<'a>,
    /// The tokens attended, of those that position and window let a row see. The start is a multiple of the page;
    /// pages before it are not looked at.
    pub tokens: Range<usize>,
    /// The KV heads attended; results of others are left alone.
    pub kv_heads: Range<usize>,
}

impl<'a> AttnRows<'a> {
    /// All tokens.
    pub const ALL_TOKENS: Range<usize> = 0..usize::MAX;
    /// All KV heads.
    pub const ALL_HEADS: Range<usize> = 0..usize::MAX;

    /// All tokens and heads of these rows.
    pub fn whole(rows: SeqRows<'a>) -> AttnRows<'a> {
        AttnRows { rows, tokens: AttnRows::ALL_TOKENS, kv_heads: AttnRows::ALL_HEADS }
    }

    /// Position of the last row, and one.
    fn end(&self) -> usize {
        self.rows.first_pos + self.rows.n_rows
    }
}

/// A row block whose segments are spread over several items.
pub(super) struct Split {
    /// The whole of it.
    pub work: Work,
    /// First slot of the segments' results.
    pub slot0: usize,
    /// First of its tallies, one per KV head.
    tally0: usize,
}

/// Items that hold a part of one KV head of a split.
struct Tally {
    n_items: u32,
    /// Those still to finish in this run; the last one merges.
    left: AtomicU32,
}

struct Item {
    work: Work,
    /// Index into `splits` if other items hold other segments of its rows.
    split: Option<u32>,
    /// Whether the next item is of the same range.
    goes_on: bool,
}

/// Which kernels run, by the rows of a KV head in an item.
struct Choice {
    /// `None`: the reference tier.
    many: Option<&'static BlockKernels>,
    /// Up to [`AttnPlan::with_vector_rows`], if they are others.
    few: Option<&'static BlockKernels>,
}

impl Choice {
    fn of(&self, rows: usize, vector_rows: usize) -> Option<&'static BlockKernels> {
        self.few.filter(|_| rows <= vector_rows).or(self.many)
    }
}

/// The work items of one step, for all layers of one shape. Reuse it from step to step with
/// [`AttnPlan::rebuild`], which keeps its buffers.
pub struct AttnPlan {
    shape: AttnShape,
    threads: usize,
    /// How many of the threads share rows whose keys and values take longer to read than to compute on.
    readers: usize,
    /// Tokens of a segment.
    segment: usize,
    /// Rows of a KV head up to which the AMX tier takes its vector kernels.
    vector_rows: usize,
    /// Rows that q and out must have.
    rows: usize,
    pages: Vec<u32>,
    seqs: Vec<Seq>,
    /// In the order of memory, cut into `ends.len()` ranges of equal cost, one per thread.
    items: Vec<Item>,
    ends: Vec<usize>,
    splits: Vec<Split>,
    tallies: Vec<Tally>,
    scratch: Scratch,
}

impl AttnPlan {
    /// Plans the attention of `seqs` for a pool of `threads`.
    ///
    /// # Errors
    /// A head_dim or head counts that the kernels do not cover.
    ///
    /// # Panics
    /// If sequences overlap in rows, or have fewer pages than tokens: invariants of the caller.
    pub fn new(shape: &AttnShape, seqs: &[SeqRows<'_>], threads: usize) -> Result<AttnPlan> {
        shape.check()?;
        let mut plan = AttnPlan {
            shape: *shape,
            threads: threads.max(1),
            readers: threads.max(1),
            segment: SEGMENT,
            vector_rows: 0,
            rows: 0,
            pages: Vec::new(),
            seqs: Vec::new(),
            items: Vec::new(),
            ends: Vec::new(),
            splits: Vec::new(),
            tallies: Vec::new(),
            scratch: Scratch::default(),
        };
        plan.rebuild(seqs);
        Ok(plan)
    }

    /// Sums tokens in segments of this length, a multiple of the page, instead of [`SEGMENT`]. With segments of a page, tokens
    /// attended in two places, before and behind any page, give the bits of one: see the [module](super).
    ///
    /// # Panics
    /// If there are rows planned already, or a segment is not whole pages.
    pub fn in_segments_of(mut self, tokens: usize) -> AttnPlan {
        assert!(self.seqs.is_empty(), "attention: segments of a plan with {} sequences", self.seqs.len());
        assert!(tokens > 0 && tokens.is_multiple_of(PAGE_TOKENS), "attention: segments of {tokens} tokens");
        self.segment = tokens;
        self
    }

    /// Uses at most this many of the pool's threads for memory-bound rows (decode):
    /// beyond the knee of the bandwidth curve more of them read no faster. Results are the same bits.
    pub fn with_readers(mut self, readers: usize) -> AttnPlan {
        self.readers = readers.clamp(1, self.threads);
        self
    }

    /// Lets the AMX tier attend blocks of up to so many rows of a KV head (decode) by vector kernels: faster, but a row's bits
    /// then depend on how many rows come along. Without this, and in other tiers, they do not.
    pub fn with_vector_rows(mut self, rows: usize) -> AttnPlan {
        self.vector_rows = rows;
        self
    }

    /// The shape it was made for.
    pub fn shape(&self) -> &AttnShape {
        &self.shape
    }

    /// Plans another step of the same shape, in the same buffers.
    ///
    /// # Panics
    /// As [`AttnPlan::new`].
    pub fn rebuild(&mut self, seqs: &[SeqRows<'_>]) {
        self.rebuild_rows(&seqs.iter().copied().map(AttnRows::whole).collect::<Vec<_>>());
    }

    /// The same of rows that attend a part of their tokens or heads.
    ///
    /// # Panics
    /// As [`AttnPlan::new`]; tokens that do not begin at a page.
    pub fn rebuild_rows(&mut self, seqs: &[AttnRows<'_>]) {
        self.pages.clear();
        self.seqs.clear();
        self.items.clear();
        self.ends.clear();
        self.splits.clear();
        self.tallies.clear();
        let mut spans: Vec<(usize, usize)> = Vec::with_capacity(seqs.len());
        for a in seqs.iter().filter(|a| a.rows.n_rows > 0) {
            let (s, end) = (&a.rows, a.end().min(a.tokens.end));
            assert!(
                end <= s.pages.len() * PAGE_TOKENS,
                "attention: position {} in {} pages of {PAGE_TOKENS}",
                end - 1,
                s.pages.len()
            );
            assert!(
                a.tokens.start.is_multiple_of(PAGE_TOKENS),
                "attention: of the tokens from {} on, in the middle of a page",
                a.tokens.start
            );
            spans.push((s.row0, s.row0 + s.n_rows));
            let from = self.pages.len();
            self.pages.extend_from_slice(&s.pages[..end.div_ceil(PAGE_TOKENS)]);
            let (first_pos, row0, tokens) = (s.first_pos, s.row0, a.tokens.clone());
            self.seqs.push(Seq { pages: from..self.pages.len(), first_pos, row0, tokens });
        }
        // Results are written in parallel: rows must not be shared.
        spans.sort_unstable();
        assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0), "attention: sequences share rows");
        self.rows = spans.last().map_or(0, |s| s.1);

        let blocks: Vec<Work> = self.row_blocks(seqs);
        let slots = self.share_out(blocks);
        self.scratch.resize(self.threads, self.shape.head_dim, slots);
    }

    /// Cuts the row blocks into items, and those into a range for each thread; gives the slots that split blocks need.
    ///
    /// A range begins with large items, for long runs of memory, and ends with small ones: each item takes at most
    /// half of what its range still lacks, so that threads which help each other end at about the same time.
    fn share_out(&mut self, blocks: Vec<Work>) -> usize {
        let reads = blocks.iter().all(|w| w.rows_per_kv_head() <= MIN_ROWS);
        let ranges = if reads { self.readers } else { self.threads }.min(MAX_RANGES);
        let total: usize = blocks.iter().map(|w| self.cost(w)).sum();
        let bytes = |n: usize| n / (4 * self.shape.head_dim) * MIN_ROWS;
        let most = (total / (8 * ranges)).max(bytes(ITEM_BYTES)).min(total / (2 * ranges));
        let least = bytes(MIN_BYTES);
        let (mut done, mut slots) = (0, 0);
        for block in blocks {
            let first = self.items.len();
            let (mut segment, mut kv_head) = (block.segments.start, block.kv_heads.start);
            while segment < block.segments.end {
                let part = |segments: std::ops::Range<usize>, kv_heads: std::ops::Range<usize>| Work {
                    segments,
                    kv_heads,
                    ..block.clone()
                };
                let unit = self.cost(&part(segment..segment + 1, kv_head..kv_head + 1));
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
                        && self.cost(&part(segment..end + 1, block.kv_heads.clone())) <= target
                    {
                        end += 1;
                    }
                }
                let work = if end > segment {
                    part(segment..end, block.kv_heads.clone())
                } else {
                    part(segment..segment + 1, kv_head..kv_head + (target / unit).clamp(1, heads_left))
                };
                done += self.cost(&work);
                (segment, kv_head) = if work.kv_heads.end == block.kv_heads.end {
                    (work.segments.end, block.kv_heads.start)
                } else {
                    (segment, work.kv_heads.end)
                };
                self.items.push(Item { work, split: None, goes_on: true });
            }
            // Parts with all segments of their heads are whole themselves.
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

    /// Notes that the items from `first` on are parts of `block`; gives the slots it needs.
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

    /// Cuts all rows into blocks of at most [`MAX_ROWS`]: few rows of many KV heads, or many of one.
    fn row_blocks(&self, seqs: &[AttnRows<'_>]) -> Vec<Work> {
        let group = self.shape.n_heads / self.shape.n_kv_heads;
        // A group larger than a block (multi-query attention with many heads) is cut by heads.
        let heads = group.min(MAX_ROWS);
        let positions = MAX_ROWS / heads;
        let mut blocks = Vec::new();
        for (seq, a) in seqs.iter().filter(|a| a.rows.n_rows > 0).enumerate() {
            let s = &a.rows;
            let last_head = self.shape.n_kv_heads.min(a.kv_heads.end);
            for first in (0..s.n_rows).step_by(positions) {
                let n_pos = positions.min(s.n_rows - first);
                let pos = s.first_pos + first..s.first_pos + first + n_pos;
                let start = self.shape.visible(pos.start, &a.tokens).start;
                let seen = start..self.shape.visible(pos.end - 1, &a.tokens).end.max(start);
                // At least one, also of rows that see nothing: they have a result, too.
                let first_segment = seen.start / self.segment;
                let segments = first_segment..seen.end.div_ceil(self.segment).max(first_segment + 1);
                let kv_heads = (MAX_ROWS / (heads * n_pos)).clamp(1, self.shape.n_kv_heads);
                for kv_head in (a.kv_heads.start..last_head).step_by(kv_heads) {
                    let kv_heads = kv_head..(kv_head + kv_heads).min(last_head);
                    for h in (0..group).step_by(heads) {
                        blocks.push(Work {
                            seq,
                            kv_heads: kv_heads.clone(),
                            heads: h..(h + heads).min(group),
                            pos: pos.clone(),
                            segments: segments.clone(),
                            segment: self.segment,
                            from: a.tokens.start,
                            seen: seen.clone(),
                        });
                    }
                }
            }
        }
        blocks
    }

    /// Relative time: cache lines that come from memory, and rows that compute on them.
    fn cost(&self, w: &Work) -> usize {
        let tokens = w.seen.end.min(w.segments.end * w.segment).saturating_sub(w.segments.start * w.segment);
        tokens.max(16) * w.kv_heads.len() * w.rows_per_kv_head().max(MIN_ROWS)
    }

    /// Bytes of its buffers: enough for all steps that it was planned for so far.
    pub fn bytes(&self) -> usize {
        fn of<T>(v: &Vec<T>) -> usize {
            v.capacity() * size_of::<T>()
        }
        let lists = of(&self.pages) + of(&self.seqs) + of(&self.items) + of(&self.ends);
        lists + of(&self.splits) + of(&self.tallies) + self.scratch.bytes()
    }

    /// Attends all rows of the plan in one layer: `q` and `out` are `[rows][n_heads · head_dim]`. Rows of
    /// `out` that belong to no sequence are left alone.
    ///
    /// # Panics
    /// If `q`, `out`, `kv` or the pool do not match the plan, or this machine lacks the tier.
    pub fn run(&mut self, pool: &Pool, isa: Isa, kv: &LayerKv<'_>, q: &[f32], out: &mut [f32]) {
        let width = self.width();
        self.run_rows(pool, isa, kv, Rows::new(q, width), AttnOut::Whole(RowsMut::new(out, width)));
    }

    /// As [`AttnPlan::run`], but leaves (m, s, o) apart, to be merged with what another device computed
    /// for the same rows over other tokens ([`super::merge_partials`]).
    ///
    /// # Panics
    /// As [`AttnPlan::run`].
    pub fn run_partial(&mut self, pool: &Pool, isa: Isa, kv: &LayerKv<'_>, q: &[f32], part: &mut Partial) {
        let out = AttnOut::Partial(part.rows_mut(self.shape.n_heads, self.shape.head_dim));
        self.run_rows(pool, isa, kv, Rows::new(q, self.width()), out);
    }

    /// Either, with rows that lie anywhere.
    ///
    /// # Panics
    /// As [`AttnPlan::run`].
    pub fn run_rows(&mut self, pool: &Pool, isa: Isa, kv: &LayerKv<'_>, q: Rows<'_>, out: AttnOut<'_>) {
        let choice = Choice {
            many: tiers::select(isa, kv.dtype(), kv.head_dim()),
            few: tiers::for_few_rows(isa, kv.dtype(), kv.head_dim()),
        };
        self.execute(pool, &choice, kv, q, out);
    }

    /// Elements of a row of q, and of a result.
    fn width(&self) -> usize {
        self.shape.n_heads * self.shape.head_dim
    }

    fn check(&self, what: &str, rows: usize, width: usize, planned: usize) {
        assert!(
            rows >= self.rows && width == planned,
            "attention: {what} has {rows} rows of {width}, {} rows of {planned} are planned",
            self.rows
        );
    }

    /// The kernels of `choice` are of `kv`'s type, and run on this machine.
    fn execute(&mut self, pool: &Pool, choice: &Choice, kv: &LayerKv<'_>, q: Rows<'_>, out: AttnOut<'_>) {
        let s = &self.shape;
        assert!(
            kv.n_kv_heads() == s.n_kv_heads && kv.head_dim() == s.head_dim,
            "attention: cache of {} KV heads of {}, planned {} of {}",
            kv.n_kv_heads(),
            kv.head_dim(),
            s.n_kv_heads,
            s.head_dim
        );
        self.check("q", q.len(), q.width(), self.width());
        match &out {
            AttnOut::Whole(out) => self.check("out", out.len(), out.width(), self.width()),
            AttnOut::Partial(part) => {
                self.check("m", part.m.len(), part.m.width(), s.n_heads);
                self.check("s", part.s.len(), part.s.width(), s.n_heads);
                self.check("o", part.o.len(), part.o.width(), self.width());
            }
        }
        assert!(
            pool.threads() <= self.threads,
            "attention: planned for {} threads, the pool has {}",
            self.threads,
            pool.threads()
        );
        let (seqs, pages, items, splits) = (&self.seqs, &self.pages, &self.items, &self.splits);
        let tallies = &self.tallies;
        let sink = &Sink::rows(out);
        let scratch = self.scratch.share();
        let vector_rows = self.vector_rows;
        pool.run_ranges(&self.ends, &|chunk, worker| {
            let item = &items[chunk];
            let seq = &seqs[item.work.seq];
            let next = item.goes_on.then(|| &items[chunk + 1].work).filter(|w| !w.seen.is_empty());
            let next = next.map(|w| (w, &pages[seqs[w.seq].pages.clone()]));
            // All parts of a row block have its rows per KV head, so they are computed, and merged, alike.
            let kernels = choice.of(item.work.rows_per_kv_head(), vector_rows);
            let inputs = Inputs { shape: s, kernels, kv, pages: &pages[seq.pages.clone()], seq, q, next };
            // SAFETY: `scratch` is borrowed mutably for this whole call, workers have distinct numbers
            // below `threads` (checked above), and each runs one chunk at a time.
            let mut own = unsafe { scratch.worker(worker) };
            let Some(split) = item.split.map(|i| &splits[i as usize]) else {
                // SAFETY: row blocks are disjoint and sequences share no rows (checked in `rebuild`), so no
                // other item writes these (row, head)s of the sink, whose size was checked above.
                unsafe { run_work(&inputs, &item.work, &mut own, sink) };
                return;
            };
            // SAFETY: `rebuild` made room for all slots, and those of a segment and KV head belong to one item. The
            // item that merges a KV head has seen all others that hold parts of it finish, and alone writes its part
            // of the sink.
            unsafe {
                let slots = scratch.slots(split.slot0);
                let spread = Sink::segments(slots, &split.work, &item.work);
                run_work(&inputs, &item.work, &mut own, &spread);
                for kv_head in item.work.kv_heads.clone() {
                    let tally = &tallies[split.tally0 + kv_head - split.work.kv_heads.start];
                    // Release what this item wrote, acquire what the others did.
                    if tally.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                        tally.left.store(tally.n_items, Ordering::Relaxed);
                        merge_split(&inputs, &split.work, kv_head, slots, &mut own, sink);
                    }
                }
            }
        });
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::cache::{KvGeometry, PagePool};
    use crate::simd::Caps;
    use crate::tensor::Half;

    /// What each thread begins with is its share, whoever else the requests are: one of 8000 tokens beside 63 of 100.
    #[test]
    fn a_long_request_beside_short_ones_is_spread_evenly() {
        let pages: Vec<u32> = (0..8000u32.div_ceil(PAGE_TOKENS as u32)).collect();
        let shape = AttnShape { n_heads: 32, n_kv_heads: 8, head_dim: 128, scale: 0.1, window: None };
        for long_at in [0, 31, 63] {
            let length = |i| if i == long_at { 8000 } else { 100 };
            let row = |i| SeqRows { pages: &pages, first_pos: length(i) - 1, n_rows: 1, row0: i };
            let rows: Vec<SeqRows<'_>> = (0..64).map(row).collect();
            for (threads, readers) in [(2, 2), (3, 3), (4, 4), (8, 8), (16, 16), (16, 6), (32, 32)] {
                let mut plan = AttnPlan::new(&shape, &[], threads).unwrap().with_readers(readers);
                plan.rebuild(&rows);
                assert_eq!(plan.ends.len(), readers);
                let starts = std::iter::once(0).chain(plan.ends.iter().copied());
                let cost = |(from, &to): (usize, &usize)| {
                    plan.items[from..to].iter().map(|i| plan.cost(&i.work)).sum::<usize>()
                };
                let costs: Vec<usize> = starts.zip(&plan.ends).map(cost).collect();
                let mean = costs.iter().sum::<usize>() as f64 / readers as f64;
                let most = *costs.iter().max().unwrap() as f64;
                assert!(
                    most <= 1.1 * mean,
                    "{threads} threads, {readers} readers: {most} of {mean}: {costs:?}"
                );
            }
        }
    }

    /// Also the tables that `select` does not prefer on this machine.
    #[test]
    fn every_table_agrees_with_the_reference_and_with_itself() {
        let pool = Pool::new(2);
        for dtype in Half::ALL {
            for (head_dim, group, window) in [(64, 3, None), (80, 1, Some(70)), (128, 8, None)] {
                let (len, h_kv) = (700, 2);
                let (width, kv_width) = (h_kv * group * head_dim, h_kv * head_dim);
                let cache =
                    PagePool::new(KvGeometry { n_layers: 1, n_kv_heads: h_kv, head_dim, dtype }, 22).unwrap();
                let kv = cache.layer(0);
                let pages: Vec<u32> = (0..22).map(|i| (i * 5 + 3) % 22).collect();
                let x = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
                let at = |seed: usize, n: usize| (0..n).map(|i| x(i + seed)).collect::<Vec<f32>>();
                for pos in 0..len {
                    // SAFETY: one thread.
                    unsafe { kv.append(&pages, pos, &at(pos * 977, kv_width), &at(pos * 31 + 7, kv_width)) };
                }
                let scale = 1.0 / (head_dim as f32).sqrt();
                let shape = AttnShape { n_heads: h_kv * group, n_kv_heads: h_kv, head_dim, scale, window };
                let q = at(5, 3 * width);
                let run = |kernels: Option<&'static BlockKernels>, first: usize, rows: usize, q: &[f32]| {
                    let rows = SeqRows { pages: &pages, first_pos: first, n_rows: rows, row0: 0 };
                    let mut out = vec![0.0; q.len()];
                    let mut plan = AttnPlan::new(&shape, &[rows], 2).unwrap();
                    let rows = AttnOut::Whole(RowsMut::new(&mut out, width));
                    plan.execute(&pool, &Choice { many: kernels, few: None }, &kv, Rows::new(q, width), rows);
                    out
                };
                let want = run(None, len - 3, 3, &q);
                for table in tiers::all(dtype, head_dim) {
                    let got = run(Some(table), len - 3, 3, &q);
                    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                        // |v| <= 1; scores below √128·(b + ...): see tests/kernels/attention.rs. This
                        // bound is the same formula with its largest terms.
                        let tol = if table.bf16 { 2.0 * (12.0 + 1.0) / 512.0 } else { 1e-4 };
                        assert!((got - want).abs() <= tol, "{}: {i}: {got}, want {want}", table.name);
                    }
                    for row in 0..3 {
                        let alone = run(Some(table), len - 3 + row, 1, &q[row * width..(row + 1) * width]);
                        assert_eq!(alone, got[row * width..(row + 1) * width], "{}: row {row}", table.name);
                    }
                }
            }
        }
    }

    /// Few rows take the vector kernels of the tier below, bit for bit, also where their segments are spread over threads;
    /// more rows, and other tiers, take what they always do.
    #[test]
    fn few_rows_by_vectors_are_those_of_the_tier_below() {
        let (len, h_kv, group, head_dim) = (1300usize, 2usize, 3usize, 64usize);
        let (width, kv_width) = (h_kv * group * head_dim, h_kv * head_dim);
        let pages: Vec<u32> = (0..len.div_ceil(PAGE_TOKENS) as u32).collect();
        let x = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
        let at = |seed: usize, n: usize| (0..n).map(|i| x(i + seed)).collect::<Vec<f32>>();
        let geometry = KvGeometry { n_layers: 1, n_kv_heads: h_kv, head_dim, dtype: Half::BF16 };
        let cache = PagePool::new(geometry, pages.len()).unwrap();
        let kv = cache.layer(0);
        for pos in 0..len {
            // SAFETY: one thread.
            unsafe { kv.append(&pages, pos, &at(pos * 977, kv_width), &at(pos * 31 + 7, kv_width)) };
        }
        let shape =
            AttnShape { n_heads: h_kv * group, n_kv_heads: h_kv, head_dim, scale: 0.125, window: None };
        for isa in Isa::supported().into_iter().skip(1) {
            for rows in [1, 2, 3] {
                let q = at(5, rows * width);
                let run = |isa: Isa, vector_rows: usize| {
                    let rows = SeqRows { pages: &pages, first_pos: len - rows, n_rows: rows, row0: 0 };
                    let mut plan = AttnPlan::new(&shape, &[], 2).unwrap().with_vector_rows(vector_rows);
                    plan.rebuild(&[rows]);
                    let mut out = vec![0.0; q.len()];
                    plan.run(&Pool::new(2), isa, &kv, &q, &mut out);
                    out
                };
                let few = isa == Isa::Amx && rows * group <= 8;
                let like = if few { Isa::Avx512 } else { isa };
                assert_eq!(run(isa, 8), run(like, 0), "{isa}, {rows} positions of {group} heads");
            }
        }
    }

    /// Softmax beside the products of other blocks: the same bits as one kernel after the other, and as the reference up to
    /// rounding, whatever lies in slots that hold no token.
    #[cfg(target_os = "linux")]
    #[test]
    fn runs_of_blocks_have_the_bits_of_blocks_one_by_one() {
        use proptest::prelude::*;
        use proptest::test_runner::{Config, TestRunner};
        if !Caps::get().avx512_bf16 {
            println!("skipped: this CPU lacks AVX-512 BF16");
            return;
        }
        if crate::amx::available().is_err() {
            crate::amx::emulate::install().unwrap();
        }
        let tiles = &crate::simd::attention::amx::KERNELS;
        let one_by_one: &'static BlockKernels =
            Box::leak(Box::new(BlockKernels { run: None, name: "one by one", ..*tiles }));
        let pool = Pool::new(2);
        let edges = [1usize, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 700];
        let length = prop_oneof![prop::sample::select(edges.to_vec()), 1..=700usize];
        let window = prop_oneof![
            2 => Just(None),
            1 => prop::sample::select(vec![1usize, 17, 64, 100, 513]).prop_map(Some),
        ];
        let cases = (
            length,
            prop::sample::select(vec![64usize, 96, 128, 256]),
            (1..=2usize, prop::sample::select(vec![1usize, 2, 3, 4, 5, 7, 8, 17, 32])),
            window,
            (any::<u64>(), 1..40usize),
        );
        let mut runner =
            TestRunner::new(Config { cases: 40, failure_persistence: None, ..Config::default() });
        runner
            .run(&cases, |(len, head_dim, (h_kv, group), window, (seed, rows))| {
                let (width, kv_width) = (h_kv * group * head_dim, h_kv * head_dim);
                let rows = rows.min(len);
                let n_pages = len.div_ceil(PAGE_TOKENS);
                let geometry = KvGeometry { n_layers: 1, n_kv_heads: h_kv, head_dim, dtype: Half::BF16 };
                let cache = PagePool::new(geometry, n_pages).unwrap();
                let kv = cache.layer(0);
                let pages: Vec<u32> =
                    (0..n_pages).map(|i| ((i + seed as usize % 97) % n_pages) as u32).collect();
                let x = |i: u64| {
                    ((seed ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / 8_388_608.0 - 1.0
                };
                let at = |from: usize, n: usize| (from..from + n).map(|i| x(i as u64)).collect::<Vec<f32>>();
                // Slots behind the last token: not numbers.
                let nan = vec![f32::NAN; kv_width];
                for pos in 0..n_pages * PAGE_TOKENS {
                    let (k, v) = if pos < len {
                        (at(pos * 977, kv_width), at(pos * 31 + 7, kv_width))
                    } else {
                        (nan.clone(), nan.clone())
                    };
                    // SAFETY: one thread.
                    unsafe { kv.append(&pages, pos, &k, &v) };
                }
                let scale = 3.0 / (head_dim as f32).sqrt();
                let shape = AttnShape { n_heads: h_kv * group, n_kv_heads: h_kv, head_dim, scale, window };
                let q = at(5, rows * width);
                let run = |kernels: Option<&'static BlockKernels>| {
                    let rows = SeqRows { pages: &pages, first_pos: len - rows, n_rows: rows, row0: 0 };
                    let mut out = vec![0.0; q.len()];
                    let mut plan = AttnPlan::new(&shape, &[rows], 2).unwrap();
                    let rows = AttnOut::Whole(RowsMut::new(&mut out, width));
                    plan.execute(
                        &pool,
                        &Choice { many: kernels, few: None },
                        &kv,
                        Rows::new(&q, width),
                        rows,
                    );
                    out
                };
                let (got, want) = (run(Some(tiles)), run(Some(one_by_one)));
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&got), bits(&want));
                // |v| < 1, and P and q are bf16: as in `every_table_agrees_with_the_reference_and_with_itself`.
                let most = scale * head_dim as f32;
                let tolerance = 2.0 * (most + 1.0) / 512.0;
                for (got, want) in got.iter().zip(&run(None)) {
                    prop_assert!((got - want).abs() <= tolerance, "{} for {}", got, want);
                }
                Ok(())
            })
            .unwrap();
    }
}
