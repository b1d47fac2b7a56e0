//! Seconds of a program's operations, so that the virtual machine runs any program over any [`Costs`].
//!
//! ```text
//! operation            what it costs                                              lane
//! embed, head          Costs::embed, Costs::head of its rows                      of its side
//! project … ffn_down   Costs::product of its rows with the layer's weights        of its side
//! attend               Costs::attend of (rows, tokens read, pairs)                of its side
//! append, pick         Costs::append, Costs::pick of what it reads and writes     of its side
//! publish, collect     Costs::transfer of the mailbox's rows                      gpu: its kernels read and write host memory
//! merge                collect if the other part is the host's, and a copy        gpu
//! carry                Costs::transfer of the rows as they cross, Costs::hand_over   h2d, d2h
//! stream               Costs::stream of the layer in the device's layout, or Costs::stream_pageable   h2d
//! page in, page out    Costs::pages                                               h2d, d2h
//! before               Costs::transfer of the step's lists, one for each way of attending      gpu
//! after                Costs::transfer of the tokens, or of the logits, of a head on the device
//! ```
//! Attention on the host takes longer while copies run ([`Costs::beside_copies`]): both read the same memory.
//!
//! An operation of a computing lane takes at least [`Costs::launch`]. A transfer has one latency, however many pages it
//! moves: their copies are enqueued together.
//!
//! Widths are those of the engine's buffers: hidden rows, and queries, keys and values that the host made, cross as f32, attention
//! outputs and activations of the feed-forward as 16 bits, all rows of the mailbox by `Mailbox::ELEMENT` (`device::RowBytes`; a test holds both against each other).

use super::cost::{Costs, Direction, Scan};
use super::sizes::Sizes;
use crate::cache::PAGE_TOKENS;
use crate::device::{Launches, Mailbox, TOP_BYTES};
use crate::program::{
    Cargo, Far, Flow, Group, Iteration, Kind, Kv, Op, Part, Placement, Program, Side, Staging, SubBatch,
    Sublayer, Unit, Wants, virtual_machine,
};

/// Bytes of an f32, and of a 16-bit float.
const F32: u64 = 4;
const HALF: u64 = 2;
/// Bytes of an element of the mailbox's rows.
const MAIL: u64 = Mailbox::ELEMENT as u64;
/// Bytes of a word of a step's lists.
const WORD: u64 = 4;

/// Prices operations: see the [module](self).
#[derive(Clone, Copy)]
pub struct OpCosts<'a> {
    costs: &'a dyn Costs,
    sizes: &'a Sizes,
    iteration: Option<&'a Iteration>,
    placement: Option<&'a Placement>,
    /// Tokens whose keys and values a step of the iteration reads, in the mean over the layers.
    stored: Option<u64>,
    sequences: u64,
}

impl<'a> OpCosts<'a> {
    /// Costs for a model of these sizes.
    pub fn new(costs: &'a dyn Costs, sizes: &'a Sizes) -> OpCosts<'a> {
        OpCosts { costs, sizes, iteration: None, placement: None, stored: None, sequences: 1 }
    }

    /// The same for programs of `iteration`: attention windows are then applied to each group's own positions. Without,
    /// the groups of an operation are taken to be alike. Layers without a window need no iteration.
    pub fn of(self, iteration: &'a Iteration) -> OpCosts<'a> {
        let groups = || iteration.sub_batches.iter().flat_map(|b| b.groups.iter());
        let stored = self.sizes.mean_by_window(|window| groups().map(|g| tokens_read(g, window)).sum());
        OpCosts { iteration: Some(iteration), stored: Some(stored), ..self }
    }

    /// The same for whole steps of programs lowered from `placement` and the iteration that [`OpCosts::of`] was given: with the
    /// lists that go to the device before anything runs there, and the tokens or logits that come from there.
    pub fn on(self, placement: &'a Placement) -> OpCosts<'a> {
        OpCosts { placement: Some(placement), ..self }
    }

    /// The same for programs whose every group stands for `sequences` that are alike: a planner need not lower thousands.
    pub fn times(self, sequences: u64) -> OpCosts<'a> {
        OpCosts { sequences, ..self }
    }

    /// The same in a step that reads the keys and values of so many tokens, where the iteration is not given.
    pub fn reading(self, stored: u64) -> OpCosts<'a> {
        OpCosts { stored: Some(stored), ..self }
    }

    /// Tokens whose keys and values a step of the iteration reads, in the mean over the layers: all groups', wherever they
    /// are. `None` without an iteration.
    pub fn stored(&self) -> Option<u64> {
        self.stored.map(|tokens| tokens * self.sequences)
    }

    fn rows(&self, op: &Op) -> u64 {
        op.work.rows * self.sequences
    }

    /// Bytes that an operation moves over the link: rows, weights, pages; 0 if it moves none.
    pub fn link_bytes(&self, op: &Op) -> u64 {
        let spec = &self.sizes.spec;
        let (d, q, kv) = (spec.d_model as u64, spec.q_dim() as u64, spec.kv_dim() as u64);
        let rows = self.rows(op);
        match op.kind {
            Kind::Carry { cargo, .. } => {
                rows * match cargo {
                    // What is pending is added before the rows leave.
                    Cargo::Hidden { .. } | Cargo::Delta { .. } => F32 * d,
                    Cargo::Qkv => F32 * (q + 2 * kv),
                    Cargo::Attn => HALF * q,
                    Cargo::Act => HALF * spec.d_ff as u64,
                    // A normed row, and of each choice its expert and weight.
                    Cargo::Choices => {
                        HALF * d + 2 * WORD * spec.experts.as_ref().map_or(0, |e| e.used as u64)
                    }
                    Cargo::Share => F32 * d,
                }
            }
            Kind::Publish { queries_only } => rows * MAIL * if queries_only { q } else { q + 2 * kv },
            Kind::Collect => rows * MAIL * q,
            Kind::Merge { mailbox: true } => rows * self.partial_row(),
            Kind::Stream { experts, .. } => op.layer.map_or(0, |l| {
                let block = &self.sizes.blocks[l as usize];
                if experts { block.feed_forward().device } else { block.total().device }
            }),
            Kind::PageOut { .. } | Kind::PageIn { .. } => {
                self.sequences * op.work.pages * PAGE_TOKENS as u64 * self.sizes.kv_token()
            }
            _ => 0,
        }
    }

    /// A row of partial attention: (m, s, o) of every head, f32.
    fn partial_row(&self) -> u64 {
        let spec = &self.sizes.spec;
        F32 * (spec.q_dim() as u64 + 2 * spec.n_heads as u64)
    }

    /// What an attention reads and multiplies, its layer's window applied.
    pub fn scan(&self, op: &Op) -> Scan {
        self.one(op).times(self.sequences)
    }

    fn one(&self, op: &Op) -> Scan {
        let work = &op.work;
        let whole = Scan { rows: work.rows, kv_tokens: work.kv_tokens, pairs: work.pairs };
        let window = op.layer.and_then(|l| self.sizes.blocks[l as usize].window);
        let (Some(window), Kind::Attend { part, .. }) = (window, op.kind) else { return whole };
        match self.iteration {
            Some(iteration) => {
                let groups = &iteration.sub_batches[op.sub_batch as usize].groups;
                let range = op.groups.start as usize..op.groups.end as usize;
                let of = |g: &Group| windowed(g, part, op.wanted_only, window);
                groups[range].iter().map(of).fold(Scan::default(), Scan::plus)
            }
            None => {
                // Of alike groups: a row sees at most the window, its sequence's rows together at most their number more.
                let sequences = u64::from(op.groups.end - op.groups.start).max(1);
                let reach = window.saturating_sub(1) * sequences + work.rows;
                Scan {
                    kv_tokens: whole.kv_tokens.min(reach),
                    pairs: whole.pairs.min(work.rows * window),
                    ..whole
                }
            }
        }
    }

    /// Lists are uploaded once for each way of attending, and once more for pages that are streamed.
    fn lists(&self, placement: &Placement, iteration: &Iteration) -> f64 {
        let ways = ways(placement);
        let mut seconds = 0.0;
        // Those of parked cohorts are there already.
        for batch in iteration.sub_batches.iter().filter(|b| !b.groups.is_empty() && b.at.is_none()) {
            let streams = |g: &Group| matches!(g.kv, Kv::Split { far: Far::Stream, .. });
            let lists = ways + usize::from(batch.groups.iter().any(streams));
            let words = self.sequences * batch.groups.iter().map(list_words).sum::<u64>();
            seconds += lists as f64 * list(self.costs, words);
        }
        seconds
    }

    fn transfer(&self, op: &Op, direction: Direction) -> f64 {
        let bytes = self.link_bytes(op);
        match op.kind {
            Kind::PageOut { .. } | Kind::PageIn { .. } => {
                // Of whole requests, the pages of all layers in one launch.
                self.costs.pages(direction, self.sequences * op.work.pages, bytes)
            }
            Kind::Stream { .. } => match self.placement.map(|p| p.staging) {
                Some(Staging::Waited) => self.costs.stream_pageable(bytes),
                _ => self.costs.stream(bytes),
            },
            // Rows, experts and weights are a copy each.
            Kind::Carry { cargo: Cargo::Choices, .. } => {
                let word =
                    self.rows(op) * WORD * self.sizes.spec.experts.as_ref().map_or(0, |e| e.used as u64);
                let of = |bytes| self.costs.transfer(direction, bytes);
                of(bytes - 2 * word) + 2.0 * of(word) + self.costs.hand_over()
            }
            // The host puts the rows there, or takes them from there.
            Kind::Carry { .. } => self.costs.transfer(direction, bytes) + self.costs.hand_over(),
            _ => self.costs.transfer(direction, bytes),
        }
    }

    fn compute(&self, op: &Op, side: Side) -> f64 {
        let (costs, rows) = (self.costs, self.rows(op));
        let spec = &self.sizes.spec;
        let product_of = |sublayer, rows| {
            let layer = op.layer.expect("a product belongs to a layer") as usize;
            match self.stored() {
                Some(stored) => costs.product_beside(side, layer, sublayer, rows, stored),
                None => costs.product(side, layer, sublayer, rows),
            }
        };
        let product = |sublayer| product_of(sublayer, rows);
        // Of a divided layer. Nearly all that a row multiplies in a feed-forward of experts is experts.
        let of_experts = || {
            let layer = op.layer.expect("experts belong to a layer") as usize;
            // What the two halves take beside their work, and what is taken of it here.
            let (beside, here) = match side {
                Side::Device => {
                    (costs.launches(Launches::DIVIDED.iter().sum()), costs.launches(Launches::DIVIDED[1]))
                }
                Side::Host => (2.0 * costs.hand_over(), costs.hand_over()),
            };
            let both = |rows| product_of(Sublayer::Up, rows) + product_of(Sublayer::Down, rows);
            let all = |rows| (both(rows) - beside).max(0.0);
            here + self.sizes.seconds_of_experts(layer, side, op.work.device_experts, rows, all)
        };
        // A copy reads and writes as many bytes: half of both together.
        let halved = |read: u64, written: u64| (read + written).div_ceil(2);
        let moved = |read, written| costs.copy(side, halved(read, written));
        match op.kind {
            Kind::Embed => costs.embed(side, rows),
            Kind::Project { .. } => product(Sublayer::Qkv),
            Kind::Append { .. } => {
                let elements = rows * 2 * spec.kv_dim() as u64;
                let layer = op.layer.expect("keys and values belong to a layer") as usize;
                costs.append(side, layer, rows, halved(F32 * elements, rows * self.sizes.kv_token()))
            }
            Kind::Publish { .. } => costs.transfer(Direction::ToHost, self.link_bytes(op)),
            Kind::Attend { .. } => {
                let layer = op.layer.expect("attention belongs to a layer") as usize;
                match self.stored() {
                    Some(stored) => costs.attend_beside(side, layer, &self.scan(op), stored),
                    None => costs.attend(side, layer, &self.scan(op)),
                }
            }
            Kind::Collect => costs.transfer(Direction::ToDevice, self.link_bytes(op)),
            Kind::Merge { .. } => {
                let far = costs.transfer(Direction::ToDevice, self.link_bytes(op));
                far + moved(2 * rows * self.partial_row(), rows * HALF * spec.q_dim() as u64)
            }
            Kind::OutProj => product(Sublayer::Out),
            // The device routes; its experts follow while the host computes the others.
            Kind::FfnUp { .. } if op.work.device_experts > 0 => {
                let experts = spec.experts.as_ref().map_or(0, |e| e.count as u64);
                let d = spec.d_model as u64;
                moved(F32 * experts * d, rows * (F32 + HALF) * d) + costs.launches(Launches::DIVIDED[0])
            }
            Kind::FfnUp { .. } => product(Sublayer::Up),
            Kind::FfnDown if op.work.device_experts > 0 => of_experts(),
            Kind::FfnDown => product(Sublayer::Down),
            Kind::Experts => of_experts(),
            Kind::AddShare => {
                let row = F32 * spec.d_model as u64;
                moved(2 * rows * row, rows * row) + costs.launches(Launches::ADD)
            }
            Kind::Head { .. } => match self.stored() {
                Some(stored) => costs.head_beside(side, rows, stored),
                None => costs.head(side, rows),
            },
            Kind::Pick => costs.pick(side, rows, halved(rows * F32 * spec.vocab as u64, rows * F32)),
            Kind::Carry { .. } | Kind::Stream { .. } | Kind::PageOut { .. } | Kind::PageIn { .. } => 0.0,
            Kind::Join => 0.0,
        }
    }
}

impl virtual_machine::Costs for OpCosts<'_> {
    fn seconds(&self, op: &Op) -> f64 {
        match op.unit {
            // A word of the host's memory is read.
            _ if op.kind == Kind::Join => 0.0,
            Unit::Gpu => self.compute(op, Side::Device).max(self.costs.launch(Side::Device)),
            Unit::Host => self.compute(op, Side::Host).max(self.costs.launch(Side::Host)),
            Unit::H2d => self.transfer(op, Direction::ToDevice),
            Unit::D2h => self.transfer(op, Direction::ToHost),
        }
    }

    fn beside_copies(&self) -> f64 {
        self.costs.beside_copies()
    }

    fn before(&self, program: &Program, unit: Unit) -> f64 {
        match (self.placement, self.iteration) {
            (Some(placement), Some(iteration))
                if unit == Unit::Gpu && program.ops.iter().any(|op| op.unit == Unit::Gpu) =>
            {
                self.lists(placement, iteration)
            }
            _ => 0.0,
        }
    }

    fn after(&self, _program: &Program) -> f64 {
        let (Some(placement), Some(iteration)) = (self.placement, self.iteration) else { return 0.0 };
        if placement.head == Side::Host {
            return 0.0;
        }
        let vocab = self.sizes.spec.vocab as u64;
        let of = |batch: &SubBatch| -> f64 {
            let wanted: u32 = batch.groups.iter().map(Group::wanted).sum();
            results(self.costs, vocab, iteration, self.sequences * u64::from(wanted))
        };
        // A cohort has logits behind its last layer only.
        let ends = |b: usize, batch: &SubBatch| {
            let cohort = iteration.flow == Flow::Async && b > 0;
            !cohort || batch.at.is_some() && placement.next_stop(batch.at).is_none()
        };
        let batches = iteration.sub_batches.iter().enumerate();
        batches.filter(|&(b, batch)| ends(b, batch)).map(|(_, batch)| of(batch)).sum()
    }
}

/// Ways of attending of a placement's layers: each has lists of its own.
pub(super) fn ways(placement: &Placement) -> usize {
    let mut ways: Vec<([Option<Side>; 2], Side)> = Vec::new();
    for l in &placement.layers {
        let way = ([l.prefill.attention(), l.decode.attention()], l.kv);
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    ways.len()
}

/// Words of a group in a list: one for each row, and one for each page.
pub(super) fn list_words(g: &Group) -> u64 {
    u64::from(g.tokens) + u64::from(g.end()).div_ceil(PAGE_TOKENS as u64)
}

/// Seconds to upload a list of this many words.
pub(super) fn list(costs: &dyn Costs, words: u64) -> f64 {
    costs.transfer(Direction::ToDevice, WORD * words)
}

/// Seconds to download the results of these rows: a token and a sum each, the likeliest tokens, which are found before
/// (logits are read twice), or all logits.
pub(super) fn results(costs: &dyn Costs, vocab: u64, iteration: &Iteration, rows: u64) -> f64 {
    let down = |row: u64| costs.transfer(Direction::ToHost, rows * row);
    match (iteration.pick, iteration.top) {
        (true, _) => down(2 * WORD),
        (false, true) if rows > 0 => costs.top(rows, rows * F32 * vocab) + down(TOP_BYTES as u64),
        (false, _) => down(F32 * vocab),
    }
}

/// Tokens whose keys and values a group's rows read, each once, in a layer with this window.
fn tokens_read(g: &Group, window: Option<u64>) -> u64 {
    let end = u64::from(g.end());
    let first = (end - u64::from(g.tokens) + 1).saturating_sub(window.unwrap_or(u64::MAX));
    end - first
}

/// What a group's rows attend of one part, in a layer with this window.
fn windowed(g: &Group, part: Part, wanted_only: bool, window: u64) -> Scan {
    let end = u64::from(g.end());
    // The rows are the last ones: all, the last, or none.
    let rows = match (wanted_only, g.wants) {
        (true, Wants::Nothing) => 0,
        (true, Wants::Last) => 1,
        _ => u64::from(g.tokens),
    };
    let boundary = match g.kv {
        Kv::Split { boundary, .. } => u64::from(boundary),
        _ => 0,
    };
    let parted = match part {
        Part::Whole => 0..end,
        Part::FromBoundary => boundary..end,
        Part::UpToBoundary => 0..boundary,
    };
    let mut scan = Scan { rows, ..Scan::default() };
    for row in end - rows..end {
        // Row r sees (r − window, r].
        let seen = (row + 1).saturating_sub(window).max(parted.start)..(row + 1).min(parted.end);
        scan.pairs += seen.end.saturating_sub(seen.start);
    }
    if rows > 0 {
        let first = (end - rows + 1).saturating_sub(window).max(parted.start);
        scan.kv_tokens = parted.end.saturating_sub(first);
    }
    scan
}

#[cfg(test)]
mod tests;
