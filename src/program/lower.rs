//! Placement and iteration → program.
//!
//! Rows are grouped into classes that go the same way: neighbouring groups of one phase and one kind of [`Kv`]. For each block,
//! a class walks the sublayers; where the next is on the other side, what it needs is carried there. Neighbouring classes
//! that need the same operation share it.
//!
//! ```text
//! a layer's operations      pre                       attend                     post
//! queries on the host       project append            host                       out_proj ffn_up ffn_down
//! all on the device         project append            device                     out_proj ffn_up ffn_down
//! keys on the host          project publish           host: append, attend       collect out_proj …
//! keys on both sides        project append publish    device ‖ host              merge out_proj …
//! keys streamed             page_in project append    device (page_out)          (merge) out_proj …
//! ```
//!
//! The outer loop is over layers and the inner one over sub-batches, so that a streamed layer crosses the link once a step.

use std::ops::Range;

use super::iteration::{Far, Flow, Group, Iteration, Kv, PageMove, SubBatch, Wants};
use super::op::{Buffer, Cargo, Kind, Op, Part, Program, Region, RowsOf, Unit, Work};
use super::placement::{LayerPlacement, Phase, Placement, Residence, Side, Sublayer};
use crate::cache::PAGE_TOKENS;
use crate::{Error, Result};

/// The program of one step.
///
/// # Errors
/// [`Error::Usage`]: a policy that attends on the host over keys and values kept on the device, or that splits an
/// attention between the sides; a sublayer on a side without the layer's weights; a boundary that is not a whole number of pages.
pub fn lower(placement: &Placement, iteration: &Iteration) -> Result<Program> {
    let mut moves = page_moves(placement, iteration);
    let mut lanes = Vec::new();
    for (i, sub_batch) in iteration.sub_batches.iter().enumerate() {
        lanes.push(Lowering::new(placement, sub_batch, i as u8, iteration.pick)?.run()?);
    }
    let mut ops = std::mem::take(&mut moves);
    // Streamed layers, in order, with the sublayers that the device computes.
    let streamed: Vec<u32> = (0..placement.layers.len() as u32)
        .filter(|&l| placement.layers[l as usize].weights == Residence::Streamed)
        .filter(|&l| lanes.iter().any(|lane| lane.uses_device_weights(l)))
        .collect();
    let mut next = 0;
    let mut stream = |ops: &mut Vec<Op>, upto: usize| {
        while next < streamed.len().min(upto) {
            ops.push(stream_op(streamed[next], (next % 2) as u8));
            next += 1;
        }
    };
    stream(&mut ops, 2);
    for lane in &mut lanes {
        ops.append(&mut lane.embed);
    }
    let mut done = 0;
    for l in 0..placement.layers.len() {
        match iteration.flow {
            Flow::Serial => {
                for lane in &mut lanes {
                    let layer = &mut lane.layers[l];
                    for part in [&mut layer.pre, &mut layer.device, &mut layer.host, &mut layer.post] {
                        ops.append(part);
                    }
                }
            }
            Flow::TwoLanes => {
                // The device goes from one sub-batch's products to the other's while the host attends the first; the device's own
                // attention comes behind both (NEO §3, figure 5).
                for lane in &mut lanes {
                    if let Some(before) = l.checked_sub(1) {
                        ops.append(&mut lane.layers[before].post);
                    }
                    ops.append(&mut lane.layers[l].pre);
                    ops.append(&mut lane.layers[l].host);
                }
                for lane in &mut lanes {
                    ops.append(&mut lane.layers[l].device);
                }
                if l + 1 == placement.layers.len() {
                    for lane in &mut lanes {
                        ops.append(&mut lane.layers[l].post);
                    }
                }
            }
        }
        // A staging buffer is free for the streamed layer after the next once its operations are issued; in lock step those
        // of the layer before have just been.
        let issued = match iteration.flow {
            Flow::Serial => l + 1,
            Flow::TwoLanes => l,
        };
        while done < streamed.len() && (streamed[done] as usize) < issued {
            done += 1;
        }
        stream(&mut ops, done + 2);
    }
    for lane in &mut lanes {
        ops.append(&mut lane.head);
    }
    assign_slots(&mut ops, &streamed);
    Ok(Program { ops })
}

/// One operation for each move, over the layers whose keys and values are on the device.
fn page_moves(placement: &Placement, iteration: &Iteration) -> Vec<Op> {
    let mut layers: Vec<Range<u32>> = Vec::new();
    for (l, layer) in (0u32..).zip(&placement.layers) {
        match layers.last_mut() {
            _ if layer.kv == Side::Host => {}
            Some(run) if run.end == l => run.end += 1,
            _ => layers.push(l..l + 1),
        }
    }
    let count: u32 = layers.iter().map(|run| run.end - run.start).sum();
    let op = |m: &PageMove| {
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

fn blank(kind: Kind, unit: Unit) -> Op {
    Op {
        kind,
        unit,
        layer: None,
        sub_batch: 0,
        rows: 0..0,
        groups: 0..0,
        wanted_only: false,
        work: Work::default(),
        reads: Vec::new(),
        writes: Vec::new(),
    }
}

fn whole(buffer: Buffer) -> Region {
    Region { buffer, layers: 0..1, span: 0..1 }
}

fn stream_op(layer: u32, slot: u8) -> Op {
    let writes = vec![whole(Buffer::Weights(slot))];
    Op { layer: Some(layer), writes, ..blank(Kind::Stream { slot }, Unit::H2d) }
}

/// Operations with a streamed layer's weights read its staging buffer.
fn assign_slots(ops: &mut [Op], streamed: &[u32]) {
    for op in ops {
        let layer = op.layer.filter(|_| op.unit == Unit::Gpu && op.kind.has_weights());
        if let Some(slot) = layer.and_then(|l| streamed.binary_search(&l).ok()) {
            op.reads.push(whole(Buffer::Weights((slot % 2) as u8)));
        }
    }
}

/// The kind of a [`Kv`], without numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    Device,
    Host,
    Split(Far),
}

/// Rows that go the same way.
struct Class {
    /// Its place among the classes.
    index: usize,
    rows: Range<u32>,
    groups: Range<u32>,
    phase: Phase,
    home: Home,
    wanted: u32,
    /// Where the residual stream is.
    hidden: Side,
    /// Where the last sublayer's output is that is still to be added, and who made it.
    delta: Option<(Side, Sublayer)>,
    /// Where the activations of the feed-forward are.
    act: Side,
}

/// How a class's attention runs in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attention {
    /// Keys and values are kept on this side and attended there.
    On(Side),
    /// Kept on both sides, attended on both.
    Both,
    /// The oldest are on the host and streamed, the rest is on the device.
    NearAndStreamed,
    /// Kept on the host, attended on the device: the older ones are streamed, the new ones stored.
    Streamed,
}

#[derive(Default)]
struct LayerOps {
    pre: Vec<Op>,
    device: Vec<Op>,
    host: Vec<Op>,
    post: Vec<Op>,
}

/// The operations of a sub-batch, apart by layer and by what they may run beside.
struct Lane {
    embed: Vec<Op>,
    layers: Vec<LayerOps>,
    head: Vec<Op>,
}

impl Lane {
    fn uses_device_weights(&self, layer: u32) -> bool {
        let l = &self.layers[layer as usize];
        l.pre.iter().chain(&l.post).any(|op| op.unit == Unit::Gpu && op.kind.has_weights())
    }
}

struct Lowering<'a> {
    placement: &'a Placement,
    groups: &'a [Group],
    sub_batch: u8,
    pick: bool,
    classes: Vec<Class>,
}

impl<'a> Lowering<'a> {
    fn new(placement: &'a Placement, batch: &'a SubBatch, sub_batch: u8, pick: bool) -> Result<Lowering<'a>> {
        let mut classes: Vec<Class> = Vec::new();
        for (at, (group, rows)) in batch.with_rows().enumerate() {
            let home = match group.kv {
                Kv::Device => Home::Device,
                Kv::Host => Home::Host,
                Kv::Split { boundary, far } => {
                    if !(boundary as usize).is_multiple_of(PAGE_TOKENS) || boundary > group.first {
                        return Err(Error::usage(format!(
                            "a boundary at token {boundary} of a sequence that continues at {}; it must be a multiple of \
                             {PAGE_TOKENS}, and new tokens go behind it",
                            group.first
                        )));
                    }
                    if boundary == 0 { Home::Device } else { Home::Split(far) }
                }
            };
            let at = at as u32;
            match classes.last_mut() {
                Some(c) if c.phase == group.phase && c.home == home => {
                    c.rows.end = rows.end;
                    c.groups.end = at + 1;
                    c.wanted += group.wanted();
                }
                _ => classes.push(Class {
                    index: classes.len(),
                    rows,
                    groups: at..at + 1,
                    phase: group.phase,
                    home,
                    wanted: group.wanted(),
                    hidden: placement.embedding,
                    delta: None,
                    act: Side::Device,
                }),
            }
        }
        Ok(Lowering { placement, groups: &batch.groups, sub_batch, pick, classes })
    }

    fn run(mut self) -> Result<Lane> {
        let mut lane = Lane { embed: Vec::new(), layers: Vec::new(), head: Vec::new() };
        if self.classes.is_empty() {
            lane.layers.resize_with(self.placement.layers.len(), LayerOps::default);
            return Ok(lane);
        }
        let all: Vec<usize> = (0..self.classes.len()).collect();
        let side = self.placement.embedding;
        self.each(&mut lane.embed, &all, Unit::of(side), None, |_| Some(Kind::Embed));
        for l in 0..self.placement.layers.len() as u32 {
            let mut ops = LayerOps::default();
            self.block(l, &mut ops)?;
            lane.layers.push(ops);
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
        let ways = self.classes.iter().map(|c| attention(&layer, c)).collect::<Result<Vec<_>>>()?;
        for c in &self.classes {
            for s in [Sublayer::Qkv, Sublayer::Out, Sublayer::Up, Sublayer::Down] {
                has_weights(l, layer.weights, side(c, s))?;
            }
        }
        // Behind the last layer's keys and values only rows with logits matter.
        let last = l as usize + 1 == self.placement.layers.len();
        let live: Vec<usize> = all.iter().copied().filter(|&c| !last || self.classes[c].wanted > 0).collect();
        // What streaming needs first, so that it runs under the layer before.
        let slot = (l % 2) as u8;
        let page = PAGE_TOKENS as u32;
        let lives = |g: &Group| !last || g.wanted() > 0;
        for &c in &all {
            match ways[c] {
                Attention::Streamed => self.page_in(&mut ops.pre, c, l, slot, |g| {
                    // Or else only the page that new tokens are added to.
                    if lives(g) { 0..g.first } else { g.first / page * page..g.first }
                }),
                Attention::NearAndStreamed => {
                    self.page_in(&mut ops.pre, c, l, slot, |g| if lives(g) { 0..boundary(g) } else { 0..0 })
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
        for &c in &live {
            let c = &mut self.classes[c];
            c.hidden = layer.policy(c.phase).side(Sublayer::Up);
            c.act = c.hidden;
            c.delta = None;
        }
        let down = |c: &Class| side(c, Sublayer::Down);
        for to in [Side::Host, Side::Device] {
            let kind =
                |c: &Class| (down(c) == to && c.act != to).then_some(Kind::Carry { cargo: Cargo::Act, to });
            self.each(&mut ops.post, &live, link(to), Some(l), kind);
        }
        for at in [Side::Host, Side::Device] {
            self.each(&mut ops.post, &live, Unit::of(at), Some(l), |c| {
                (down(c) == at).then_some(Kind::FfnDown)
            });
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
            Attention::On(Side::Device) => Some(on_device(Part::Whole, None)),
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
        let mut run: Option<(Kind, usize, usize)> = None;
        for &c in classes {
            let next = kind(&self.classes[c]);
            if let (Some((k, _, end)), Some(n)) = (&mut run, next)
                && *k == n
                && *end + 1 == c
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

    fn op(&self, kind: Kind, unit: Unit, layer: Option<u32>, first: usize, last: usize) -> Op {
        let classes = &self.classes[first..=last];
        let rows = classes[0].rows.start..classes[classes.len() - 1].rows.end;
        let groups = classes[0].groups.start..classes[classes.len() - 1].groups.end;
        let wanted: u32 = classes.iter().map(|c| c.wanted).sum();
        // From attention on, the last layer works for the logits only.
        let behind =
            !matches!(kind, Kind::Embed | Kind::Project { .. } | Kind::Append { .. } | Kind::Publish { .. });
        let last_layer = match layer {
            Some(l) => l as usize + 1 == self.placement.layers.len(),
            None => matches!(kind, Kind::Head { .. } | Kind::Pick),
        };
        let into_last = matches!(kind, Kind::Carry { cargo: Cargo::Qkv, .. });
        let wanted_only = behind && last_layer && !into_last && wanted < rows.end - rows.start;
        let members = &self.groups[groups.start as usize..groups.end as usize];
        let mut work = Work { rows: u64::from(rows.end - rows.start), ..Work::default() };
        if matches!(kind, Kind::Head { .. } | Kind::Pick) || wanted_only {
            work.rows = u64::from(wanted);
        }
        if let Kind::Attend { part, .. } = kind {
            for g in members {
                let (rows, seen) = match (g.wants, wanted_only) {
                    (Wants::Last, true) => (1, u64::from(g.end())),
                    (Wants::Nothing, true) => (0, 0),
                    _ => (u64::from(g.tokens), u64::from(g.first) + u64::from(g.tokens + 1) / 2),
                };
                let (b, end) = (u64::from(boundary(g)), u64::from(g.end()));
                let (tokens, pairs) = match part {
                    Part::Whole => (end, rows * seen),
                    Part::FromBoundary => (end - b, rows * seen.saturating_sub(b)),
                    Part::UpToBoundary => (b, rows * b),
                };
                work.kv_tokens += if rows == 0 { 0 } else { tokens };
                work.pairs += pairs;
            }
        }
        let mut op = Op {
            kind,
            unit,
            layer,
            sub_batch: self.sub_batch,
            rows,
            groups,
            wanted_only,
            work,
            reads: Vec::new(),
            writes: Vec::new(),
        };
        self.regions(&mut op, members);
        op
    }

    /// What a computation or a transfer of rows reads and writes.
    fn regions(&self, op: &mut Op, members: &[Group]) {
        let side = if op.unit == Unit::Host { Side::Host } else { Side::Device };
        let (b, rows) = (op.sub_batch, op.rows.clone());
        let region = |buffer| Region { buffer, layers: 0..1, span: rows.clone() };
        let of = |side, what| region(Buffer::Rows(side, b, what));
        let here = |what| of(side, what);
        let added = |add: bool| add.then(|| here(RowsOf::Delta));
        let layer = op.layer.unwrap_or_default();
        let pages = |g: &Group, staged: Option<u8>, tokens: Range<u32>| Region {
            buffer: staged.map_or(Buffer::Pages(side, g.request), |s| Buffer::StagedPages(s, g.request)),
            layers: if staged.is_some() { 0..1 } else { layer..layer + 1 },
            span: page_span(tokens),
        };
        let (reads, writes) = (&mut op.reads, &mut op.writes);
        match op.kind {
            Kind::Embed => writes.push(here(RowsOf::Hidden)),
            Kind::Project { add } => {
                reads.push(here(RowsOf::Hidden));
                reads.extend(added(add));
                writes.extend([here(RowsOf::Hidden), here(RowsOf::Qkv)]);
            }
            Kind::Append { mailbox, staged } => {
                reads.push(if mailbox { region(Buffer::MailboxIn(b)) } else { here(RowsOf::Qkv) });
                writes.extend(members.iter().map(|g| pages(g, staged, g.first..g.end())));
            }
            Kind::Publish { .. } => {
                reads.push(here(RowsOf::Qkv));
                writes.push(region(Buffer::MailboxIn(b)));
            }
            Kind::Attend { part, from_mailbox, to_mailbox, staged } => {
                reads.push(if from_mailbox { region(Buffer::MailboxIn(b)) } else { here(RowsOf::Qkv) });
                reads.extend(members.iter().map(|g| {
                    let tokens = match part {
                        Part::Whole => 0..g.end(),
                        Part::FromBoundary => boundary(g)..g.end(),
                        Part::UpToBoundary => 0..boundary(g),
                    };
                    pages(g, staged, tokens)
                }));
                writes.push(match part {
                    _ if to_mailbox => region(Buffer::MailboxOut(b)),
                    Part::Whole => here(RowsOf::Attn),
                    Part::FromBoundary => here(RowsOf::Partial),
                    Part::UpToBoundary => here(RowsOf::FarPartial),
                });
            }
            Kind::Collect => {
                reads.push(region(Buffer::MailboxOut(b)));
                writes.push(here(RowsOf::Attn));
            }
            Kind::Merge { mailbox } => {
                reads.push(here(RowsOf::Partial));
                reads.push(if mailbox { region(Buffer::MailboxOut(b)) } else { here(RowsOf::FarPartial) });
                writes.push(here(RowsOf::Attn));
            }
            Kind::OutProj => {
                reads.push(here(RowsOf::Attn));
                writes.push(here(RowsOf::Delta));
            }
            Kind::FfnUp { add } => {
                reads.push(here(RowsOf::Hidden));
                reads.extend(added(add));
                writes.extend([here(RowsOf::Hidden), here(RowsOf::Act)]);
            }
            Kind::FfnDown => {
                reads.push(here(RowsOf::Act));
                writes.push(here(RowsOf::Delta));
            }
            Kind::Head { add } => {
                reads.push(here(RowsOf::Hidden));
                reads.extend(added(add));
                writes.extend([here(RowsOf::Hidden), here(RowsOf::Logits)]);
            }
            Kind::Pick => {
                reads.push(here(RowsOf::Logits));
                writes.push(here(RowsOf::Picked));
            }
            Kind::Carry { cargo, to } => {
                let from = other(to);
                let what = match cargo {
                    Cargo::Hidden { pending } => {
                        reads.extend(pending.map(|_| of(from, RowsOf::Delta)));
                        RowsOf::Hidden
                    }
                    Cargo::Delta { .. } => RowsOf::Delta,
                    Cargo::Qkv => RowsOf::Qkv,
                    Cargo::Attn => RowsOf::Attn,
                    Cargo::Act => RowsOf::Act,
                };
                reads.push(of(from, what));
                writes.push(of(to, what));
            }
            Kind::Stream { .. } | Kind::PageOut { .. } | Kind::PageIn { .. } => {
                unreachable!("made elsewhere")
            }
        }
    }

    /// Pages of one layer to staging memory: those with `tokens` of each group.
    fn page_in(
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
    fn page_out(&self, ops: &mut Vec<Op>, class: usize, l: u32, slot: u8) {
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

/// How a class's attention runs in a layer.
fn attention(layer: &LayerPlacement, class: &Class) -> Result<Attention> {
    let policy = layer.policy(class.phase);
    let Some(side) = policy.attention() else {
        return Err(Error::usage(format!(
            "policy {:?} computes scores and values on different sides; one pass over keys and values does both, so such \
             a policy has a predicted time but cannot run",
            policy.bits()
        )));
    };
    Ok(match (layer.kv, class.home, side) {
        (Side::Host, _, Side::Host) => Attention::On(Side::Host),
        (Side::Host, _, Side::Device) => Attention::Streamed,
        (Side::Device, Home::Device, Side::Device) => Attention::On(Side::Device),
        (Side::Device, Home::Split(Far::Attend), Side::Device) => Attention::Both,
        (Side::Device, Home::Split(Far::Stream), Side::Device) => Attention::NearAndStreamed,
        // A prompt goes through the device and leaves its keys and values behind, layer by layer (NEO §3.2);
        // decode rows are attended where their keys and values are.
        (Side::Device, Home::Host, Side::Device) if class.phase == Phase::Prefill => Attention::Streamed,
        (Side::Device, Home::Host, _) => Attention::On(Side::Host),
        (Side::Device, _, Side::Host) => {
            return Err(Error::usage(format!(
                "policy {:?} attends on the host, but the keys and values of the layer are kept on the device",
                policy.bits()
            )));
        }
    })
}

fn has_weights(layer: u32, weights: Residence, side: Side) -> Result<()> {
    let there = match (weights, side) {
        (Residence::Both, _) => true,
        // Host memory holds both layouts where the host computes with them, too.
        (Residence::Streamed, _) => true,
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

fn other(side: Side) -> Side {
    match side {
        Side::Host => Side::Device,
        Side::Device => Side::Host,
    }
}

fn link(to: Side) -> Unit {
    match to {
        Side::Host => Unit::D2h,
        Side::Device => Unit::H2d,
    }
}

fn boundary(group: &Group) -> u32 {
    match group.kv {
        Kv::Split { boundary, .. } => boundary,
        _ => 0,
    }
}

fn page_span(tokens: Range<u32>) -> Range<u32> {
    let page = PAGE_TOKENS as u32;
    if tokens.is_empty() { 0..0 } else { tokens.start / page..tokens.end.div_ceil(page) }
}
