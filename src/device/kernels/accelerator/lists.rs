//! Where a step's lists are in device memory, for the operations that read them.

use super::super::attention::PrefillKernel;
use super::scratch::Scratch;
use crate::device::accelerator::{Attend, StepContext};
use crate::device::runtime::DevPtr;

/// One work list.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct List {
    pub items: DevPtr,
    pub n: DevPtr,
    /// Upper bound of the number of items, for the grid.
    pub max: usize,
}

/// The work lists of layers that see the same tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lists {
    pub decode: List,
    pub prefill: List,
}

/// The work of the rows between two cuts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PartLists {
    pub full: Lists,
    /// Of layers with the model's window.
    pub window: Option<Lists>,
}

/// Addresses and sizes of a step's lists.
#[derive(Debug, Clone)]
pub(super) struct StepLists {
    pub tokens: DevPtr,
    pub row_pos: DevPtr,
    pub row_slot: DevPtr,
    /// Each row's place in the mailbox, or none; then the number of rows that have one.
    pub publish_slot: DevPtr,
    pub n_published: DevPtr,
    /// The row of each place.
    pub published: DevPtr,
    pub epoch: DevPtr,
    pub arrived: DevPtr,
    pub logit_rows: DevPtr,
    /// Number of logit rows that launches are sized for.
    pub launch_logits: usize,
    /// Rows attended on another device, and their places in the mailbox.
    pub elsewhere: DevPtr,
    pub places: DevPtr,
    /// Rows whose attention is merged with a partial result from another device.
    pub partial_rows: DevPtr,
    /// The words 1, 2, 3, …, one for every partial row: kernels that read their row count from memory are given the
    /// address of one of them.
    pub counts: DevPtr,
    pub page_table: DevPtr,
    /// One more than the largest page number in it.
    pub n_pages: usize,
    /// The step's pages, if the runtime watches memory; else empty.
    pub pages: Vec<SeqPages>,
    pub prefill: PrefillKernel,
    pub parts: Vec<PartLists>,
    pub scratch: Scratch,
}

/// A sequence's rows of a step, and its pages from [`Attend::first_token`]'s on.
#[derive(Debug, Clone)]
pub(super) struct SeqPages {
    pub row0: usize,
    pub n_rows: usize,
    pub first_pos: usize,
    pub attend: Attend,
    pub pages: Vec<u32>,
}

pub(super) fn lists<'a>(cx: &'a StepContext<'_>) -> &'a StepLists {
    cx.step.inner.downcast_ref().expect("a step that this accelerator prepared")
}

pub(super) fn linear_scratch(cx: &StepContext<'_>) -> DevPtr {
    cx.ws.scratch.add(lists(cx).scratch.linear)
}
