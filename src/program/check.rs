//! Verifies a program: every row passes every sublayer once and in order, on a side that has the weights and the keys and
//! values, and reads values of the layer that it is at.
//!
//! The check knows what operations mean and nothing of how they were made: it walks the program and keeps, for every row and
//! side, which value is there. That operations of different lanes keep the program's order where they share memory is the
//! business of [`super::order`], for the regions that operations name; that they name all they touch is checked in `declared`.
//!
//! Of asynchronous iterations a row passes the sublayers in several: [`parked::Parked`] is what is carried from one to the next.

mod declared;
pub mod parked;

use std::collections::HashMap;
use std::ops::Range;

use super::iteration::{Group, Iteration, Kv, RequestId, Wants};
use super::op::{Buffer, Cargo, Kind, Op, Part, Program, Unit};
use super::placement::{Placement, Residence, Side, Sublayer};
use crate::cache::PAGE_TOKENS;

/// What is wrong with which operation (by its place; the number of operations for what is missing at the end).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("operation {op} ({name}): {what}")]
pub struct Fault {
    /// Its place in the program.
    pub op: usize,
    /// The kind of operation.
    pub name: &'static str,
    /// What is wrong.
    pub what: String,
}

/// The values of one row on one side. Values of the residual stream are counted by the sublayers added: 2l before block l,
/// 2l + 1 between its halves.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Row {
    hidden: Option<u32>,
    /// With delta added, hidden has this value.
    delta: Option<u32>,
    qkv: Option<u32>,
    attn: Option<u32>,
    partial: Option<u32>,
    far: Option<u32>,
    act: Option<u32>,
    logits: bool,
    picked: bool,
}

#[derive(Clone, Copy, Default)]
struct Mail {
    qkv: Option<(u32, bool)>,
    out: Option<(u32, Part)>,
}

struct Walk<'a> {
    placement: &'a Placement,
    iteration: &'a Iteration,
    rows: Vec<[Vec<Row>; 2]>,
    mail: Vec<Vec<Mail>>,
    /// Pages: (side, layer, request) to the tokens stored, as sorted ranges.
    stored: HashMap<(Side, u32, RequestId), Vec<(u32, u32)>>,
    staged: HashMap<(u8, RequestId), (u32, Vec<(u32, u32)>)>,
    weights: HashMap<u8, u32>,
    /// Of each sub-batch, whether its operations are carried out: not those of a cohort that does not join.
    goes: Vec<Goes>,
}

/// Whether the operations of a sub-batch are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goes {
    /// They are.
    On,
    /// Not before it has joined; whether it will.
    Parked(bool),
    /// They are not: it stays parked.
    Stays,
}

/// Verifies `program` against what it was made from. Cohorts of an asynchronous iteration are taken to be parked where it says:
/// programs are verified for the case that all of them join, and that none does. For a sequence of iterations, see
/// [`parked::Parked::next`].
///
/// # Errors
/// The first [`Fault`].
pub fn check(program: &Program, placement: &Placement, iteration: &Iteration) -> Result<(), Fault> {
    let joins = iteration.cohorts().any(|(_, cohort)| cohort.at.is_some());
    for all in [true, false].into_iter().take(1 + usize::from(joins)) {
        walk(program, placement, iteration, &|_| all)?;
    }
    Ok(())
}

/// The same, where the cohorts that `joins` says join.
fn walk(
    program: &Program,
    placement: &Placement,
    iteration: &Iteration,
    joins: &dyn Fn(u8) -> bool,
) -> Result<(), Fault> {
    let mut walk = Walk {
        placement,
        iteration,
        rows: iteration
            .sub_batches
            .iter()
            .map(|s| [vec![Row::default(); s.rows() as usize], vec![Row::default(); s.rows() as usize]])
            .collect(),
        mail: iteration.sub_batches.iter().map(|s| vec![Mail::default(); s.rows() as usize]).collect(),
        stored: HashMap::new(),
        staged: HashMap::new(),
        weights: HashMap::new(),
        goes: vec![Goes::On; iteration.sub_batches.len()],
    };
    walk.stored_before();
    walk.parked_before(joins);
    for (at, op) in program.ops.iter().enumerate() {
        let fault = |what| Fault { op: at, name: op.kind.name(), what };
        if walk.stays(op).map_err(fault)? {
            continue;
        }
        walk.step(op).map_err(fault)?;
        walk.declared(op).map_err(fault)?;
    }
    let end = |what| Fault { op: program.ops.len(), name: "end", what };
    walk.finished().map_err(end)
}

fn side_of(op: &Op) -> Side {
    if op.unit == Unit::Host { Side::Host } else { Side::Device }
}

fn flip(side: Side) -> Side {
    if side == Side::Host { Side::Device } else { Side::Host }
}

/// Adds `new` to sorted, disjoint ranges.
fn insert(ranges: &mut Vec<(u32, u32)>, new: (u32, u32)) {
    ranges.push(new);
    ranges.sort_unstable();
    let mut merged: Vec<(u32, u32)> = Vec::new();
    for &(a, b) in ranges.iter() {
        match merged.last_mut() {
            Some(last) if a <= last.1 => last.1 = last.1.max(b),
            _ => merged.push((a, b)),
        }
    }
    *ranges = merged;
}

fn holds(ranges: &[(u32, u32)], (a, b): (u32, u32)) -> bool {
    a >= b || ranges.iter().any(|r| r.0 <= a && b <= r.1)
}

fn boundary(group: &Group) -> u32 {
    match group.kv {
        Kv::Split { boundary, .. } => boundary,
        _ => 0,
    }
}

impl Walk<'_> {
    /// What earlier steps have stored; pages that move in this iteration are still where they come from.
    fn stored_before(&mut self) {
        let page = PAGE_TOKENS as u32;
        // Of requests that have no rows in this step, that is all that is known.
        let groups = || self.iteration.sub_batches.iter().flat_map(|s| &s.groups);
        let others = self.iteration.moves.iter().filter(|m| groups().all(|g| g.request != m.request));
        for m in others.filter(|m| !m.pages.is_empty()) {
            for (l, _) in self.placement.layers.iter().enumerate().filter(|(_, l)| l.kv == Side::Device) {
                let stored = self.stored.entry((flip(m.to), l as u32, m.request)).or_default();
                insert(stored, (m.pages.start * page, m.pages.end * page));
            }
        }
        for group in self.iteration.sub_batches.iter().flat_map(|s| &s.groups) {
            for (l, layer) in self.placement.layers.iter().enumerate() {
                let mut put = |side, range: (u32, u32)| {
                    if range.0 < range.1 {
                        insert(self.stored.entry((side, l as u32, group.request)).or_default(), range);
                    }
                };
                if layer.kv == Side::Host {
                    put(Side::Host, (0, group.first));
                    continue;
                }
                let on_host = match group.kv {
                    Kv::Device => 0,
                    Kv::Host => group.first,
                    Kv::Split { boundary, .. } => boundary,
                };
                let moved = |side| {
                    let of = self
                        .iteration
                        .moves
                        .iter()
                        .filter(move |m| m.request == group.request && m.to == side);
                    of.map(|m| (m.pages.start * page, (m.pages.end * page).min(group.first)))
                };
                let mut cuts: Vec<(u32, u32, Side)> = Vec::new();
                cuts.extend(moved(Side::Host).map(|(a, b)| (a, b, Side::Device)));
                cuts.extend(moved(Side::Device).map(|(a, b)| (a, b, Side::Host)));
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

    fn groups(&self, op: &Op) -> Vec<(Group, Range<u32>)> {
        let all: Vec<_> =
            self.iteration.sub_batches[op.sub_batch as usize].with_rows().map(|(g, r)| (*g, r)).collect();
        all[op.groups.start as usize..op.groups.end as usize].to_vec()
    }

    /// The rows that count of an operation.
    fn live(&self, op: &Op) -> Vec<usize> {
        let mut live = Vec::new();
        for (group, rows) in self.groups(op) {
            let wanted = match group.wants {
                Wants::Nothing => rows.end..rows.end,
                Wants::Last => rows.end - 1..rows.end,
                Wants::All => rows.clone(),
            };
            let counts = if op.wanted_only { wanted } else { rows };
            live.extend(counts.map(|r| r as usize));
        }
        live
    }

    fn step(&mut self, op: &Op) -> Result<(), String> {
        let n = self.placement.layers.len() as u32;
        let (b, side) = (op.sub_batch as usize, side_of(op));
        let s = side as usize;
        let layer = op.layer.unwrap_or(n);
        match op.kind {
            Kind::Stream { slot } => {
                if self.placement.layers[layer as usize].weights != Residence::Streamed {
                    return Err(format!("layer {layer} is not streamed"));
                }
                self.weights.insert(slot, layer);
                return Ok(());
            }
            Kind::PageOut { staged } | Kind::PageIn { staged } => return self.pages(op, staged),
            Kind::Join => return Ok(()),
            _ => {}
        }
        let groups = self.groups(op);
        let span = groups.first().map_or(0, |g| g.1.start)..groups.last().map_or(0, |g| g.1.end);
        let live = self.live(op);
        // The rows that count are among them.
        let span = match (live.first(), live.last()) {
            (Some(&first), Some(&last)) if op.wanted_only && op.rows != span => first as u32..last as u32 + 1,
            _ => span,
        };
        if op.rows != span {
            return Err(format!("rows {:?}, but its groups have {span:?}", op.rows));
        }
        self.has_weights(op, layer, &groups)?;
        // Old values, whoever overwrites them.
        let want = |found: Option<u32>, wanted: u32, what: &str, row: usize| match found {
            Some(v) if v == wanted => Ok(()),
            other => Err(format!("row {row}: {what} is {other:?} on the {side:?} side, {wanted} is needed")),
        };
        let residual = |row: &mut Row, add: bool, value: u32, at: usize| -> Result<(), String> {
            if add {
                want(row.hidden, value - 1, "the residual stream", at)?;
                want(row.delta, value, "what is added to it", at)?;
            } else {
                want(row.hidden, value, "the residual stream", at)?;
            }
            row.hidden = Some(value);
            row.delta = None;
            Ok(())
        };
        match op.kind {
            Kind::Embed => {
                for r in live {
                    if self.rows[b].iter().any(|side| side[r] != Row::default()) {
                        return Err(format!("row {r} is embedded twice"));
                    }
                    self.rows[b][s][r].hidden = Some(0);
                }
            }
            Kind::Project { add } => {
                for r in live {
                    let row = &mut self.rows[b][s][r];
                    residual(row, add, 2 * layer, r)?;
                    row.qkv = Some(layer);
                    self.rows[b][flip(side) as usize][r].hidden = None;
                }
            }
            Kind::Append { mailbox, staged } => {
                for (group, rows) in groups {
                    for r in rows {
                        let r = r as usize;
                        let made = match mailbox {
                            true => self.mail[b][r].qkv.filter(|q| q.1).map(|q| q.0),
                            false => self.rows[b][s][r].qkv,
                        };
                        want(made, layer, "q, k, v", r)?;
                    }
                    let range = (group.first, group.end());
                    match staged {
                        Some(slot) => {
                            let entry =
                                self.staged.entry((slot, group.request)).or_insert((layer, Vec::new()));
                            if entry.0 != layer {
                                *entry = (layer, Vec::new());
                            }
                            insert(&mut entry.1, range);
                        }
                        None => insert(self.stored.entry((side, layer, group.request)).or_default(), range),
                    }
                }
            }
            Kind::Publish { queries_only } => {
                for r in live {
                    want(self.rows[b][s][r].qkv, layer, "q, k, v", r)?;
                    self.mail[b][r].qkv = Some((layer, !queries_only));
                }
            }
            Kind::Attend { part, from_mailbox, to_mailbox, staged } => {
                for (group, _) in &groups {
                    // Row r sees (r − window, r].
                    let window = self.placement.window(layer as usize);
                    let first = window.map_or(0, |w| (group.first + 1).saturating_sub(w));
                    let range = match part {
                        Part::Whole => (first, group.end()),
                        Part::FromBoundary => (boundary(group).max(first), group.end()),
                        Part::UpToBoundary => (first.min(boundary(group)), boundary(group)),
                    };
                    if op.wanted_only && group.wants == Wants::Nothing {
                        continue;
                    }
                    let there = match staged {
                        Some(slot) => {
                            self.staged.get(&(slot, group.request)).filter(|e| e.0 == layer).map(|e| &e.1)
                        }
                        None => self.stored.get(&(side, layer, group.request)),
                    };
                    if !there.is_some_and(|ranges| holds(ranges, range)) {
                        return Err(format!(
                            "request {:?}: tokens {range:?} of layer {layer} are wanted on the {side:?} side, {there:?} are there",
                            group.request
                        ));
                    }
                }
                for r in live {
                    let q =
                        if from_mailbox { self.mail[b][r].qkv.map(|q| q.0) } else { self.rows[b][s][r].qkv };
                    want(q, layer, "q", r)?;
                    let row = &mut self.rows[b][s][r];
                    match part {
                        _ if to_mailbox => self.mail[b][r].out = Some((layer, part)),
                        Part::Whole => row.attn = Some(layer),
                        Part::FromBoundary => row.partial = Some(layer),
                        Part::UpToBoundary => row.far = Some(layer),
                    }
                }
            }
            Kind::Collect => {
                for r in live {
                    let out = self.mail[b][r].out.filter(|o| o.1 == Part::Whole).map(|o| o.0);
                    want(out, layer, "attention in the mailbox", r)?;
                    self.rows[b][s][r].attn = Some(layer);
                }
            }
            Kind::Merge { mailbox } => {
                for r in live {
                    let far = match mailbox {
                        true => self.mail[b][r].out.filter(|o| o.1 == Part::UpToBoundary).map(|o| o.0),
                        false => self.rows[b][s][r].far,
                    };
                    want(far, layer, "attention before the boundary", r)?;
                    want(self.rows[b][s][r].partial, layer, "attention from the boundary on", r)?;
                    self.rows[b][s][r].attn = Some(layer);
                }
            }
            Kind::OutProj => {
                for r in live {
                    let row = &mut self.rows[b][s][r];
                    want(row.attn.take(), layer, "attention", r)?;
                    row.delta = Some(2 * layer + 1);
                }
            }
            Kind::FfnUp { add } => {
                for r in live {
                    let row = &mut self.rows[b][s][r];
                    residual(row, add, 2 * layer + 1, r)?;
                    row.act = Some(layer);
                    self.rows[b][flip(side) as usize][r].hidden = None;
                }
            }
            Kind::FfnDown => {
                for r in live {
                    let row = &mut self.rows[b][s][r];
                    want(row.act.take(), layer, "the activations", r)?;
                    row.delta = Some(2 * layer + 2);
                }
            }
            Kind::Head { add } => {
                for r in live {
                    let row = &mut self.rows[b][s][r];
                    residual(row, add, 2 * n, r)?;
                    if std::mem::replace(&mut row.logits, true) {
                        return Err(format!("row {r} has logits twice"));
                    }
                }
            }
            Kind::Pick => {
                for r in live {
                    let row = &mut self.rows[b][s][r];
                    if !row.logits {
                        return Err(format!("row {r} has no logits"));
                    }
                    row.picked = true;
                }
            }
            Kind::Carry { cargo, to } => {
                let from = flip(to) as usize;
                for r in live {
                    let source = self.rows[b][from][r];
                    let missing = || format!("row {r}: nothing on the other side");
                    let row = &mut self.rows[b][to as usize][r];
                    match cargo {
                        Cargo::Hidden { pending } => {
                            let value = match pending {
                                Some(of) => {
                                    let value = after(layer, of);
                                    if source.hidden != Some(value - 1) || source.delta != Some(value) {
                                        return Err(format!(
                                            "row {r}: {of:?} of layer {layer} is not what is pending"
                                        ));
                                    }
                                    value
                                }
                                None => source.hidden.ok_or_else(missing)?,
                            };
                            row.hidden = Some(value);
                            if pending.is_some() {
                                row.delta = None;
                            }
                        }
                        Cargo::Delta { of } => {
                            want(source.delta, after(layer, of), "the sublayer's output", r)?;
                            row.delta = source.delta;
                        }
                        Cargo::Qkv => row.qkv = Some(source.qkv.ok_or_else(missing)?),
                        Cargo::Attn => row.attn = Some(source.attn.ok_or_else(missing)?),
                        Cargo::Act => row.act = Some(source.act.ok_or_else(missing)?),
                    }
                }
            }
            Kind::Stream { .. } | Kind::PageOut { .. } | Kind::PageIn { .. } | Kind::Join => {
                unreachable!("above")
            }
        }
        Ok(())
    }

    fn pages(&mut self, op: &Op, staged: Option<u8>) -> Result<(), String> {
        let [read, ..] = &op.reads[..] else { return Err("reads nothing".into()) };
        let page = PAGE_TOKENS as u32;
        let out = matches!(op.kind, Kind::PageOut { .. });
        let request = match read.buffer {
            Buffer::Pages(_, request) | Buffer::StagedPages(_, request) => request,
            _ => return Err("reads something else than pages".into()),
        };
        let (from, to) = if out { (Side::Device, Side::Host) } else { (Side::Host, Side::Device) };
        let range = (read.span.start * page, read.span.end * page);
        let clip = |ranges: Option<&Vec<(u32, u32)>>| -> Option<(u32, u32)> {
            // The last page need not be full.
            let last = ranges?.iter().map(|r| r.1).max()?;
            Some((range.0, range.1.min(last)))
        };
        match staged {
            Some(slot) if out => {
                let (layer, ranges) = self.staged.get(&(slot, request)).cloned().unwrap_or_default();
                if Some(layer) != op.layer {
                    return Err(format!("staging memory holds layer {layer}"));
                }
                let moved = clip(Some(&ranges)).filter(|&m| holds(&ranges, m));
                let moved = moved.ok_or("the tokens are not in staging memory")?;
                insert(self.stored.entry((Side::Host, layer, request)).or_default(), moved);
            }
            Some(slot) => {
                let layer = op.layer.ok_or("a layer")?;
                let there = self.stored.get(&(Side::Host, layer, request));
                let moved = clip(there).filter(|&m| there.is_some_and(|t| holds(t, m)));
                let moved = moved.ok_or("the tokens are not on the host")?;
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
                    let there = self.stored.get(&(from, l, request));
                    let moved = clip(there).filter(|&m| there.is_some_and(|t| holds(t, m)));
                    let moved = moved.ok_or_else(|| format!("layer {l}: tokens {range:?} are not there"))?;
                    insert(self.stored.entry((to, l, request)).or_default(), moved);
                    // What is gone from its side.
                    let ranges = self.stored.entry((from, l, request)).or_default();
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

    fn has_weights(&self, op: &Op, layer: u32, groups: &[(Group, Range<u32>)]) -> Result<(), String> {
        let side = side_of(op);
        let end = |wanted: Side| match wanted == side {
            true => Ok(()),
            false => Err(format!("on the {side:?} side, placed on the {wanted:?} side")),
        };
        let sublayer = match op.kind {
            Kind::Embed => return end(self.placement.embedding),
            Kind::Head { .. } | Kind::Pick => return end(self.placement.head),
            Kind::Project { .. } => Sublayer::Qkv,
            Kind::OutProj => Sublayer::Out,
            Kind::FfnUp { .. } => Sublayer::Up,
            Kind::FfnDown => Sublayer::Down,
            _ => return Ok(()),
        };
        let placed = &self.placement.layers[layer as usize];
        for (group, _) in groups {
            end(placed.policy(group.phase).side(sublayer))?;
        }
        match (placed.weights, side) {
            (Residence::Both, _) | (Residence::Host, Side::Host) | (Residence::Device, Side::Device) => {
                Ok(())
            }
            (Residence::Streamed, Side::Host) => Ok(()),
            (Residence::Streamed, Side::Device) => {
                let slot = op.reads.iter().find_map(|r| match r.buffer {
                    Buffer::Weights(slot) => Some(slot),
                    _ => None,
                });
                let held = slot.and_then(|s| self.weights.get(&s));
                match held {
                    Some(&l) if l == layer => Ok(()),
                    other => {
                        Err(format!("needs the weights of layer {layer}; its staging buffer holds {other:?}"))
                    }
                }
            }
            _ => Err(format!("the weights of layer {layer} are {:?}", placed.weights)),
        }
    }

    /// Everything that was asked for is there.
    fn finished(&self) -> Result<(), String> {
        for (b, batch) in self.iteration.sub_batches.iter().enumerate() {
            if let Some(at) = self.parked_after(b) {
                self.is_parked(b, at)?;
                continue;
            }
            for (group, rows) in batch.with_rows() {
                let first = match group.wants {
                    Wants::Nothing => rows.end,
                    Wants::Last => rows.end - 1,
                    Wants::All => rows.start,
                };
                for r in first..rows.end {
                    let row = &self.rows[b][self.placement.head as usize][r as usize];
                    if !row.logits || (self.iteration.pick && !row.picked) {
                        return Err(format!("row {r} of sub-batch {b} has no logits, or no token"));
                    }
                }
                for (l, layer) in self.placement.layers.iter().enumerate() {
                    let side = match (layer.kv, group.kv) {
                        (Side::Host, _) | (_, Kv::Host) => Side::Host,
                        _ => Side::Device,
                    };
                    let from = if side == Side::Device { boundary(group) } else { 0 };
                    for (side, range) in [(Side::Host, (0, from)), (side, (from, group.end()))] {
                        let there = self.stored.get(&(side, l as u32, group.request));
                        if range.0 < range.1 && !there.is_some_and(|t| holds(t, range)) {
                            return Err(format!(
                                "request {:?}, layer {l}: keys and values of tokens {range:?} are not all on the {side:?} side",
                                group.request
                            ));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

fn after(layer: u32, of: Sublayer) -> u32 {
    2 * layer + if of == Sublayer::Out { 1 } else { 2 }
}
