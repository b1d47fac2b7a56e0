//! The description of a sub-batch's work, prepared once per step and used by all layers.

use std::ops::Range;

use super::{Host, HostWorkspace};
use crate::cache::SeqRows;
use crate::simd::attention::{AttnPlan, AttnRows};

/// Consecutive rows of one sequence, for the host.
#[derive(Debug, Clone)]
pub struct HostSeq<'a> {
    /// The sequence's pages on the host, from position 0 on.
    pub pages: &'a [u32],
    /// Position of the first row.
    pub first_pos: usize,
    /// Rows.
    pub n_rows: usize,
    /// The tokens to attend on the host, among those that position and window let a row see. The range begins at the
    /// beginning of a page. [`HostSeq::ALL`] if none are attended elsewhere.
    pub tokens: Range<usize>,
}

impl HostSeq<'_> {
    /// All tokens of a sequence.
    pub const ALL: Range<usize> = 0..usize::MAX;
}

/// A sequence's rows; its pages are kept in [`HostStep::pages`].
struct Seq {
    pages: Range<usize>,
    first_pos: usize,
    n_rows: usize,
    /// First row, counted from the step's first.
    row0: usize,
    tokens: Range<usize>,
}

/// See the [module](self). Reuse it from step to step: it keeps its buffers.
#[derive(Default)]
pub struct HostStep {
    first_row: usize,
    tokens: Vec<u32>,
    positions: Vec<usize>,
    pages: Vec<u32>,
    seqs: Vec<Seq>,
    /// Rows that want logits, ascending, counted from the step's first.
    wanted: Vec<usize>,
    /// Attention plans of this step, made on first use.
    plans: Vec<Planned>,
    /// Plans of earlier steps whose buffers are reused, without and with a window.
    spare: [Vec<AttnPlan>; 2],
}

struct Planned {
    rows: Range<usize>,
    windowed: bool,
    plan: AttnPlan,
}

impl Host {
    /// Prepares the step for `seqs`, whose rows lie in this order from row `first_row` of the workspace on. `tokens`
    /// has one token per row, or none if rows are not embedded on the host. `wanted` are the rows that want logits,
    /// ascending, counted from the step's first.
    ///
    /// # Panics
    /// If tokens, positions or wanted rows do not fit each other.
    pub fn prepare(
        &mut self,
        step: &mut HostStep,
        first_row: usize,
        seqs: &[HostSeq<'_>],
        tokens: impl IntoIterator<Item = u32>,
        wanted: impl IntoIterator<Item = usize>,
    ) {
        step.clear();
        step.first_row = first_row;
        for s in seqs.iter().filter(|s| s.n_rows > 0) {
            let (from, row0) = (step.pages.len(), step.positions.len());
            step.pages.extend_from_slice(s.pages);
            step.positions.extend(s.first_pos..s.first_pos + s.n_rows);
            step.seqs.push(Seq {
                pages: from..step.pages.len(),
                first_pos: s.first_pos,
                n_rows: s.n_rows,
                row0,
                tokens: s.tokens.clone(),
            });
        }
        step.tokens.extend(tokens);
        step.wanted.extend(wanted);
        let rows = step.positions.len();
        assert!(
            step.tokens.is_empty() || step.tokens.len() == rows,
            "{} tokens for {rows} rows",
            step.tokens.len()
        );
        let ascending = step.wanted.windows(2).all(|w| w[0] < w[1]);
        assert!(
            ascending && step.wanted.last().is_none_or(|&r| r < rows),
            "logits wanted of rows {:?} of {rows}",
            step.wanted
        );
        let furthest = step.positions.iter().max().map_or(0, |p| p + 1);
        [&mut self.rope, &mut self.rope_local].into_iter().flatten().for_each(|r| r.extend_to(furthest));
    }
}

impl HostStep {
    fn clear(&mut self) {
        self.forget_plans();
        self.tokens.clear();
        self.positions.clear();
        self.pages.clear();
        self.seqs.clear();
        self.wanted.clear();
    }

    /// Bytes of the lists of a step of `rows` rows whose sequences have `pages` pages, without its plans.
    pub(in crate::engine) fn bytes(rows: usize, pages: usize) -> usize {
        // Token, position and wanted row of each row; in the worst case each row is a separate sequence.
        rows * (4 + 8 + 8 + size_of::<Seq>()) + 4 * pages
    }

    fn forget_plans(&mut self) {
        for p in self.plans.drain(..) {
            self.spare[usize::from(p.windowed)].push(p.plan);
        }
    }

    /// The step's rows in the workspace.
    pub fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.positions.len()
    }

    /// Number of rows that want logits.
    pub fn n_wanted(&self) -> usize {
        self.wanted.len()
    }

    /// The tokens of `rows` of the workspace.
    pub(super) fn tokens(&self, rows: &Range<usize>) -> &[u32] {
        assert!(!self.tokens.is_empty() || rows.is_empty(), "a step that was prepared without tokens");
        &self.tokens[rows.start - self.first_row..rows.end - self.first_row]
    }

    /// The positions of `rows` of the workspace.
    pub(super) fn positions(&self, rows: &Range<usize>) -> &[usize] {
        &self.positions[rows.start - self.first_row..rows.end - self.first_row]
    }

    /// The pages of the sequence that a row of the workspace belongs to.
    pub(super) fn pages_of(&self, row: usize) -> &[u32] {
        &self.pages[self.seq_of(row - self.first_row).pages.clone()]
    }

    fn seq_of(&self, row: usize) -> &Seq {
        &self.seqs[self.seqs.partition_point(|s| s.row0 <= row) - 1]
    }

    /// Those of `rows` of the workspace that follow each other in one sequence, sequence by sequence.
    pub(super) fn runs(&self, rows: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let (first, rows) = (self.first_row, rows.clone());
        let of = move |s: &Seq| {
            let own = first + s.row0..first + s.row0 + s.n_rows;
            own.start.max(rows.start)..own.end.min(rows.end)
        };
        self.seqs.iter().map(of).filter(|run| !run.is_empty())
    }

    /// The attention plan of `rows` of the workspace; row 0 of the plan is the first of them.
    pub(super) fn plan(&mut self, host: &Host, windowed: bool, rows: Range<usize>) -> &mut AttnPlan {
        let known = self.plans.iter().position(|p| p.windowed == windowed && p.rows == rows);
        let at = known.unwrap_or_else(|| {
            let mut plan = self.spare[usize::from(windowed)]
                .pop()
                .unwrap_or_else(|| host.plan(&host.shape(windowed)).expect("a shape that was checked"));
            plan.rebuild_rows(&self.attn_rows(&rows));
            self.plans.push(Planned { rows, windowed, plan });
            self.plans.len() - 1
        });
        &mut self.plans[at].plan
    }

    /// `rows` of the workspace, sequence by sequence.
    fn attn_rows(&self, rows: &Range<usize>) -> Vec<AttnRows<'_>> {
        let rows = rows.start - self.first_row..rows.end - self.first_row;
        let of = |s: &Seq| {
            let (from, to) = (s.row0.max(rows.start), (s.row0 + s.n_rows).min(rows.end));
            (from < to).then(|| AttnRows {
                rows: SeqRows {
                    pages: &self.pages[s.pages.clone()],
                    first_pos: s.first_pos + from - s.row0,
                    n_rows: to - from,
                    row0: from - rows.start,
                },
                tokens: s.tokens.clone(),
                kv_heads: AttnRows::ALL_HEADS,
            })
        };
        self.seqs.iter().filter_map(of).collect()
    }

    /// Drops the rows that want no logits: nothing needs them after the last layer's keys and values. Call it between
    /// that layer's append and its attention; hidden and q of the remaining rows move to the front of the step's rows.
    pub fn keep_wanted(&mut self, ws: &mut HostWorkspace) {
        if self.wanted.len() == self.positions.len() {
            return;
        }
        self.forget_plans();
        let (wanted, first) = (std::mem::take(&mut self.wanted), self.first_row);
        for buffer in [&mut ws.hidden, &mut ws.q] {
            buffer.keep(first, wanted.iter().map(|r| first + r));
        }
        let single = |(to, &r): (usize, &usize)| {
            let s = self.seq_of(r);
            Seq {
                pages: s.pages.clone(),
                first_pos: s.first_pos + r - s.row0,
                n_rows: 1,
                row0: to,
                tokens: s.tokens.clone(),
            }
        };
        self.seqs = wanted.iter().enumerate().map(single).collect();
        for (to, &r) in wanted.iter().enumerate() {
            self.positions[to] = self.positions[r];
            if !self.tokens.is_empty() {
                self.tokens[to] = self.tokens[r];
            }
        }
        self.positions.truncate(wanted.len());
        self.tokens.truncate(wanted.len());
        self.wanted.extend(0..wanted.len());
    }
}
