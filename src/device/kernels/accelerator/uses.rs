//! Declares which pages launches touch to a runtime that watches memory ([`Runtime::declare`]).
//!
//! A kernel finds its pages through lists in device memory, so its parameters do not name them. Without these
//! declarations, nothing would notice a page that is reused before a copy of it or attention over it has ended.

use std::ops::Range;

use super::lists::{SeqPages, lists};
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{Attend, LayerPages, PageMove, Shape, StepContext, StepDesc};
use crate::device::runtime::{DevPtr, Lane, Runtime};

/// The pages of a step, if the runtime watches memory; else empty.
pub(super) fn pages_of(rt: &dyn Runtime, desc: &StepDesc<'_>) -> Vec<SeqPages> {
    let watched = desc.seqs.iter().filter(|s| rt.watches() && s.n_rows > 0 && s.attend != Attend::Elsewhere);
    watched
        .map(|s| {
            let tokens = s.attend.end(s.first_pos + s.n_rows).saturating_sub(s.attend.first_token());
            let pages = s.pages[..tokens.div_ceil(PAGE_TOKENS)].to_vec();
            SeqPages { row0: s.row0, n_rows: s.n_rows, first_pos: s.first_pos, attend: s.attend, pages }
        })
        .collect()
}

/// How launches access the pages of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// They write the pages that hold the rows' positions.
    Append,
    /// They read the pages that a row sees. In layers with this window, pages that the window has left are not read.
    Attend(Option<u32>),
}

/// Declares which pages of `rows` are touched.
pub(super) fn declare(
    rt: &dyn Runtime,
    cx: &StepContext<'_>,
    kv: DevPtr,
    rows: &Range<usize>,
    how: Use,
) -> Result<()> {
    let bytes = cx.shape.page_bytes();
    let mut spans = Vec::new();
    for s in &lists(cx).pages {
        let own = s.row0.max(rows.start)..(s.row0 + s.n_rows).min(rows.end);
        if own.is_empty() || how == Use::Append && !s.attend.stores() {
            continue;
        }
        let from = s.attend.first_token();
        let place = |row: usize| (s.first_pos + row - s.row0 - from) / PAGE_TOKENS;
        let pages = match how {
            Use::Append => place(own.start)..place(own.end - 1) + 1,
            Use::Attend(window) => {
                let first = s.first_pos + own.start - s.row0 + 1;
                let left = window.map_or(0, |w| first.saturating_sub(w as usize)).saturating_sub(from);
                s.pages.len().min(left / PAGE_TOKENS)..s.pages.len()
            }
        };
        spans.extend(s.pages[pages].iter().map(|&p| (kv.add(p as usize * bytes), bytes)));
    }
    match how {
        _ if spans.is_empty() => Ok(()),
        Use::Append => rt.declare(cx.lane, "an append to pages", &[], &spans),
        Use::Attend(_) => rt.declare(cx.lane, "attention over pages", &spans, &[]),
    }
}

/// Declares the pages that are copied between host and device.
pub(super) fn declare_moves(
    rt: &dyn Runtime,
    lane: Lane,
    shape: &Shape,
    layers: &[LayerPages],
    pages: &[PageMove],
    to_host: bool,
) -> Result<()> {
    if !rt.watches() || pages.is_empty() {
        return Ok(());
    }
    let bytes = shape.page_bytes();
    let spans = |base: fn(&LayerPages) -> DevPtr, id: fn(&PageMove) -> u32| -> Vec<(DevPtr, usize)> {
        let of = |l| pages.iter().map(move |p| (base(l).add(id(p) as usize * bytes), bytes));
        layers.iter().flat_map(of).collect()
    };
    let (device, host) = (spans(|l| l.device, |p| p.device), spans(|l| l.host, |p| p.host));
    match to_host {
        true => rt.declare(lane, "a copy of pages to the host", &device, &host),
        false => rt.declare(lane, "a copy of pages to the device", &host, &device),
    }
}
