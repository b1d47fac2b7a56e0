//! Verifies a program: every row passes every sublayer once and in order, on a side that has the weights and the keys and
//! values, and reads values of the layer that it is at.
//!
//! The check knows what operations mean and nothing of how they were made: it walks the program and keeps, for every row and
//! side, which value is there ([`rows`]), and for every request, layer and side, which tokens are ([`tokens`]). Rows and requests in the
//! same state are one entry, so that a step of a thousand takes as long as one of a few. That operations of different lanes
//! keep the program's order where they share memory is the business of [`super::order`], for the regions that operations name;
//! that they name all they touch is checked in `declared`.
//!
//! Of asynchronous iterations a row passes the sublayers in several: [`parked::ParkedRows`] is what is carried from one to the next.

mod declared;
mod parked;
mod rows;
mod tokens;

use std::collections::{HashMap, HashSet};
use std::ops::Range;

pub use self::parked::ParkedRows;
use self::rows::{BatchRows, KvHome, Run, SideRow};
use self::tokens::{FollowedTokens, Ranges, holds, insert};
use super::iteration::{Iteration, RequestId};
use super::op::{Buffer, Cargo, Kind, Op, Part, Program};
use super::placement::{LayerPlacement, Placement, Residence, Side, Sublayer};
use super::unit::Unit;

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

struct Walk<'a> {
    placement: &'a Placement,
    iteration: &'a Iteration,
    /// The model's windows, each once, and which of them each layer has.
    windows: (Vec<Option<u32>>, Vec<usize>),
    /// The rows of each sub-batch.
    rows: Vec<BatchRows<'a>>,
    /// Tokens of the requests whose tokens are followed by number.
    tokens: FollowedTokens,
    staged: HashMap<(u8, RequestId), (u32, Ranges)>,
    /// For requests whose pages move, the sides and layers whose pages operations name.
    moved: HashMap<RequestId, Vec<(Side, Range<u32>)>>,
    weights: HashMap<u8, u32>,
    /// For each sub-batch, whether its operations are carried out: not those of a cohort that does not join.
    status: Vec<CohortStatus>,
}

/// Whether the operations of a sub-batch are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CohortStatus {
    /// They are.
    Runs,
    /// Not before it has joined; whether it will.
    Parked(bool),
    /// They are not: it stays parked.
    Stays,
}

/// Verifies `program` against what it was made from. Cohorts of an asynchronous iteration are taken to be parked where it says:
/// programs are verified for the case that all of them join, and that none does. For a sequence of iterations, see
/// [`parked::ParkedRows::next`].
///
/// # Errors
/// The first [`Fault`].
pub fn check(program: &Program, placement: &Placement, iteration: &Iteration) -> Result<(), Fault> {
    let placement = &*placement.at_rows(iteration.prompt_rows());
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
    let mut walk =
        Walk::new(program, placement, iteration).map_err(|what| Fault { op: 0, name: "iteration", what })?;
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

/// No request has rows twice: regions would not tell which of its tokens are meant.
fn each_once(iteration: &Iteration) -> Result<(), String> {
    let groups = iteration.sub_batches.iter().flat_map(|b| &b.groups);
    let mut ids: Vec<RequestId> = groups.map(|g| g.request).collect();
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("request {:?} comes twice", pair[0])),
        None => Ok(()),
    }
}

/// Old values, whichever operation overwrites them.
fn want(found: Option<u32>, wanted: u32, what: &str, row: u32) -> Result<(), String> {
    match found {
        Some(v) if v == wanted => Ok(()),
        other => Err(format!("row {row}: {what} is {other:?}, {wanted} is needed")),
    }
}

fn residual(row: &mut SideRow, add: bool, value: u32, at: u32) -> Result<(), String> {
    if add {
        let before = value
            .checked_sub(1)
            .ok_or_else(|| format!("row {at}: there is nothing to add before layer 0"))?;
        want(row.hidden, before, "the residual stream", at)?;
        want(row.delta, value, "what is added to it", at)?;
    } else {
        want(row.hidden, value, "the residual stream", at)?;
    }
    row.hidden = Some(value);
    row.delta = None;
    Ok(())
}

impl<'a> Walk<'a> {
    fn new(
        program: &Program,
        placement: &'a Placement,
        iteration: &'a Iteration,
    ) -> Result<Walk<'a>, String> {
        each_once(iteration)?;
        let mut windows = vec![None];
        let layers = placement.layers.len();
        let of = |l| {
            let window = placement.window(l);
            windows.iter().position(|w| *w == window).unwrap_or_else(|| {
                windows.push(window);
                windows.len() - 1
            })
        };
        let which: Vec<usize> = (0..layers).map(of).collect();
        // Requests whose tokens have to be followed by number.
        let mut moved: HashMap<RequestId, Vec<(Side, Range<u32>)>> = HashMap::new();
        for m in &iteration.moves {
            moved.entry(m.request).or_default();
        }
        let mut staged: HashSet<(u8, u32)> = HashSet::new();
        for op in &program.ops {
            match op.kind {
                Kind::PageIn { .. } | Kind::PageOut { .. } => {
                    for region in op.reads.iter().chain(&op.writes) {
                        match region.buffer {
                            Buffer::Pages(side, request) => {
                                moved.entry(request).or_default().push((side, region.layers.clone()));
                            }
                            Buffer::StagedPages(_, request) => {
                                moved.entry(request).or_default();
                            }
                            _ => {}
                        }
                    }
                }
                Kind::Append { staged: Some(_), .. } | Kind::Attend { staged: Some(_), .. } => {
                    // A group that is not there is a fault when the walk comes to it.
                    let most = iteration.sub_batches.get(op.sub_batch as usize).map_or(0, |b| b.groups.len());
                    staged
                        .extend((op.groups.start..op.groups.end.min(most as u32)).map(|g| (op.sub_batch, g)));
                }
                _ => {}
            }
        }
        let quiet = moved.is_empty() && staged.is_empty();
        let rows = (0u8..).zip(&iteration.sub_batches).map(|(b, batch)| {
            BatchRows::new(batch, layers, &windows, |at, g| {
                !quiet && (moved.contains_key(&g.request) || staged.contains(&(b, at)))
            })
        });
        Ok(Walk {
            placement,
            iteration,
            rows: rows.collect(),
            tokens: FollowedTokens::new(placement),
            staged: HashMap::new(),
            moved,
            weights: HashMap::new(),
            status: vec![CohortStatus::Runs; iteration.sub_batches.len()],
            windows: (windows, which),
        })
    }

    /// The layer of an operation.
    fn layer(&self, op: &Op) -> Result<u32, String> {
        let layers = self.placement.layers.len();
        op.layer
            .filter(|&l| (l as usize) < layers)
            .ok_or_else(|| format!("of layer {:?} of {layers}", op.layer))
    }

    /// Its runs of rows.
    fn runs(&self, op: &Op, at: &Range<usize>) -> &[Run] {
        &self.rows[op.sub_batch as usize].runs()[at.clone()]
    }

    fn step(&mut self, op: &Op) -> Result<(), String> {
        let n = self.placement.layers.len() as u32;
        let (b, side) = (op.sub_batch as usize, side_of(op));
        let s = side as usize;
        match op.kind {
            Kind::Stream { slot, experts } => {
                let layer = self.layer(op)?;
                let wanted = if experts { Residence::StreamedExperts } else { Residence::Streamed };
                if self.placement.layers[layer as usize].weights != wanted {
                    return Err(format!("layer {layer} is not streamed so"));
                }
                self.weights.insert(slot, layer);
                return Ok(());
            }
            Kind::PageOut { staged } | Kind::PageIn { staged } => return self.pages(op, staged),
            Kind::Join => return Ok(()),
            _ => {}
        }
        let layer = match op.kind {
            Kind::Embed | Kind::Head { .. } | Kind::Pick | Kind::Carry { .. } => op.layer.unwrap_or(n),
            _ => self.layer(op)?,
        };
        let Some(rows) = self.rows.get_mut(b) else { return Err(format!("of sub-batch {b}")) };
        let at = rows.of(&op.groups)?;
        self.spans(op, &at)?;
        self.has_weights(op, layer, &at)?;
        match op.kind {
            Kind::Append { staged, .. } => self.stores(op, layer, &at, staged)?,
            Kind::Attend { part, staged, .. } => self.sees(op, layer, &at, part, staged)?,
            _ => {}
        }
        // All rows have keys and values.
        let wanted_only = op.wanted_only && !matches!(op.kind, Kind::Append { .. });
        let divided = self.placement.layers.get(layer as usize).is_some_and(LayerPlacement::is_divided);
        let runs = &mut self.rows[b].runs_mut()[at];
        for (r, state) in runs.iter_mut().flat_map(|run| run.live(wanted_only)) {
            let mail = &mut state.mail;
            match op.kind {
                Kind::Embed => {
                    if state.rows.iter().any(|row| *row != SideRow::default()) {
                        return Err(format!("row {r} is embedded twice"));
                    }
                    state.rows[s].hidden = Some(0);
                }
                Kind::Project { add } => {
                    residual(&mut state.rows[s], add, 2 * layer, r)?;
                    state.rows[s].qkv = Some(layer);
                    state.rows[flip(side) as usize].hidden = None;
                }
                Kind::Append { mailbox, .. } => {
                    let made = match mailbox {
                        true => mail.qkv.filter(|q| q.1).map(|q| q.0),
                        false => state.rows[s].qkv,
                    };
                    want(made, layer, "q, k, v", r)?;
                }
                Kind::Publish { queries_only } => {
                    want(state.rows[s].qkv, layer, "q, k, v", r)?;
                    mail.qkv = Some((layer, !queries_only));
                }
                Kind::Attend { part, from_mailbox, to_mailbox, .. } => {
                    let row = &mut state.rows[s];
                    let q = if from_mailbox { mail.qkv.map(|q| q.0) } else { row.qkv };
                    want(q, layer, "q", r)?;
                    match part {
                        _ if to_mailbox => mail.out = Some((layer, part)),
                        Part::Whole => row.attn = Some(layer),
                        Part::FromBoundary => row.partial = Some(layer),
                        Part::UpToBoundary => row.far = Some(layer),
                    }
                }
                Kind::Collect => {
                    let out = mail.out.filter(|o| o.1 == Part::Whole).map(|o| o.0);
                    want(out, layer, "attention in the mailbox", r)?;
                    state.rows[s].attn = Some(layer);
                }
                Kind::Merge { mailbox } => {
                    let row = &mut state.rows[s];
                    let far = match mailbox {
                        true => mail.out.filter(|o| o.1 == Part::UpToBoundary).map(|o| o.0),
                        false => row.far,
                    };
                    want(far, layer, "attention before the boundary", r)?;
                    want(row.partial, layer, "attention from the boundary on", r)?;
                    row.attn = Some(layer);
                }
                Kind::OutProj => {
                    let row = &mut state.rows[s];
                    want(row.attn.take(), layer, "attention", r)?;
                    row.delta = Some(2 * layer + 1);
                }
                Kind::FfnUp { add } => {
                    residual(&mut state.rows[s], add, 2 * layer + 1, r)?;
                    state.rows[s].act = Some(layer);
                    state.rows[s].choices = divided.then_some(layer);
                    state.rows[flip(side) as usize].hidden = None;
                }
                Kind::FfnDown => {
                    let row = &mut state.rows[s];
                    want(row.act.take(), layer, "the activations", r)?;
                    match divided {
                        true => row.own = Some(layer),
                        false => row.delta = Some(2 * layer + 2),
                    }
                }
                Kind::Experts => {
                    let row = &mut state.rows[s];
                    want(row.choices.take(), layer, "the choice of experts", r)?;
                    row.share = Some(layer);
                }
                Kind::AddShare => {
                    let row = &mut state.rows[s];
                    want(row.own.take(), layer, "what the device's experts give", r)?;
                    want(row.share.take(), layer, "what the host's experts give", r)?;
                    row.delta = Some(2 * layer + 2);
                }
                Kind::Head { add } => {
                    let row = &mut state.rows[s];
                    residual(row, add, 2 * n, r)?;
                    if std::mem::replace(&mut row.logits, true) {
                        return Err(format!("row {r} has logits twice"));
                    }
                }
                Kind::Pick => {
                    let row = &mut state.rows[s];
                    if !row.logits {
                        return Err(format!("row {r} has no logits"));
                    }
                    row.picked = true;
                }
                Kind::Carry { cargo, to } => {
                    carry(cargo, layer, r, state.rows[flip(to) as usize], &mut state.rows[to as usize])?;
                }
                Kind::Stream { .. } | Kind::PageOut { .. } | Kind::PageIn { .. } | Kind::Join => {
                    unreachable!("above")
                }
            }
        }
        Ok(())
    }

    /// Whether an operation has the rows of its groups, or from the first that counts to the last.
    fn spans(&self, op: &Op, at: &Range<usize>) -> Result<(), String> {
        let runs = self.runs(op, at);
        let span = runs.first().map_or(0, |r| r.rows.start)..runs.last().map_or(0, |r| r.rows.end);
        if op.rows == span {
            return Ok(());
        }
        let wanting = || runs.iter().filter(|run| run.wants()).map(|run| &run.wanted);
        let span = match (wanting().next(), wanting().next_back()) {
            (Some(first), Some(last)) if op.wanted_only => first.start..last.end,
            _ => span,
        };
        if op.rows != span {
            return Err(format!("rows {:?}, but its groups have {span:?}", op.rows));
        }
        Ok(())
    }

    /// Keys and values of an operation's rows are put where they are kept.
    fn stores(&mut self, op: &Op, layer: u32, at: &Range<usize>, staged: Option<u8>) -> Result<(), String> {
        let side = side_of(op);
        let Walk { rows, tokens, staged: staging, .. } = self;
        let rows = &mut rows[op.sub_batch as usize];
        for place in at.clone() {
            let run = &rows.runs()[place];
            if !run.is_own() {
                rows.runs_mut()[place].stored[layer as usize][side as usize] |= tokens::NEW;
                continue;
            }
            let group = rows.group(run);
            let range = (group.first, group.end());
            match staged {
                Some(slot) => {
                    let entry = staging.entry((slot, group.request)).or_insert((layer, Vec::new()));
                    if entry.0 != layer {
                        *entry = (layer, Vec::new());
                    }
                    insert(&mut entry.1, range);
                }
                None => insert(tokens.at_mut(side, layer, group.request), range),
            }
        }
        Ok(())
    }

    /// Whether the tokens that an attention reads are there.
    fn sees(
        &self,
        op: &Op,
        layer: u32,
        at: &Range<usize>,
        part: Part,
        staged: Option<u8>,
    ) -> Result<(), String> {
        let side = side_of(op);
        for run in self.runs(op, at).iter().filter(|run| !op.wanted_only || run.wants()) {
            let group = self.rows[op.sub_batch as usize].group(run);
            let range = tokens::attended(group, part, self.placement.window(layer as usize));
            let there: &[(u32, u32)] = match staged {
                _ if !run.is_own() => {
                    let there = run.stored[layer as usize][side as usize];
                    let needs = run.cells().needs(part, self.windows.1[layer as usize]);
                    if there & needs != needs {
                        return Err(format!(
                            "requests of groups {:?}: tokens of layer {layer} are wanted on the {side:?} side (the first's {range:?}), not all are there",
                            run.groups
                        ));
                    }
                    continue;
                }
                Some(slot) => {
                    let entry = self.staged.get(&(slot, group.request)).filter(|e| e.0 == layer);
                    entry.map_or(&[], |e| &e.1)
                }
                None => self.tokens.at(side, layer, group.request),
            };
            if !holds(there, range) {
                return Err(format!(
                    "request {:?}: tokens {range:?} of layer {layer} are wanted on the {side:?} side, {there:?} are there",
                    group.request
                ));
            }
        }
        Ok(())
    }

    fn has_weights(&self, op: &Op, layer: u32, at: &Range<usize>) -> Result<(), String> {
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
            Kind::Experts | Kind::AddShare => {
                let placed = &self.placement.layers[layer as usize];
                let both = placed.is_divided() && placed.weights == Residence::Both;
                let here = if op.kind == Kind::Experts { Side::Host } else { Side::Device };
                return match both && side == here {
                    true => Ok(()),
                    false => Err(format!("on the {side:?} side, of a layer placed {placed:?}")),
                };
            }
            _ => return Ok(()),
        };
        let placed = &self.placement.layers[layer as usize];
        for run in self.runs(op, at) {
            end(placed.policy(run.phase()).side(sublayer))?;
        }
        match (placed.weights, side) {
            (Residence::Both, _) | (Residence::Host, Side::Host) | (Residence::Device, Side::Device) => {
                Ok(())
            }
            (Residence::Streamed | Residence::StreamedExperts, Side::Host) => Ok(()),
            (Residence::StreamedExperts, Side::Device) if placed.weights.stays_on_device(sublayer) => Ok(()),
            (Residence::Streamed | Residence::StreamedExperts, Side::Device) => {
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
        for b in 0..self.rows.len() {
            if let Some(at) = self.parked_after(b) {
                self.is_parked(b, at)?;
                continue;
            }
            for run in self.rows[b].runs() {
                if let Some((r, _)) = run.states(true).find(|(_, state)| {
                    let row = &state.rows[self.placement.head as usize];
                    !row.logits || (self.iteration.pick && !row.picked)
                }) {
                    return Err(format!("row {r} of sub-batch {b} has no logits, or no token"));
                }
                self.kept(b, run)?;
            }
        }
        Ok(())
    }

    /// Whether all tokens of a run's requests are where they are kept.
    fn kept(&self, b: usize, run: &Run) -> Result<(), String> {
        for (l, layer) in (0u32..).zip(&self.placement.layers) {
            let side = match (layer.kv, run.home()) {
                (Side::Host, _) | (_, KvHome::Host) => Side::Host,
                _ => Side::Device,
            };
            let group = self.rows[b].group(run);
            let (far, near) = (tokens::FAR, tokens::NEAR | tokens::NEW);
            // Before the boundary they are on the host, whatever side the others are on.
            let of = [
                (Side::Host, far, (0, tokens::boundary(group))),
                (side, near, (tokens::boundary(group), group.end())),
            ];
            for (side, cells, range) in of {
                let there = match run.is_own() {
                    true => holds(self.tokens.at(side, l, group.request), range),
                    false => {
                        let cells = run.cells().of_these(cells);
                        run.stored[l as usize][side as usize] & cells == cells
                    }
                };
                if !there {
                    return Err(format!(
                        "request {:?}, layer {l}: keys and values of tokens {range:?} are not all on the {side:?} side",
                        group.request
                    ));
                }
            }
        }
        Ok(())
    }
}

fn carry(cargo: Cargo, layer: u32, r: u32, source: SideRow, row: &mut SideRow) -> Result<(), String> {
    let missing = || format!("row {r}: nothing on the other side");
    match cargo {
        Cargo::Hidden { pending } => {
            let value = match pending {
                Some(of) => {
                    let value = after(layer, of);
                    if source.hidden != Some(value - 1) || source.delta != Some(value) {
                        return Err(format!("row {r}: {of:?} of layer {layer} is not what is pending"));
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
        Cargo::Choices => {
            want(source.choices, layer, "the choice of experts", r)?;
            row.choices = source.choices;
        }
        Cargo::Share => {
            want(source.share, layer, "what the host's experts give", r)?;
            row.share = source.share;
        }
    }
    Ok(())
}

fn after(layer: u32, of: Sublayer) -> u32 {
    2 * layer + if of == Sublayer::Out { 1 } else { 2 }
}
