//! Moves of pages: of requests that change sides, and through staging memory.

use std::ops::Range;

use super::blank;
use super::block::Lowering;
use super::class::page_span;
use crate::program::iteration::{Group, Iteration, MoveRequest};
use crate::program::op::{Buffer, Kind, Op, Region, Work};
use crate::program::placement::{Placement, Side};
use crate::program::unit::Unit;

/// One operation for each move, over the layers whose keys and values are on the device.
pub(super) fn page_moves(placement: &Placement, iteration: &Iteration) -> Vec<Op> {
    let mut layers: Vec<Range<u32>> = Vec::new();
    for (l, layer) in (0u32..).zip(&placement.layers) {
        match layers.last_mut() {
            _ if layer.kv == Side::Host => {}
            Some(run) if run.end == l => run.end += 1,
            _ => layers.push(l..l + 1),
        }
    }
    let count: u32 = layers.iter().map(|run| run.end - run.start).sum();
    let op = |m: &MoveRequest| {
        let regions = |side| -> Vec<Region> {
            let of = |layers: &Range<u32>| Region {
                buffer: Buffer::Pages(side, m.request),
                layers: layers.clone(),
                span: m.pages.clone(),
            };
            layers.iter().map(of).collect()
        };
        let (kind, unit, from) = match m.to {
            Side::Host => (Kind::PageOut { staged: None }, Unit::D2h, Side::Device),
            Side::Device => (Kind::PageIn { staged: None }, Unit::H2d, Side::Host),
        };
        let pages = u64::from(m.pages.end - m.pages.start) * u64::from(count);
        // The old place is given up: who comes after must not find it in use.
        let writes = [regions(m.to), regions(from)].concat();
        Op { work: Work { pages, ..Work::default() }, reads: regions(from), writes, ..blank(kind, unit) }
    };
    let moves = iteration.moves.iter().filter(|m| !m.pages.is_empty() && count > 0);
    moves.map(op).collect()
}

impl Lowering<'_> {
    /// Pages of one layer to staging memory: those with `tokens` of each group.
    pub(super) fn page_in(
        &self,
        ops: &mut Vec<Op>,
        class: usize,
        l: u32,
        slot: u8,
        tokens: impl Fn(&Group) -> Range<u32>,
    ) {
        for at in self.classes[class].groups.clone() {
            let group = &self.groups[at as usize];
            let span = page_span(tokens(group));
            if !span.is_empty() {
                let kind = Kind::PageIn { staged: Some(slot) };
                ops.push(self.staged_move(kind, Unit::H2d, l, slot, at, span));
            }
        }
    }

    /// Pages with new tokens from staging memory to the host.
    pub(super) fn page_out(&self, ops: &mut Vec<Op>, class: usize, l: u32, slot: u8) {
        for at in self.classes[class].groups.clone() {
            let group = &self.groups[at as usize];
            let span = page_span(group.first..group.end());
            let kind = Kind::PageOut { staged: Some(slot) };
            ops.push(self.staged_move(kind, Unit::D2h, l, slot, at, span));
        }
    }

    fn staged_move(&self, kind: Kind, unit: Unit, l: u32, slot: u8, at: u32, span: Range<u32>) -> Op {
        let request = self.groups[at as usize].request;
        let home =
            Region { buffer: Buffer::Pages(Side::Host, request), layers: l..l + 1, span: span.clone() };
        let pages = u64::from(span.end - span.start);
        let staged = Region { buffer: Buffer::StagedPages(slot, request), layers: 0..1, span };
        let (reads, writes) = if unit == Unit::H2d { (home, staged) } else { (staged, home) };
        Op {
            layer: Some(l),
            sub_batch: self.sub_batch,
            groups: at..at + 1,
            work: Work { pages, ..Work::default() },
            reads: vec![reads],
            writes: vec![writes],
            ..blank(kind, unit)
        }
    }
}
