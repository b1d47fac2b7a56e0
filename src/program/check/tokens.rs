//! Which tokens' keys and values are where.
//!
//! ```text
//! a request   [ 0 .. boundary )[ boundary .. stored before )[ new tokens )
//! a cell        FAR              NEAR                        NEW
//! ```
//! Without moves of pages these three are written, read and asked for as wholes: a set of them tells it for any number of requests.
//! Tokens of a request whose pages move, or go through staging memory, are followed by number.

use std::collections::HashMap;

use super::{Walk, flip};
use crate::cache::PAGE_TOKENS;
use crate::program::iteration::{Group, Kv, RequestId};
use crate::program::op::{Buffer, Kind, Op, Part};
use crate::program::placement::{Placement, Side};

/// Tokens before the boundary.
pub(super) const FAR: u8 = 1;
/// Those from it on that were stored before.
pub(super) const NEAR: u8 = 2;
/// Those of this step.
pub(super) const NEW: u8 = 4;

/// Windows that are told apart; with more, tokens are followed by number.
const MOST_WINDOWS: usize = 32;

/// Which cells of a request have tokens, and which of them rows see.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cells {
    some: u8,
    /// A bit for each window: whether its rows see tokens of this cell.
    far: u32,
    near: u32,
}

impl Cells {
    /// The cells of a group with each of the model's windows; `None` where cells cannot tell.
    pub fn of(group: &Group, windows: &[Option<u32>]) -> Option<Cells> {
        let boundary = boundary(group);
        if windows.len() > MOST_WINDOWS || boundary > group.first {
            return None;
        }
        let cell = |tokens: bool, cell: u8| if tokens { cell } else { 0 };
        let mut cells = Cells {
            some: cell(boundary > 0, FAR) | cell(boundary < group.first, NEAR) | cell(group.tokens > 0, NEW),
            far: 0,
            near: 0,
        };
        for (at, window) in windows.iter().enumerate() {
            let first = first_seen(group, *window);
            cells.far |= u32::from(first < boundary) << at;
            cells.near |= u32::from(first < group.first) << at;
        }
        Some(cells)
    }

    /// What an attention with the model's `window`-th window needs.
    pub fn needs(self, part: Part, window: usize) -> u8 {
        let far = if self.far >> window & 1 == 1 { FAR } else { 0 };
        let near = if self.near >> window & 1 == 1 { NEAR } else { 0 };
        let of = match part {
            Part::Whole => far | near | NEW,
            Part::FromBoundary => near | NEW,
            Part::UpToBoundary => far,
        };
        of & self.some
    }

    /// Those of `cells` that have tokens.
    pub fn of_these(self, cells: u8) -> u8 {
        cells & self.some
    }
}

/// The first token that a row of a group sees: row r sees (r − window, r].
pub(super) fn first_seen(group: &Group, window: Option<u32>) -> u32 {
    window.map_or(0, |w| (group.first + 1).saturating_sub(w))
}

pub(super) fn boundary(group: &Group) -> u32 {
    match group.kv {
        Kv::Split { boundary, .. } => boundary,
        _ => 0,
    }
}

/// The tokens that an attention of a group reads.
pub(super) fn attended(group: &Group, part: Part, window: Option<u32>) -> (u32, u32) {
    let first = first_seen(group, window);
    match part {
        Part::Whole => (first, group.end()),
        Part::FromBoundary => (boundary(group).max(first), group.end()),
        Part::UpToBoundary => (first.min(boundary(group)), boundary(group)),
    }
}

/// Sorted, disjoint ranges of tokens.
pub(super) type Ranges = Vec<(u32, u32)>;

/// Adds `new`.
pub(super) fn insert(ranges: &mut Ranges, new: (u32, u32)) {
    ranges.push(new);
    ranges.sort_unstable();
    let mut merged: Ranges = Vec::new();
    for &(a, b) in ranges.iter() {
        match merged.last_mut() {
            Some(last) if a <= last.1 => last.1 = last.1.max(b),
            _ => merged.push((a, b)),
        }
    }
    *ranges = merged;
}

pub(super) fn holds(ranges: &[(u32, u32)], (a, b): (u32, u32)) -> bool {
    a >= b || ranges.iter().any(|r| r.0 <= a && b <= r.1)
}

/// The tokens of requests that are followed by number: by request, layer and side.
#[derive(Default)]
pub(super) struct FollowedTokens {
    layers: usize,
    of: HashMap<RequestId, Vec<[Ranges; 2]>>,
}

impl FollowedTokens {
    pub fn new(placement: &Placement) -> FollowedTokens {
        FollowedTokens { layers: placement.layers.len(), of: HashMap::new() }
    }

    pub fn at(&self, side: Side, layer: u32, request: RequestId) -> &[(u32, u32)] {
        self.of.get(&request).map_or(&[], |layers| &layers[layer as usize][side as usize])
    }

    pub fn at_mut(&mut self, side: Side, layer: u32, request: RequestId) -> &mut Ranges {
        let layers = self.of.entry(request).or_insert_with(|| vec![<[Ranges; 2]>::default(); self.layers]);
        &mut layers[layer as usize][side as usize]
    }

    fn put(&mut self, side: Side, layer: u32, request: RequestId, range: (u32, u32)) {
        if range.0 < range.1 {
            insert(self.at_mut(side, layer, request), range);
        }
    }
}

impl Walk<'_> {
    /// What earlier steps have stored; pages that move in this iteration are still where they come from.
    pub(super) fn stored_before(&mut self) {
        let placement = self.placement;
        let page = PAGE_TOKENS as u32;
        let on_host = |layer: usize| placement.layers[layer].kv == Side::Host;
        let mut with_rows: Vec<Group> = Vec::new();
        for rows in &mut self.rows {
            rows.stored_before(on_host);
            with_rows.extend(rows.runs().iter().filter(|run| run.is_own()).map(|run| *rows.group(run)));
        }
        // Of requests that have no rows in this step, that is all that is known.
        let others = self.iteration.moves.iter().filter(|m| with_rows.iter().all(|g| g.request != m.request));
        for m in others.filter(|m| !m.pages.is_empty()) {
            for (l, _) in (0u32..).zip(&placement.layers).filter(|(_, l)| l.kv == Side::Device) {
                self.tokens.put(flip(m.to), l, m.request, (m.pages.start * page, m.pages.end * page));
            }
        }
        for group in &with_rows {
            for (l, layer) in (0u32..).zip(&placement.layers) {
                let tokens = &mut self.tokens;
                let mut put = |side, range| tokens.put(side, l, group.request, range);
                if layer.kv == Side::Host {
                    put(Side::Host, (0, group.first));
                    continue;
                }
                let on_host = match group.kv {
                    Kv::Device => 0,
                    Kv::Host => group.first,
                    Kv::Split { boundary, .. } => boundary,
                };
                let of = self.iteration.moves.iter().filter(|m| m.request == group.request);
                let mut cuts: Vec<(u32, u32, Side)> = of
                    .map(|m| (m.pages.start * page, (m.pages.end * page).min(group.first), flip(m.to)))
                    .collect();
                cuts.sort_unstable();
                let mut at = 0;
                let mut fill = |from: u32, to: u32| {
                    put(Side::Host, (from.min(on_host), to.min(on_host)));
                    put(Side::Device, (from.max(on_host), to.max(on_host)));
                };
                for &(a, b, _) in &cuts {
                    fill(at, a);
                    at = b;
                }
                fill(at, group.first);
                for (a, b, side) in cuts {
                    put(side, (a, b));
                }
            }
        }
    }

    /// Pages that move.
    pub(super) fn pages(&mut self, op: &Op, staged: Option<u8>) -> Result<(), String> {
        let [read, ..] = &op.reads[..] else { return Err("reads nothing".into()) };
        let page = PAGE_TOKENS as u32;
        let out = matches!(op.kind, Kind::PageOut { .. });
        let request = match read.buffer {
            Buffer::Pages(_, request) | Buffer::StagedPages(_, request) => request,
            _ => return Err("reads something else than pages".into()),
        };
        let (from, to) = if out { (Side::Device, Side::Host) } else { (Side::Host, Side::Device) };
        let range = (read.span.start * page, read.span.end * page);
        let clip = |ranges: &[(u32, u32)]| -> Option<(u32, u32)> {
            // The last page need not be full.
            let last = ranges.iter().map(|r| r.1).max()?;
            let moved = (range.0, range.1.min(last));
            holds(ranges, moved).then_some(moved)
        };
        match staged {
            Some(slot) if out => {
                let (layer, ranges) = self.staged.get(&(slot, request)).cloned().unwrap_or_default();
                if Some(layer) != op.layer {
                    return Err(format!("staging memory holds layer {layer}"));
                }
                let moved = clip(&ranges).ok_or("the tokens are not in staging memory")?;
                insert(self.tokens.at_mut(Side::Host, layer, request), moved);
            }
            Some(slot) => {
                let layer = self.layer(op)?;
                let there = self.tokens.at(Side::Host, layer, request);
                let moved = clip(there).ok_or("the tokens are not on the host")?;
                self.staged.insert((slot, request), (layer, vec![moved]));
            }
            None => {
                let declared = |l: u32| op.reads.iter().any(|r| r.layers.contains(&l));
                for (l, layer) in (0u32..).zip(&self.placement.layers) {
                    if layer.kv == Side::Host {
                        continue;
                    }
                    if !declared(l) {
                        return Err(format!("leaves out layer {l}"));
                    }
                    let moved = clip(self.tokens.at(from, l, request));
                    let moved = moved.ok_or_else(|| format!("layer {l}: tokens {range:?} are not there"))?;
                    insert(self.tokens.at_mut(to, l, request), moved);
                    // What is gone from its side.
                    let ranges = self.tokens.at_mut(from, l, request);
                    *ranges = ranges
                        .iter()
                        .flat_map(|&(a, b)| [(a, b.min(moved.0)), (a.max(moved.1), b)])
                        .filter(|r| r.0 < r.1)
                        .collect();
                }
            }
        }
        Ok(())
    }
}
