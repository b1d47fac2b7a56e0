//! Seconds of an iteration of a whole model from programs of a few of its layers.
//!
//! An iteration is lowered for two layers and for four that are alike, and both run on the virtual machine; the difference is two
//! layers' time in the middle of a step, where lanes overlap as they do in the long run. The rest of the two-layer program is what
//! a step takes once: embedding, head, filling and draining the lanes.
//!
//! ```text
//! T(L) = T(2) + (L − 2) · (T(4) − T(2)) / 2          for each kind of layer (placement, window, size)
//! ```
//! Requests that change sides move the pages of all layers before the first, in both programs: a copy for each layer. A step's lists go
//! to the device before it, and its tokens come from there behind it.
//!
//! Decode rows that go the same way are lowered as one group, whatever their number: an operation's rows are what it reads and
//! multiplies together, and attention is priced by the sum of what its requests have stored. So an iteration takes a few
//! dozen microseconds with a thousand requests in it.

use std::ops::Range;

use super::cost::{Batch, Costs, Direction, Group as Alike, Scan};
use super::operation::{OpCosts, slower_beside_copies};
use super::sizes::Sizes;
use crate::Result;
use crate::program::virtual_machine::{self, run};
use crate::program::{
    Group, Iteration, Kind, Kv, LayerPlacement, Op, Part, Phase, Placement, Program, Side, SubBatch,
    Sublayer, Unit, Wants, lower,
};

/// Layers of the two programs.
const SHORT: usize = 2;
const LONG: usize = 4;

/// Seconds that a step takes, and that each unit works in it, in the order of [`Unit::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Seconds {
    /// From its first operation to its last.
    pub all: f64,
    /// By unit.
    pub busy: [f64; 4],
}

impl Seconds {
    fn zip(self, other: Seconds, f: impl Fn(f64, f64) -> f64) -> Seconds {
        let mut busy = [0.0; 4];
        for (i, b) in busy.iter_mut().enumerate() {
            *b = f(self.busy[i], other.busy[i]);
        }
        Seconds { all: f(self.all, other.all), busy }
    }
}

/// Layers that are alike.
struct LayerKind {
    /// One of them.
    layer: usize,
    /// How many.
    count: usize,
    /// A model of [`LONG`] of them.
    sizes: Sizes,
    short: Placement,
    long: Placement,
}

/// Times iterations of one model on one placement.
pub struct Short<'a> {
    costs: &'a dyn Costs,
    kinds: Vec<LayerKind>,
    window: Vec<Option<u64>>,
    layers: u64,
    placement: Placement,
}

impl<'a> Short<'a> {
    /// Of a model of these sizes.
    pub fn new(costs: &'a dyn Costs, sizes: &Sizes, placement: &Placement) -> Short<'a> {
        let mut kinds: Vec<LayerKind> = Vec::new();
        for (layer, at) in placement.layers.iter().enumerate() {
            let alike = |k: &&mut LayerKind| {
                sizes.blocks[k.layer] == sizes.blocks[layer] && placement.layers[k.layer] == *at
            };
            match kinds.iter_mut().find(alike) {
                Some(kind) => kind.count += 1,
                None => {
                    let of =
                        |n: usize, at: LayerPlacement| Placement { layers: vec![at; n], ..placement.clone() };
                    let blocks = vec![sizes.blocks[layer]; LONG];
                    kinds.push(LayerKind {
                        layer,
                        count: 1,
                        sizes: Sizes { blocks, ..sizes.clone() },
                        short: of(SHORT, *at),
                        long: of(LONG, *at),
                    });
                }
            }
        }
        let window = kinds.iter().map(|k| sizes.blocks[k.layer].window).collect();
        Short { costs, kinds, window, layers: sizes.layers() as u64, placement: placement.clone() }
    }

    /// Each kind of layer: one of them, and how many there are.
    pub fn kinds(&self) -> impl Iterator<Item = (usize, usize)> {
        self.kinds.iter().map(|k| (k.layer, k.count))
    }

    /// What an iteration takes whose sub-batches run one after the other or in lock step, moves included.
    ///
    /// # Errors
    /// As [`lower()`].
    pub fn seconds(&self, iteration: &Iteration) -> Result<Seconds> {
        let (few, members) = condensed(iteration);
        let mut total = Seconds::default();
        for (i, (kind, window)) in self.kinds.iter().zip(&self.window).enumerate() {
            let costs = AsLayer { costs: self.costs, layer: kind.layer };
            let scans = scans(iteration, &members, *window);
            let time = |placement: &Placement| -> Result<Seconds> {
                let program = lower(placement, &few)?;
                let ops = OpCosts::new(&costs, &kind.sizes);
                // Moves are of all layers, and counted once.
                let layers = placement.layers.len() as u64;
                let moved = if i == 0 { (self.layers, layers) } else { (0, layers) };
                let edges = ops.of(iteration).on(&self.placement);
                let price = |moved, slower| Price { ops, edges, costs: &costs, scans: &scans, moved, slower };
                // Of moves, the share of the program's layers.
                let alone = price((layers, layers), 1.0);
                let seconds = |op| (op, virtual_machine::Costs::seconds(&alone, op));
                let slower = slower_beside_copies(&costs, program.ops.iter().map(seconds));
                let price = price(moved, slower);
                let line = run(&program, &price);
                Ok(Seconds { all: line.seconds(), busy: Unit::ALL.map(|u| line.busy(u)) })
            };
            let (short, long) = (time(&kind.short)?, time(&kind.long)?);
            let layer = long.zip(short, |l, s| (l - s) / (LONG - SHORT) as f64);
            total = total.zip(layer, |t, l| t + kind.count as f64 * l);
            if i == 0 {
                let once = short.zip(layer, |s, l| (s - SHORT as f64 * l).max(0.0));
                total = total.zip(once, |t, o| t + o);
            }
        }
        Ok(total)
    }
}

/// Which groups of a sub-batch a condensed group stands for.
type Members = Vec<Vec<Range<usize>>>;

/// The same iteration with neighbouring decode rows of one kind in one group.
fn condensed(iteration: &Iteration) -> (Iteration, Members) {
    let mut members = Vec::new();
    let mut batches = Vec::new();
    let mut moves = iteration.moves.clone();
    for batch in &iteration.sub_batches {
        let (mut groups, mut of): (Vec<Group>, Vec<Range<usize>>) = (Vec::new(), Vec::new());
        for (at, group) in batch.groups.iter().enumerate() {
            let plain = |g: &Group| {
                g.phase == Phase::Decode && matches!(g.kv, Kv::Device | Kv::Host) && g.wants != Wants::Nothing
            };
            match groups.last_mut() {
                Some(last) if plain(last) && plain(group) && last.kv == group.kv => {
                    last.tokens += group.tokens;
                    last.wants = Wants::All;
                    of.last_mut().expect("as many as groups").end = at + 1;
                    // What waits for the pages of one waits for the group's.
                    moves
                        .iter_mut()
                        .filter(|m| m.request == group.request)
                        .for_each(|m| m.request = last.request);
                }
                _ => {
                    groups.push(*group);
                    of.push(at..at + 1);
                }
            }
        }
        batches.push(SubBatch { groups, at: batch.at });
        members.push(of);
    }
    (Iteration { sub_batches: batches, moves, ..*iteration }, members)
}

/// What each condensed group's attention reads and multiplies, by sub-batch.
fn scans(iteration: &Iteration, members: &Members, window: Option<u64>) -> Vec<Vec<Scan>> {
    let of = |g: &Group| {
        let alike = Alike { sequences: 1, rows: g.tokens.into(), past: g.first.into(), causal: true };
        Scan { rows: g.tokens.into(), kv_tokens: alike.tokens_read(window), pairs: alike.pairs(window) }
    };
    let batches = iteration.sub_batches.iter().zip(members);
    let sum = |groups: &[Group]| groups.iter().map(of).fold(Scan::default(), Scan::plus);
    batches.map(|(batch, of)| of.iter().map(|range| sum(&batch.groups[range.clone()])).collect()).collect()
}

/// Prices operations of condensed programs.
struct Price<'a> {
    ops: OpCosts<'a>,
    /// What is before and behind the operations.
    edges: OpCosts<'a>,
    costs: &'a AsLayer<'a>,
    scans: &'a [Vec<Scan>],
    /// Moved pages are of so many layers, where the program has so many.
    moved: (u64, u64),
    /// What attention on the host takes times, for the step's copies.
    slower: f64,
}

impl virtual_machine::Costs for Price<'_> {
    fn seconds(&self, op: &Op) -> f64 {
        if let Kind::PageIn { staged: None } | Kind::PageOut { staged: None } = op.kind {
            let to = if op.unit == Unit::H2d { Direction::ToDevice } else { Direction::ToHost };
            let (all, here) = self.moved;
            return all as f64 * self.costs.pages(to, op.work.pages / here, self.ops.link_bytes(op) / here);
        }
        let side = match (op.kind, op.unit) {
            (Kind::Attend { part: Part::Whole, .. }, Unit::Gpu) => Side::Device,
            (Kind::Attend { part: Part::Whole, .. }, Unit::Host) => Side::Host,
            _ => return self.ops.seconds(op),
        };
        // Groups whose rows want no logits have no work in the last layer: the program says so.
        if op.work.rows == 0 {
            return 0.0;
        }
        let groups = &self.scans[op.sub_batch as usize][op.groups.start as usize..op.groups.end as usize];
        let whole = groups.iter().copied().fold(Scan::default(), Scan::plus);
        let scan = match op.wanted_only {
            false => whole,
            // One row of each prompt is left: its share of what it sees.
            true => Scan {
                rows: op.work.rows,
                kv_tokens: whole.kv_tokens,
                pairs: whole.pairs * op.work.rows / whole.rows.max(1),
            },
        };
        let slower = if side == Side::Host { self.slower } else { 1.0 };
        (self.costs.attend(side, 0, &scan) * slower).max(self.costs.launch(side))
    }

    fn before(&self, program: &Program, unit: Unit) -> f64 {
        self.edges.before(program, unit)
    }

    fn after(&self, program: &Program) -> f64 {
        self.edges.after(program)
    }
}

/// The costs of one layer, whichever is asked for.
struct AsLayer<'a> {
    costs: &'a dyn Costs,
    layer: usize,
}

impl Costs for AsLayer<'_> {
    fn embed(&self, side: Side, rows: u64) -> f64 {
        self.costs.embed(side, rows)
    }
    fn sublayer(&self, side: Side, _: usize, sublayer: Sublayer, batch: &Batch<'_>) -> f64 {
        self.costs.sublayer(side, self.layer, sublayer, batch)
    }
    fn attention(&self, side: Side, _: usize, batch: &Batch<'_>) -> f64 {
        self.costs.attention(side, self.layer, batch)
    }
    fn product(&self, side: Side, _: usize, sublayer: Sublayer, rows: u64) -> f64 {
        self.costs.product(side, self.layer, sublayer, rows)
    }
    fn attend(&self, side: Side, _: usize, scan: &Scan) -> f64 {
        self.costs.attend(side, self.layer, scan)
    }
    fn head(&self, side: Side, rows: u64) -> f64 {
        self.costs.head(side, rows)
    }
    fn copy(&self, side: Side, bytes: u64) -> f64 {
        self.costs.copy(side, bytes)
    }
    fn append(&self, side: Side, _: usize, rows: u64, bytes: u64) -> f64 {
        self.costs.append(side, self.layer, rows, bytes)
    }
    fn pick(&self, side: Side, rows: u64, bytes: u64) -> f64 {
        self.costs.pick(side, rows, bytes)
    }
    fn pages(&self, direction: Direction, pages: u64, bytes: u64) -> f64 {
        self.costs.pages(direction, pages, bytes)
    }
    fn beside_copies(&self) -> f64 {
        self.costs.beside_copies()
    }
    fn transfer(&self, direction: Direction, bytes: u64) -> f64 {
        self.costs.transfer(direction, bytes)
    }
    fn issue(&self, side: Side) -> f64 {
        self.costs.issue(side)
    }
    fn launch(&self, side: Side) -> f64 {
        self.costs.launch(side)
    }
}

#[cfg(test)]
mod tests;
