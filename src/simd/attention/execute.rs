//! Runs the work items of a plan on the pool.

use std::sync::atomic::Ordering;

use super::item::{Choice, Inputs, Sink, merge_split, run_work};
use super::plan::AttnPlan;
use super::{AttnOut, Partial, tiers};
use crate::cache::LayerKv;
use crate::host::Pool;
use crate::simd::Isa;
use crate::tensor::{Rows, RowsMut};

impl AttnPlan {
    /// Attends all rows of the plan in one layer: `q` and `out` are `[rows][n_heads · head_dim]`. Rows of `out` that
    /// belong to no sequence are left unchanged.
    ///
    /// # Panics
    /// If `q`, `out`, `kv` or the pool do not match the plan, or this machine lacks the tier.
    pub fn run(&mut self, pool: &Pool, isa: Isa, kv: &LayerKv<'_>, q: &[f32], out: &mut [f32]) {
        let width = self.width();
        self.run_rows(pool, isa, kv, Rows::new(q, width), AttnOut::Whole(RowsMut::new(out, width)));
    }

    /// As [`AttnPlan::run`], but writes (m, s, o), to be merged with another device's result for the same rows over
    /// other tokens ([`super::merge_partials`]).
    ///
    /// # Panics
    /// As [`AttnPlan::run`].
    pub fn run_partial(&mut self, pool: &Pool, isa: Isa, kv: &LayerKv<'_>, q: &[f32], part: &mut Partial) {
        let out = AttnOut::Partial(part.rows_mut(self.shape.n_heads, self.shape.head_dim));
        self.run_rows(pool, isa, kv, Rows::new(q, self.width()), out);
    }

    /// [`AttnPlan::run`] or [`AttnPlan::run_partial`], according to `out`, with rows that may lie anywhere.
    ///
    /// # Panics
    /// As [`AttnPlan::run`].
    pub fn run_rows(&mut self, pool: &Pool, isa: Isa, kv: &LayerKv<'_>, q: Rows<'_>, out: AttnOut<'_>) {
        let choice = Choice {
            many: tiers::select(isa, kv.dtype(), kv.head_dim()),
            few: tiers::for_few_rows(isa, kv.dtype(), kv.head_dim()),
            vector_rows: self.vector_rows,
        };
        self.execute(pool, choice, kv, q, out);
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

    /// Runs the plan. The kernels of `choice` must be for `kv`'s type and supported by this machine.
    fn execute(&mut self, pool: &Pool, choice: Choice, kv: &LayerKv<'_>, q: Rows<'_>, out: AttnOut<'_>) {
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
            AttnOut::WithSinks(out, sinks) => {
                self.check("out", out.len(), out.width(), self.width());
                assert!(sinks.len() == s.n_heads, "attention: {} sinks, {} heads", sinks.len(), s.n_heads);
            }
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
        let (seqs, pages, shares) = (&self.seqs, &self.pages, &self.shares);
        let sink = &Sink::rows(out);
        let scratch = self.scratch.share();
        pool.run_ranges(&shares.ends, &|chunk, worker| {
            let item = &shares.items[chunk];
            let seq = &seqs[item.work.seq];
            let next = item.goes_on.then(|| &shares.items[chunk + 1].work).filter(|w| !w.seen.is_empty());
            let next = next.map(|w| (w, &pages[seqs[w.seq].pages.clone()]));
            let inputs = Inputs { shape: s, choice, kv, pages: &pages[seq.pages.clone()], seq, q, next };
            // SAFETY: `scratch` is borrowed mutably for this whole call, workers have distinct numbers
            // below `threads` (checked above), and each runs one chunk at a time.
            let mut own = unsafe { scratch.worker(worker) };
            let Some(split) = item.split.map(|i| &shares.splits[i as usize]) else {
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
                    let tally = &shares.tallies[split.tally0 + kv_head - split.work.kv_heads.start];
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
mod tests;
