//! From the sequences of a step to work items, and running them.

use std::sync::atomic::{AtomicU32, Ordering};

use super::item::{Inputs, Scratch, Sink, Work, merge_split, run_work};
use super::kernels::{self, BlockKernels, MAX_ROWS};
use super::{Partial, SEGMENT};
use crate::cache::{LayerKv, PAGE_TOKENS, SeqRows};
use crate::device::host::Pool;
use crate::simd::Isa;
use crate::{Error, Result};

/// Rows are split across threads until there are about this many items per thread: dynamic chunks then
/// leave a thread idle for at most 1/32 of the run.
const ITEMS_PER_THREAD: usize = 32;

/// What attention of one kind of layer looks like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttnShape {
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Elements per head, a multiple of 16.
    pub head_dim: usize,
    /// Factor of the scores, usually 1/√head_dim.
    pub scale: f32,
    /// A row sees only the last `window` tokens, itself included; `None`: all up to itself.
    pub window: Option<usize>,
}

/// The rows of one sequence, its pages kept in [`AttnPlan::pages`].
pub(super) struct Seq {
    pub pages: std::ops::Range<usize>,
    pub first_pos: usize,
    pub row0: usize,
}

/// A row block whose segments are spread over several items.
pub(super) struct Split {
    /// The whole of it.
    pub work: Work,
    /// First slot of the segments' results.
    pub slot0: usize,
    n_items: u32,
    /// Items still to finish in this run; the last one merges.
    left: AtomicU32,
}

struct Item {
    work: Work,
    /// Index into `splits` if this is not the whole row block.
    split: Option<u32>,
    cost: usize,
}

/// The work items of one step, for all layers of one shape. Reuse it from step to step with
/// [`AttnPlan::rebuild`], which keeps its buffers.
pub struct AttnPlan {
    shape: AttnShape,
    threads: usize,
    /// Rows that q and out must have.
    rows: usize,
    pages: Vec<u32>,
    seqs: Vec<Seq>,
    items: Vec<Item>,
    splits: Vec<Split>,
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
        let s = shape;
        if s.head_dim == 0 || !s.head_dim.is_multiple_of(16) {
            return Err(Error::Unsupported(format!(
                "attention: head_dim {}, wanted a positive multiple of 16",
                s.head_dim
            )));
        }
        if s.n_kv_heads == 0 || s.n_heads == 0 || !s.n_heads.is_multiple_of(s.n_kv_heads) {
            return Err(Error::Unsupported(format!(
                "attention: {} query heads, {} KV heads; the first must be a multiple of the second",
                s.n_heads, s.n_kv_heads
            )));
        }
        let mut plan = AttnPlan {
            shape: *shape,
            threads: threads.max(1),
            rows: 0,
            pages: Vec::new(),
            seqs: Vec::new(),
            items: Vec::new(),
            splits: Vec::new(),
            scratch: Scratch::default(),
        };
        plan.rebuild(seqs);
        Ok(plan)
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
        self.pages.clear();
        self.seqs.clear();
        self.items.clear();
        self.splits.clear();
        let mut spans: Vec<(usize, usize)> = Vec::with_capacity(seqs.len());
        for s in seqs.iter().filter(|s| s.n_rows > 0) {
            let end = s.first_pos + s.n_rows;
            assert!(
                end <= s.pages.len() * PAGE_TOKENS,
                "attention: position {} in {} pages of {PAGE_TOKENS}",
                end - 1,
                s.pages.len()
            );
            spans.push((s.row0, s.row0 + s.n_rows));
            let from = self.pages.len();
            self.pages.extend_from_slice(&s.pages[..end.div_ceil(PAGE_TOKENS)]);
            self.seqs.push(Seq { pages: from..self.pages.len(), first_pos: s.first_pos, row0: s.row0 });
        }
        // Results are written in parallel: rows must not be shared.
        spans.sort_unstable();
        assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0), "attention: sequences share rows");
        self.rows = spans.last().map_or(0, |s| s.1);

        let blocks: Vec<Work> = self.row_blocks(seqs);
        let total: usize = blocks.iter().map(|w| self.cost(w)).sum();
        let grain = total / (self.threads * ITEMS_PER_THREAD);
        let mut slots = 0;
        for work in blocks {
            let cost = self.cost(&work);
            let segments = work.segments.len();
            let pieces = if self.threads == 1 || segments < 2 || cost <= grain.max(1) {
                1
            } else {
                cost.div_ceil(grain.max(1)).min(segments)
            };
            if pieces == 1 {
                self.items.push(Item { work, split: None, cost });
                continue;
            }
            let split = self.splits.len() as u32;
            let first = work.segments.start;
            for i in 0..pieces {
                let range = first + segments * i / pieces..first + segments * (i + 1) / pieces;
                let cost = cost * range.len() / segments;
                self.items.push(Item {
                    work: Work { segments: range, ..work.clone() },
                    split: Some(split),
                    cost,
                });
            }
            let n_items = pieces as u32;
            let rows = work.rows();
            self.splits.push(Split { work, slot0: slots, n_items, left: AtomicU32::new(n_items) });
            slots += segments * rows;
        }
        // The heaviest first, so that what is left at the end is small.
        self.items.sort_by_key(|i| std::cmp::Reverse(i.cost));
        self.scratch.resize(self.threads, self.shape.head_dim, slots);
    }

    /// Cuts all rows into blocks of at most [`MAX_ROWS`] that share a KV head.
    fn row_blocks(&self, seqs: &[SeqRows<'_>]) -> Vec<Work> {
        let group = self.shape.n_heads / self.shape.n_kv_heads;
        // A group larger than a block (multi-query attention with many heads) is cut by heads.
        let heads = group.min(MAX_ROWS);
        let positions = MAX_ROWS / heads;
        let mut blocks = Vec::new();
        for (seq, s) in seqs.iter().filter(|s| s.n_rows > 0).enumerate() {
            for first in (0..s.n_rows).step_by(positions) {
                let n_pos = positions.min(s.n_rows - first);
                let pos = s.first_pos + first..s.first_pos + first + n_pos;
                let start = self.shape.window.map_or(0, |w| (pos.start + 1).saturating_sub(w));
                let segments = start / SEGMENT..pos.end.div_ceil(SEGMENT);
                for kv_head in 0..self.shape.n_kv_heads {
                    for h in (0..group).step_by(heads) {
                        let head0 = kv_head * group + h;
                        let heads = head0..head0 + heads.min(group - h);
                        blocks.push(Work {
                            seq,
                            kv_head,
                            heads,
                            pos: pos.clone(),
                            segments: segments.clone(),
                        });
                    }
                }
            }
        }
        blocks
    }

    /// Relative time: cache lines that come from memory, and rows that compute on them.
    fn cost(&self, w: &Work) -> usize {
        let tokens = w.pos.end.min(w.segments.end * SEGMENT) - w.segments.start * SEGMENT;
        tokens.max(16) * w.rows().max(6)
    }

    /// Attends all rows of the plan in one layer: `q` and `out` are `[rows][n_heads · head_dim]`. Rows of
    /// `out` that belong to no sequence are left alone.
    ///
    /// # Panics
    /// If `q`, `out`, `kv` or the pool do not match the plan, or this machine lacks the tier.
    pub fn run(&mut self, pool: &Pool, isa: Isa, kv: &LayerKv<'_>, q: &[f32], out: &mut [f32]) {
        let width = self.shape.n_heads * self.shape.head_dim;
        assert!(
            out.len() >= self.rows * width,
            "attention: out has {} elements, {} rows of {width} are planned",
            out.len(),
            self.rows
        );
        self.execute(pool, kernels::select(isa, kv.dtype(), kv.head_dim()), kv, q, &Sink::normalised(out));
    }

    /// As [`AttnPlan::run`], but leaves (m, s, o) apart, to be merged with what another device computed
    /// for the same rows over other tokens ([`super::merge_partials`]).
    ///
    /// # Panics
    /// As [`AttnPlan::run`].
    pub fn run_partial(&mut self, pool: &Pool, isa: Isa, kv: &LayerKv<'_>, q: &[f32], part: &mut Partial) {
        let n = self.rows * self.shape.n_heads;
        assert!(
            part.m.len() >= n && part.s.len() >= n && part.o.len() >= n * self.shape.head_dim,
            "attention: partial of {} rows x heads, {n} are planned",
            part.m.len()
        );
        self.execute(pool, kernels::select(isa, kv.dtype(), kv.head_dim()), kv, q, &Sink::partial(part));
    }

    /// `kernels` are of `kv`'s type, and run on this machine; `None`: the reference tier.
    fn execute(
        &mut self,
        pool: &Pool,
        kernels: Option<&'static BlockKernels>,
        kv: &LayerKv<'_>,
        q: &[f32],
        sink: &Sink<'_>,
    ) {
        let s = &self.shape;
        assert!(
            kv.n_kv_heads() == s.n_kv_heads && kv.head_dim() == s.head_dim,
            "attention: cache of {} KV heads of {}, planned {} of {}",
            kv.n_kv_heads(),
            kv.head_dim(),
            s.n_kv_heads,
            s.head_dim
        );
        assert!(
            q.len() >= self.rows * s.n_heads * s.head_dim,
            "attention: q has {} elements, {} rows of {} are planned",
            q.len(),
            self.rows,
            s.n_heads * s.head_dim
        );
        assert!(
            pool.threads() <= self.threads,
            "attention: planned for {} threads, the pool has {}",
            self.threads,
            pool.threads()
        );
        let (seqs, pages, items, splits) = (&self.seqs, &self.pages, &self.items, &self.splits);
        let scratch = self.scratch.share();
        pool.run(items.len(), &|chunk, worker| {
            let item = &items[chunk];
            let seq = &seqs[item.work.seq];
            let inputs = Inputs { shape: s, kernels, kv, pages: &pages[seq.pages.clone()], seq, q };
            // SAFETY: `scratch` is borrowed mutably for this whole call, workers have distinct numbers
            // below `threads` (checked above), and each runs one chunk at a time.
            let mut own = unsafe { scratch.worker(worker) };
            let Some(split) = item.split.map(|i| &splits[i as usize]) else {
                // SAFETY: row blocks are disjoint and sequences share no rows (checked in `rebuild`), so no
                // other item writes these (row, head)s of the sink, whose size `run` checked.
                unsafe { run_work(&inputs, &item.work, &mut own, sink) };
                return;
            };
            // SAFETY: `rebuild` made room for all slots, and those of a segment belong to one item. The item
            // that merges has seen all others finish, and alone writes the row block's part of the sink.
            unsafe {
                let slots = scratch.slots(split.slot0);
                let spread = Sink::segments(slots, split.work.segments.start);
                run_work(&inputs, &item.work, &mut own, &spread);
                // Release what this item wrote, acquire what the others did.
                if split.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    split.left.store(split.n_items, Ordering::Relaxed);
                    merge_split(&inputs, &split.work, slots, &mut own, sink);
                }
            }
        });
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::cache::{KvDType, KvGeometry, PagePool};

    /// Also the tables that `select` does not prefer on this machine.
    #[test]
    fn every_table_agrees_with_the_reference_and_with_itself() {
        let pool = Pool::new(2);
        for dtype in KvDType::ALL {
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
                    plan.execute(&pool, kernels, &kv, q, &Sink::normalised(&mut out));
                    out
                };
                let want = run(None, len - 3, 3, &q);
                for table in kernels::all(dtype, head_dim) {
                    let got = run(Some(table), len - 3, 3, &q);
                    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                        // |v| <= 1; scores below √128·(b + ...): see tests/attention_vs_reference.rs. This
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
}
