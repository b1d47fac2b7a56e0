//! A prepared step, as the host's operations need it.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::op::Span;
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{Attend, Limits, StepDesc};
use crate::device::runtime::DevPtr;

/// Where a row's keys and values go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Row {
    /// To a page of the device.
    Here { pos: usize, page: u32, token: usize },
    /// To the mailbox.
    Elsewhere { pos: usize, slot: usize },
    /// It belongs to no sequence.
    Nobody,
}

/// Consecutive rows of one sequence.
#[derive(Debug)]
pub(super) struct Seq {
    pub row0: usize,
    pub n_rows: usize,
    pub attend: Attend,
    /// First of its rows among those attended in part.
    pub partial0: usize,
    /// Those attended over.
    pub pages: Vec<u32>,
    /// Number of the first of them in the sequence.
    first_page: usize,
}

impl Seq {
    pub fn rows(&self) -> Range<usize> {
        self.row0..self.row0 + self.n_rows
    }

    /// The page of tokens `32·i..`.
    pub fn page(&self, i: usize) -> u32 {
        self.pages[i - self.first_page]
    }
}

/// The step.
pub(super) struct HostStep {
    /// Tokens of the rows, in device memory.
    pub list: Span,
    pub rows: Vec<Row>,
    pub seqs: Vec<Seq>,
    pub logit_rows: Vec<u32>,
    pub epoch: u32,
    pub n_published: usize,
    pub n_partial: usize,
    /// Rows of the present layer that are in the mailbox.
    arrived: AtomicUsize,
}

impl HostStep {
    pub fn new(limits: &Limits, desc: &StepDesc<'_>, memory: DevPtr) -> HostStep {
        let n = desc.tokens.len();
        assert!(
            n <= desc.launch_rows
                && desc.launch_rows <= limits.rows
                && desc.logit_rows.len() <= limits.logit_rows,
            "a step of {n} rows and {} logits for {}, within {limits:?}",
            desc.logit_rows.len(),
            desc.launch_rows
        );
        let mut rows = vec![Row::Nobody; n];
        let mut seqs = Vec::new();
        let (mut n_published, mut n_partial) = (0, 0);
        for s in desc.seqs.iter().filter(|s| s.n_rows > 0) {
            let partial0 = n_partial;
            for i in 0..s.n_rows {
                let pos = s.first_pos + i;
                rows[s.row0 + i] = match s.attend {
                    Attend::Elsewhere => {
                        n_published += 1;
                        Row::Elsewhere { pos, slot: n_published - 1 }
                    }
                    Attend::Here | Attend::From { .. } => {
                        Row::Here { pos, page: s.pages[pos / PAGE_TOKENS], token: pos % PAGE_TOKENS }
                    }
                };
            }
            let used = (s.first_pos + s.n_rows).div_ceil(PAGE_TOKENS);
            let first_page = match s.attend {
                Attend::Here => 0,
                Attend::From { from } => {
                    n_partial += s.n_rows;
                    from / PAGE_TOKENS
                }
                Attend::Elsewhere => used,
            };
            let pages = if first_page < used { s.pages[first_page..used].to_vec() } else { vec![] };
            seqs.push(Seq { row0: s.row0, n_rows: s.n_rows, attend: s.attend, partial0, pages, first_page });
        }
        HostStep {
            list: Span::new(memory, 4 * n),
            rows,
            seqs,
            logit_rows: desc.logit_rows.to_vec(),
            epoch: desc.epoch,
            n_published,
            n_partial,
            arrived: AtomicUsize::new(0),
        }
    }

    /// The rows that are not padding.
    pub fn clip(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start.min(self.rows.len())..rows.end.min(self.rows.len())
    }

    pub fn position(&self, row: usize) -> usize {
        match self.rows[row] {
            Row::Here { pos, .. } | Row::Elsewhere { pos, .. } => pos,
            Row::Nobody => 0,
        }
    }

    /// From the smallest position of some rows to the largest.
    pub fn positions(&self, rows: &Range<usize>) -> Range<usize> {
        let all = || rows.clone().map(|r| self.position(r));
        all().min().unwrap_or(0)..all().max().map_or(0, |p| p + 1)
    }

    /// Pages that some rows append to, ascending.
    pub fn pages_written(&self, rows: &Range<usize>) -> Vec<u32> {
        let here = |r: usize| match self.rows[r] {
            Row::Here { page, .. } => Some(page),
            _ => None,
        };
        let mut pages: Vec<u32> = rows.clone().filter_map(here).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }

    /// Places in the mailbox of some consecutive rows: consecutive, too.
    pub fn published(&self, rows: &Range<usize>) -> Range<usize> {
        let slots = || {
            rows.clone().filter_map(|r| match self.rows[r] {
                Row::Elsewhere { slot, .. } => Some(slot),
                _ => None,
            })
        };
        slots().min().unwrap_or(0)..slots().max().map_or(0, |s| s + 1)
    }

    /// `n` more rows of a layer are in the mailbox: whether all are now.
    pub fn arrive(&self, n: usize) -> bool {
        let all = self.arrived.fetch_add(n, Ordering::Relaxed) + n == self.n_published;
        if all {
            self.arrived.store(0, Ordering::Relaxed);
        }
        n > 0 && all
    }

    /// Rows attended elsewhere, in their order.
    pub fn elsewhere(&self) -> impl Iterator<Item = usize> {
        (0..self.rows.len()).filter(|&r| matches!(self.rows[r], Row::Elsewhere { .. }))
    }

    /// Rows attended in part, in their order.
    pub fn partial(&self) -> impl Iterator<Item = usize> {
        self.seqs.iter().filter(|s| matches!(s.attend, Attend::From { .. })).flat_map(Seq::rows)
    }
}
