//! A prepared step, in the form that operations on the host use.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::op::Span;
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{Attend, Limits, StepDesc, StepRows};
use crate::device::runtime::DevPtr;
use crate::{Error, Result};

/// Where a row's keys and values go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Row {
    /// A page of the device.
    Here { pos: usize, page: u32, token: usize },
    /// The mailbox, or pages of another step.
    Elsewhere { pos: usize },
}

/// Consecutive rows of one sequence.
#[derive(Debug)]
pub(super) struct CpuSeq {
    pub row0: usize,
    pub n_rows: usize,
    pub attend: Attend,
    /// Pages that are attended over.
    pub pages: Vec<u32>,
}

impl CpuSeq {
    pub fn rows(&self) -> Range<usize> {
        self.row0..self.row0 + self.n_rows
    }

    /// The page of tokens `32·i..`.
    pub fn page(&self, i: usize) -> u32 {
        self.pages[i - self.attend.first_token() / PAGE_TOKENS]
    }
}

/// A postponed call of attention: where results are exact, rows with [`Attend::From`] are attended when the rest is
/// merged.
#[derive(Debug, Clone)]
pub(super) struct Late {
    pub rows: Range<usize>,
    /// Base of the pages.
    pub kv: DevPtr,
    pub windowed: bool,
}

/// The step.
pub(super) struct CpuStep {
    /// Tokens of the rows, in device memory.
    pub list: Span,
    pub lists: Arc<StepRows>,
    pub rows: Vec<Row>,
    pub seqs: Vec<CpuSeq>,
    pub epoch: u32,
    /// Postponed calls of the layers attended last.
    late: Mutex<Vec<Late>>,
}

impl CpuStep {
    pub fn new(limits: &Limits, desc: &StepDesc<'_>, memory: DevPtr) -> Result<CpuStep> {
        let lists = Arc::new(StepRows::new(limits, desc)?);
        let (mut rows, mut seqs) = (Vec::new(), Vec::new());
        for s in desc.seqs.iter().filter(|s| s.n_rows > 0) {
            let from = s.attend.first_token();
            rows.extend((s.first_pos..s.first_pos + s.n_rows).map(|pos| match s.attend {
                Attend::Elsewhere | Attend::UpTo { .. } => Row::Elsewhere { pos },
                Attend::Here | Attend::From { .. } | Attend::Since { .. } => {
                    let page = s.pages[(pos - from) / PAGE_TOKENS];
                    Row::Here { pos, page, token: pos % PAGE_TOKENS }
                }
            }));
            let end = s.attend.end(s.first_pos + s.n_rows);
            let pages = s.pages[..end.saturating_sub(from).div_ceil(PAGE_TOKENS)].to_vec();
            seqs.push(CpuSeq { row0: s.row0, n_rows: s.n_rows, attend: s.attend, pages });
        }
        Ok(CpuStep {
            list: Span::new(memory, 4 * rows.len()),
            lists,
            rows,
            seqs,
            epoch: desc.epoch,
            late: Mutex::default(),
        })
    }

    /// Remembers a postponed call of attention.
    pub fn attend_late(&self, call: Late) {
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        late.retain(|l| l.rows.end <= call.rows.start || call.rows.end <= l.rows.start);
        late.push(call);
    }

    /// The last call of attention of some rows.
    ///
    /// # Errors
    /// [`Error::Usage`] if there was none.
    pub fn late(&self, rows: &Range<usize>) -> Result<Late> {
        let late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        let found = late.iter().find(|l| l.rows.start <= rows.start && rows.end <= l.rows.end);
        found.cloned().ok_or_else(|| {
            Error::usage(format!("a merge of rows {rows:?}, of which no attention was asked for here"))
        })
    }

    /// The rows that are not padding.
    pub fn clip(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start.min(self.rows.len())..rows.end.min(self.rows.len())
    }

    pub fn position(&self, row: usize) -> usize {
        match self.rows[row] {
            Row::Here { pos, .. } | Row::Elsewhere { pos } => pos,
        }
    }

    /// The range from the smallest position of these rows to the largest.
    pub fn positions(&self, rows: &Range<usize>) -> Range<usize> {
        let all = || rows.clone().map(|r| self.position(r));
        all().min().unwrap_or(0)..all().max().map_or(0, |p| p + 1)
    }

    /// Pages that some rows append to, ascending.
    pub fn pages_written(&self, rows: &Range<usize>) -> Vec<u32> {
        let here = |r: usize| match self.rows[r] {
            Row::Here { page, .. } => Some(page),
            Row::Elsewhere { .. } => None,
        };
        let mut pages: Vec<u32> = rows.clone().filter_map(here).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }

    /// The sequences of some rows, which begin and end with sequences.
    pub fn seqs(&self, rows: &Range<usize>) -> Range<usize> {
        let at = |row: usize| self.seqs.partition_point(|s| s.row0 < row);
        at(rows.start)..at(rows.end)
    }
}
