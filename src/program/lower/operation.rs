//! One operation: how much there is to do, and which memory it reads and writes.

use std::ops::Range;

use super::block::Lowering;
use super::class::{boundary, first_seen, page_span};
use crate::program::iteration::{Group, Wants};
use crate::program::op::{Buffer, Cargo, Kind, Op, Part, Region, RowsOf, Work};
use crate::program::placement::Side;
use crate::program::unit::Unit;

impl Lowering<'_> {
    /// The operation `kind` for the rows of the classes `first` to `last`.
    pub(super) fn op(&self, kind: Kind, unit: Unit, layer: Option<u32>, first: usize, last: usize) -> Op {
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
        let divides = match kind {
            Kind::FfnUp { .. } | Kind::FfnDown | Kind::Experts | Kind::AddShare => true,
            Kind::Carry { cargo, .. } => matches!(cargo, Cargo::Choices | Cargo::Share),
            _ => false,
        };
        if let Some(l) = layer.filter(|_| divides) {
            work.device_experts = self.placement.layers[l as usize].device_experts;
        }
        if let Kind::Attend { part, .. } = kind {
            (work.kv_tokens, work.pairs) = self.attended(part, wanted_only, groups.clone());
        }
        // Kernels attend whole sequences; all else is computed from the first row that counts to the last.
        let rows = match kind {
            Kind::Attend { .. } if unit == Unit::Gpu => rows,
            _ if wanted_only => wanted_span(members, rows),
            _ => rows,
        };
        let mut op = Op {
            kind,
            unit,
            layer,
            sub_batch: self.sub_batch,
            rows,
            groups,
            wanted_only,
            detached: false,
            work,
            reads: Vec::new(),
            writes: Vec::new(),
        };
        self.regions(&mut op, members);
        op
    }

    /// Tokens that an attention of these groups reads, and pairs of a row and a token. Layers ask for the same again and
    /// again, and each answer is a sum over requests: the answers are kept.
    fn attended(&self, part: Part, wanted_only: bool, groups: Range<u32>) -> (u64, u64) {
        let key = (part, wanted_only, groups);
        let mut kept = self.attended.borrow_mut();
        if let Some((_, sums)) = kept.iter().find(|(known, _)| *known == key) {
            return *sums;
        }
        let (mut kv_tokens, mut all_pairs) = (0, 0);
        for g in &self.groups[key.2.start as usize..key.2.end as usize] {
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
            kv_tokens += if rows == 0 { 0 } else { tokens };
            all_pairs += pairs;
        }
        kept.push((key, (kv_tokens, all_pairs)));
        (kv_tokens, all_pairs)
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
        let window = self.placement.window(layer as usize);
        let groups = op.groups.clone();
        // Pages of the operation's groups, of each the pages with these tokens: by request in staging memory, all together
        // elsewhere, and by request as well where some of them may move in this step.
        let pages = |to: &mut Vec<Region>, staged: Option<u8>, tokens: &dyn Fn(&Group) -> Range<u32>| {
            let of = |g: &Group| Region {
                buffer: staged.map_or(Buffer::Pages(side, g.request), |s| Buffer::StagedPages(s, g.request)),
                layers: if staged.is_some() { 0..1 } else { layer..layer + 1 },
                span: page_span(tokens(g)),
            };
            if staged.is_some() {
                to.extend(members.iter().map(of));
                return;
            }
            let (buffer, layers) = (Buffer::GroupPages(side, b), layer..layer + 1);
            to.push(Region { buffer, layers, span: groups.clone() });
            let from = self.moving.partition_point(|&at| at < groups.start);
            let moving = self.moving[from..].iter().take_while(|&&at| at < groups.end);
            to.extend(moving.map(|&at| of(&self.groups[at as usize])));
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
                pages(writes, staged, &|g| g.first..g.end());
            }
            Kind::Publish { .. } => {
                reads.push(here(RowsOf::Qkv));
                writes.push(region(Buffer::MailboxIn(b)));
            }
            Kind::Attend { part, from_mailbox, to_mailbox, staged } => {
                reads.push(if from_mailbox { region(Buffer::MailboxIn(b)) } else { here(RowsOf::Qkv) });
                pages(reads, staged, &|g| {
                    let first = first_seen(g, window);
                    match part {
                        Part::Whole => first..g.end(),
                        Part::FromBoundary => boundary(g).max(first)..g.end(),
                        Part::UpToBoundary => first.min(boundary(g))..boundary(g),
                    }
                });
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
                writes.extend((op.work.device_experts > 0).then(|| here(RowsOf::Choices)));
            }
            Kind::FfnDown => {
                reads.push(here(RowsOf::Act));
                writes.push(here(RowsOf::Delta));
            }
            // The rows that came lie where the residual stream's are otherwise.
            Kind::Experts => {
                reads.extend([here(RowsOf::Choices), here(RowsOf::Delta)]);
                writes.extend([here(RowsOf::Delta), here(RowsOf::Share)]);
            }
            Kind::AddShare => {
                reads.extend([here(RowsOf::Delta), here(RowsOf::Share)]);
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
                    Cargo::Choices => {
                        writes.push(of(to, RowsOf::Delta));
                        RowsOf::Choices
                    }
                    Cargo::Share => RowsOf::Share,
                };
                reads.push(of(from, what));
                writes.push(of(to, what));
            }
            // A word that the host writes: nothing that the order of lanes is about.
            Kind::Join => {}
            Kind::Stream { .. } | Kind::PageOut { .. } | Kind::PageIn { .. } => {
                unreachable!("made elsewhere")
            }
        }
    }
}

/// The part of `rows` from the first of `members` that wants logits to the last.
fn wanted_span(members: &[Group], rows: Range<u32>) -> Range<u32> {
    let (mut span, mut row) = (None::<Range<u32>>, rows.start);
    for g in members {
        let end = row + g.tokens;
        if g.wanted() > 0 {
            let first = end - g.wanted();
            span = Some(span.map_or(first, |s| s.start)..end);
        }
        row = end;
    }
    span.unwrap_or(rows.end..rows.end)
}

pub(super) fn other(side: Side) -> Side {
    match side {
        Side::Host => Side::Device,
        Side::Device => Side::Host,
    }
}
