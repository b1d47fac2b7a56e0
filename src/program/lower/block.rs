//! A sub-batch's walk through the blocks: which operations, on which side, with which transfers between.

use std::cell::RefCell;
use std::ops::Range;

use super::class::{Attention, Class, attention, boundary, classes, first_seen, in_pieces};
use crate::cache::PAGE_TOKENS;
use crate::program::iteration::{Group, Kv, MoveRequest, SubBatch};
use crate::program::op::{Cargo, Kind, Op, Part};
use crate::program::placement::{Placement, Residence, Side, Sublayer};
use crate::program::unit::Unit;
use crate::{Error, Result};

/// How many layers' pages are in staging memory at once.
pub(super) const STAGED_LAYERS: usize = 2;

#[derive(Default)]
pub(super) struct LayerOps {
    /// Pages of the layer to staging memory: they come ahead of everything else.
    pub pages: Vec<Op>,
    pub pre: Vec<Op>,
    pub device: Vec<Op>,
    pub host: Vec<Op>,
    pub post: Vec<Op>,
}

/// The operations of a sub-batch, apart by layer and by what they may run beside.
pub(super) struct Lane {
    pub embed: Vec<Op>,
    pub layers: Vec<LayerOps>,
    pub head: Vec<Op>,
}

impl Lane {
    /// Whether the device computes with weights of a layer that do not stay there.
    pub fn uses_staged(&self, layer: u32, weights: Residence) -> bool {
        let l = &self.layers[layer as usize];
        l.pre.iter().chain(&l.post).any(|op| is_staged(op, weights))
    }
}

pub(super) struct Lowering<'a> {
    pub placement: &'a Placement,
    pub groups: &'a [Group],
    pub sub_batch: u8,
    pub pick: bool,
    pub classes: Vec<Class>,
    /// Groups whose pages may move in this step or be on both sides, by place: what is read and written is told page by page.
    pub moving: Vec<u32>,
    /// Sums over groups that have been asked for: see [`Lowering::attended`].
    pub attended: RefCell<Vec<Attended>>,
    /// Whether each class has an attention of its own on the host.
    in_pieces: bool,
    /// Layers whose operations are wanted, and the head with the last of them.
    wanted: Range<u32>,
    /// Whether what is walked through is only to say where the residual stream is then.
    silent: bool,
}

/// A question about attention, and the answer: tokens and pairs.
type Attended = ((Part, bool, Range<u32>), (u64, u64));

impl<'a> Lowering<'a> {
    pub fn new(
        placement: &'a Placement,
        batch: &'a SubBatch,
        sub_batch: u8,
        pick: bool,
        moves: &[MoveRequest],
    ) -> Result<Lowering<'a>> {
        let classes = classes(batch, placement)?;
        let moves =
            |g: &Group| matches!(g.kv, Kv::Split { .. }) || moves.iter().any(|m| m.request == g.request);
        let moving = (0u32..).zip(&batch.groups).filter(|(_, g)| moves(g)).map(|(at, _)| at).collect();
        Ok(Lowering {
            placement,
            groups: &batch.groups,
            sub_batch,
            pick,
            classes,
            moving,
            attended: RefCell::default(),
            in_pieces: false,
            wanted: 0..placement.layers.len() as u32,
            silent: false,
        })
    }

    /// The operations of these layers only, of the embedding with the first layer, and of the head with the last.
    pub fn only(mut self, layers: Range<u32>) -> Lowering<'a> {
        self.wanted = layers;
        self
    }

    /// Attention on the host in this many pieces, by groups, so that more urgent work can run in between.
    pub fn in_pieces(mut self, n: u32) -> Lowering<'a> {
        self.classes = in_pieces(self.classes, self.groups, n);
        self.in_pieces = true;
        self
    }

    pub fn run(mut self) -> Result<Lane> {
        let mut lane = Lane { embed: Vec::new(), layers: Vec::new(), head: Vec::new() };
        if self.classes.is_empty() {
            lane.layers.resize_with(self.placement.layers.len(), LayerOps::default);
            return Ok(lane);
        }
        let all: Vec<usize> = (0..self.classes.len()).collect();
        let Range { start, end } = self.wanted;
        if start == 0 {
            let side = self.placement.embedding;
            self.each(&mut lane.embed, &all, Unit::of(side), None, |_| Some(Kind::Embed));
        }
        lane.layers.resize_with(self.placement.layers.len(), LayerOps::default);
        // Where the residual stream is before a layer follows from the layer before.
        for l in start.saturating_sub(1)..end {
            self.silent = l < start;
            self.block(l, &mut lane.layers[l as usize])?;
        }
        if (end as usize) < lane.layers.len() {
            return Ok(lane);
        }
        let wanting: Vec<usize> = all.into_iter().filter(|&c| self.classes[c].wanted > 0).collect();
        let side = self.placement.head;
        let last = self.placement.layers.len() as u32 - 1;
        self.bring_residual(&mut lane.head, &wanting, |_| side, Some(last));
        let add = |c: &Class| c.delta.is_some();
        self.each(&mut lane.head, &wanting, Unit::of(side), None, |c| Some(Kind::Head { add: add(c) }));
        if self.pick {
            self.each(&mut lane.head, &wanting, Unit::of(side), None, |_| Some(Kind::Pick));
        }
        Ok(lane)
    }

    /// One block.
    fn block(&mut self, l: u32, ops: &mut LayerOps) -> Result<()> {
        let layer = self.placement.layers[l as usize];
        let all: Vec<usize> = (0..self.classes.len()).collect();
        let side = |c: &Class, s: Sublayer| layer.policy(c.phase).side(s);
        let ways = self.classes.iter().map(|c| attention(self.placement, l as usize, c));
        let ways = ways.collect::<Result<Vec<_>>>()?;
        for c in &self.classes {
            for s in Sublayer::PRODUCTS {
                has_weights(l, layer.weights, side(c, s))?;
            }
        }
        if layer.is_divided() {
            let on_device = |s| self.classes.iter().all(|c| side(c, s) == Side::Device);
            if layer.weights != Residence::Both || ![Sublayer::Up, Sublayer::Down].into_iter().all(on_device)
            {
                return Err(Error::usage(format!(
                    "layer {l}: experts are divided where the device routes, and both sides have weights"
                )));
            }
        }
        // Behind the last layer's keys and values only rows with logits matter.
        let last = l as usize + 1 == self.placement.layers.len();
        let live: Vec<usize> = all.iter().copied().filter(|&c| !last || self.classes[c].wanted > 0).collect();
        let slot = (l % STAGED_LAYERS as u32) as u8;
        let page = PAGE_TOKENS as u32;
        let lives = |g: &Group| !last || g.wanted() > 0;
        // Of a layer with a window, what some row sees.
        let window = self.placement.window(l as usize);
        let seen = |g: &Group| first_seen(g, window);
        for &c in &all {
            match ways[c] {
                Attention::Streamed => self.page_in(&mut ops.pages, c, l, slot, |g| {
                    // The page that new tokens are added to at least.
                    let own = g.first / page * page;
                    if lives(g) { seen(g).min(own)..g.first } else { own..g.first }
                }),
                Attention::NearAndStreamed => {
                    let far = |g: &Group| seen(g).min(boundary(g))..boundary(g);
                    self.page_in(&mut ops.pages, c, l, slot, |g| if lives(g) { far(g) } else { 0..0 })
                }
                _ => {}
            }
        }
        // Queries, keys and values, and where they go.
        self.bring_residual(&mut ops.pre, &all, |c| side(c, Sublayer::Qkv), l.checked_sub(1));
        for at in [Side::Host, Side::Device] {
            let kind = |c: &Class| {
                (side(c, Sublayer::Qkv) == at).then_some(Kind::Project { add: c.delta.is_some() })
            };
            self.each(&mut ops.pre, &all, Unit::of(at), Some(l), kind);
        }
        for c in &mut self.classes {
            c.hidden = side(c, Sublayer::Qkv);
            c.delta = None;
        }
        let made_on_host = |c: &Class| side(c, Sublayer::Qkv) == Side::Host;
        let on_host = |w: Attention| w == Attention::On(Side::Host);
        let way = |c: &Class| ways[c.index];
        self.each(&mut ops.pre, &all, Unit::H2d, Some(l), |c| {
            let needed = made_on_host(c) && !on_host(way(c));
            needed.then_some(Kind::Carry { cargo: Cargo::Qkv, to: Side::Device })
        });
        self.each(&mut ops.pre, &all, Unit::Gpu, Some(l), |c| match way(c) {
            Attention::On(Side::Host) => None,
            Attention::Streamed => Some(Kind::Append { mailbox: false, staged: Some(slot) }),
            _ => Some(Kind::Append { mailbox: false, staged: None }),
        });
        self.each(&mut ops.pre, &all, Unit::Gpu, Some(l), |c| match way(c) {
            Attention::On(Side::Host) if !made_on_host(c) => Some(Kind::Publish { queries_only: false }),
            Attention::Both if live.contains(&c.index) => Some(Kind::Publish { queries_only: true }),
            _ => None,
        });
        self.each(&mut ops.host, &all, Unit::Host, Some(l), |c| {
            on_host(way(c)).then_some(Kind::Append { mailbox: !made_on_host(c), staged: None })
        });
        for &c in &all {
            if ways[c] == Attention::Streamed {
                self.page_out(&mut ops.device, c, l, slot);
            }
        }
        self.attend(l, slot, ops, &live, &ways);
        // Output projection.
        let out = |c: &Class| side(c, Sublayer::Out);
        for at in [Side::Host, Side::Device] {
            self.each(&mut ops.post, &live, Unit::of(at), Some(l), |c| {
                (out(c) == at).then_some(Kind::OutProj)
            });
        }
        for &c in &live {
            let made = out(&self.classes[c]);
            self.classes[c].delta = Some((made, Sublayer::Out));
        }
        // Feed-forward.
        self.bring_residual(&mut ops.post, &live, |c| side(c, Sublayer::Up), Some(l));
        for at in [Side::Host, Side::Device] {
            let kind =
                |c: &Class| (side(c, Sublayer::Up) == at).then_some(Kind::FfnUp { add: c.delta.is_some() });
            self.each(&mut ops.post, &live, Unit::of(at), Some(l), kind);
        }
        // Experts are sorted by operation: the second half has the rows of the first.
        let added: Vec<bool> = self.classes.iter().map(|c| c.delta.is_some()).collect();
        let same = |c: &Class| added[c.index];
        for &c in &live {
            let c = &mut self.classes[c];
            c.hidden = layer.policy(c.phase).side(Sublayer::Up);
            c.act = c.hidden;
            c.delta = None;
        }
        if layer.is_divided() {
            let choices = |_: &Class| Some(Kind::Carry { cargo: Cargo::Choices, to: Side::Host });
            self.each_of(&mut ops.post, &live, link(Side::Host), Some(l), choices, same);
            self.each_of(&mut ops.post, &live, Unit::Host, Some(l), |_| Some(Kind::Experts), same);
        }
        let down = |c: &Class| side(c, Sublayer::Down);
        for to in [Side::Host, Side::Device] {
            let kind =
                |c: &Class| (down(c) == to && c.act != to).then_some(Kind::Carry { cargo: Cargo::Act, to });
            self.each(&mut ops.post, &live, link(to), Some(l), kind);
        }
        for at in [Side::Host, Side::Device] {
            let kind = |c: &Class| (down(c) == at).then_some(Kind::FfnDown);
            self.each_of(&mut ops.post, &live, Unit::of(at), Some(l), kind, same);
        }
        if layer.is_divided() {
            let share = |_: &Class| Some(Kind::Carry { cargo: Cargo::Share, to: Side::Device });
            self.each_of(&mut ops.post, &live, link(Side::Device), Some(l), share, same);
            self.each_of(&mut ops.post, &live, Unit::Gpu, Some(l), |_| Some(Kind::AddShare), same);
        }
        for &c in &live {
            let made = down(&self.classes[c]);
            self.classes[c].delta = Some((made, Sublayer::Down));
        }
        Ok(())
    }

    /// Attention, and its output to the side of the output projection.
    fn attend(&mut self, l: u32, slot: u8, ops: &mut LayerOps, live: &[usize], ways: &[Attention]) {
        let layer = self.placement.layers[l as usize];
        let way = |c: &Class| ways[c.index];
        let made_on_host = |c: &Class| layer.policy(c.phase).side(Sublayer::Qkv) == Side::Host;
        let out = |c: &Class| layer.policy(c.phase).side(Sublayer::Out);
        let on_device = |part, staged| Kind::Attend { part, from_mailbox: false, to_mailbox: false, staged };
        // Copies of pages to the host stand behind the attention that reads the same staging memory.
        let mut stores = std::mem::take(&mut ops.device);
        self.each(&mut ops.device, live, Unit::Gpu, Some(l), |c| match way(c) {
            Attention::On(Side::Host) => None,
            Attention::On(Side::Device) | Attention::Near => Some(on_device(Part::Whole, None)),
            Attention::Streamed => Some(on_device(Part::Whole, Some(slot))),
            Attention::Both | Attention::NearAndStreamed => Some(on_device(Part::FromBoundary, None)),
        });
        self.each(&mut ops.device, live, Unit::Gpu, Some(l), |c| {
            (way(c) == Attention::NearAndStreamed).then_some(on_device(Part::UpToBoundary, Some(slot)))
        });
        ops.device.append(&mut stores);
        self.each(&mut ops.host, live, Unit::Host, Some(l), |c| match way(c) {
            Attention::On(Side::Host) => Some(Kind::Attend {
                part: Part::Whole,
                from_mailbox: !made_on_host(c),
                to_mailbox: !made_on_host(c) && out(c) == Side::Device,
                staged: None,
            }),
            Attention::Both => Some(Kind::Attend {
                part: Part::UpToBoundary,
                from_mailbox: true,
                to_mailbox: true,
                staged: None,
            }),
            _ => None,
        });
        self.each(&mut ops.post, live, Unit::Gpu, Some(l), |c| match way(c) {
            Attention::On(Side::Host) if !made_on_host(c) && out(c) == Side::Device => Some(Kind::Collect),
            Attention::Both => Some(Kind::Merge { mailbox: true }),
            Attention::NearAndStreamed => Some(Kind::Merge { mailbox: false }),
            _ => None,
        });
        for to in [Side::Host, Side::Device] {
            self.each(&mut ops.post, live, link(to), Some(l), |c| {
                let collected = !made_on_host(c) && out(c) == Side::Device;
                let at = match way(c) {
                    Attention::On(Side::Host) if !collected => Side::Host,
                    _ => Side::Device,
                };
                (out(c) == to && at != to).then_some(Kind::Carry { cargo: Cargo::Attn, to })
            });
        }
    }

    /// Carries the residual stream of `classes`, and what is to be added to it, to the side where `to` needs it.
    fn bring_residual(
        &mut self,
        ops: &mut Vec<Op>,
        classes: &[usize],
        to: impl Fn(&Class) -> Side,
        layer: Option<u32>,
    ) {
        for at in [Side::Host, Side::Device] {
            self.each(ops, classes, link(at), layer, |c| {
                if to(c) != at {
                    return None;
                }
                let cargo = match (c.hidden == at, c.delta) {
                    (false, Some((side, of))) if side != at => Cargo::Hidden { pending: Some(of) },
                    (false, _) => Cargo::Hidden { pending: None },
                    (true, Some((side, of))) if side != at => Cargo::Delta { of },
                    (true, _) => return None,
                };
                Some(Kind::Carry { cargo, to: at })
            });
        }
        for &c in classes {
            let at = to(&self.classes[c]);
            let c = &mut self.classes[c];
            if let Some((side, of)) = c.delta
                && side != at
            {
                // Added on the way, if both were away.
                c.delta = if c.hidden == at { Some((at, of)) } else { None };
            }
            c.hidden = at;
        }
    }

    /// One operation for each run of neighbouring classes of which `kind` says the same.
    fn each(
        &self,
        ops: &mut Vec<Op>,
        classes: &[usize],
        unit: Unit,
        layer: Option<u32>,
        kind: impl Fn(&Class) -> Option<Kind>,
    ) {
        self.each_of(ops, classes, unit, layer, kind, |_| false);
    }

    /// The same for each run of which `same` says the same, too.
    fn each_of(
        &self,
        ops: &mut Vec<Op>,
        classes: &[usize],
        unit: Unit,
        layer: Option<u32>,
        kind: impl Fn(&Class) -> Option<Kind>,
        same: impl Fn(&Class) -> bool,
    ) {
        if self.silent {
            return;
        }
        let mut run: Option<(Kind, usize, usize)> = None;
        for &c in classes {
            let next = kind(&self.classes[c]);
            let apart = self.in_pieces && unit == Unit::Host && matches!(next, Some(Kind::Attend { .. }));
            if let (Some((k, _, end)), Some(n)) = (&mut run, next)
                && *k == n
                && *end + 1 == c
                && !apart
                && same(&self.classes[*end]) == same(&self.classes[c])
            {
                *end = c;
                continue;
            }
            if let Some((k, first, end)) = run.take() {
                ops.push(self.op(k, unit, layer, first, end));
            }
            run = next.map(|k| (k, c, c));
        }
        if let Some((k, first, end)) = run {
            ops.push(self.op(k, unit, layer, first, end));
        }
    }
}

/// Whether an operation is the device's with weights that come to a staging buffer, of a layer whose weights are there.
pub(super) fn is_staged(op: &Op, weights: Residence) -> bool {
    let product = op.kind.product().filter(|_| op.unit == Unit::Gpu);
    weights.is_staged() && product.is_some_and(|sublayer| !weights.stays_on_device(sublayer))
}

fn has_weights(layer: u32, weights: Residence, side: Side) -> Result<()> {
    let there = match (weights, side) {
        (Residence::Both, _) => true,
        // Host memory holds both layouts where the host computes with them, too.
        (Residence::Streamed | Residence::StreamedExperts, _) => true,
        (Residence::Host, side) => side == Side::Host,
        (Residence::Device, side) => side == Side::Device,
    };
    if there {
        return Ok(());
    }
    Err(Error::usage(format!(
        "layer {layer}: a sublayer on the {} side, but the weights are on the other only",
        if side == Side::Host { "host's" } else { "device's" }
    )))
}

fn link(to: Side) -> Unit {
    match to {
        Side::Host => Unit::D2h,
        Side::Device => Unit::H2d,
    }
}
