//! Whether operations name the memory that they touch: the order of lanes is made from what they name ([`super::super::order`]).

use std::ops::Range;

use super::super::op::{Buffer, Cargo, Kind, Op, Part, Region, RowsOf};
use super::super::placement::Side;
use super::{Walk, flip, side_of, tokens};
use crate::cache::PAGE_TOKENS;

impl Walk<'_> {
    /// Whether the regions that the order of lanes is made from have everything that the operation touches.
    pub(super) fn declared(&self, op: &Op) -> Result<(), String> {
        let (side, b) = (side_of(op), op.sub_batch);
        let rows = |side, what| Buffer::Rows(side, b, what);
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        match op.kind {
            Kind::Embed => writes.push(rows(side, RowsOf::Hidden)),
            Kind::Project { add } | Kind::FfnUp { add } | Kind::Head { add } => {
                reads.push(rows(side, RowsOf::Hidden));
                reads.extend(add.then(|| rows(side, RowsOf::Delta)));
                writes.push(rows(side, RowsOf::Hidden));
                writes.push(rows(
                    side,
                    match op.kind {
                        Kind::Project { .. } => RowsOf::Qkv,
                        Kind::FfnUp { .. } => RowsOf::Act,
                        _ => RowsOf::Logits,
                    },
                ));
                let layer = op.layer.map(|l| &self.placement.layers[l as usize]);
                if matches!(op.kind, Kind::FfnUp { .. }) && layer.is_some_and(|l| l.is_divided()) {
                    writes.push(rows(side, RowsOf::Choices));
                }
            }
            Kind::Append { mailbox, .. } => {
                reads.push(if mailbox { Buffer::MailboxIn(b) } else { rows(side, RowsOf::Qkv) });
            }
            Kind::Publish { .. } => {
                reads.push(rows(side, RowsOf::Qkv));
                writes.push(Buffer::MailboxIn(b));
            }
            Kind::Attend { from_mailbox, to_mailbox, part, .. } => {
                reads.push(if from_mailbox { Buffer::MailboxIn(b) } else { rows(side, RowsOf::Qkv) });
                writes.push(match part {
                    _ if to_mailbox => Buffer::MailboxOut(b),
                    Part::Whole => rows(side, RowsOf::Attn),
                    Part::FromBoundary => rows(side, RowsOf::Partial),
                    Part::UpToBoundary => rows(side, RowsOf::FarPartial),
                });
            }
            Kind::Collect => {
                reads.push(Buffer::MailboxOut(b));
                writes.push(rows(side, RowsOf::Attn));
            }
            Kind::Merge { mailbox } => {
                reads.push(rows(side, RowsOf::Partial));
                reads.push(if mailbox { Buffer::MailboxOut(b) } else { rows(side, RowsOf::FarPartial) });
                writes.push(rows(side, RowsOf::Attn));
            }
            Kind::OutProj => {
                reads.push(rows(side, RowsOf::Attn));
                writes.push(rows(side, RowsOf::Delta));
            }
            Kind::FfnDown => {
                reads.push(rows(side, RowsOf::Act));
                writes.push(rows(side, RowsOf::Delta));
            }
            Kind::Experts => {
                reads.extend([rows(side, RowsOf::Choices), rows(side, RowsOf::Delta)]);
                writes.extend([rows(side, RowsOf::Delta), rows(side, RowsOf::Share)]);
            }
            Kind::AddShare => {
                reads.extend([rows(side, RowsOf::Delta), rows(side, RowsOf::Share)]);
                writes.push(rows(side, RowsOf::Delta));
            }
            Kind::Pick => {
                reads.push(rows(side, RowsOf::Logits));
                writes.push(rows(side, RowsOf::Picked));
            }
            Kind::Carry { cargo, to } => {
                let what = match cargo {
                    Cargo::Hidden { pending } => {
                        reads.extend(pending.map(|_| rows(flip(to), RowsOf::Delta)));
                        RowsOf::Hidden
                    }
                    Cargo::Delta { .. } => RowsOf::Delta,
                    Cargo::Qkv => RowsOf::Qkv,
                    Cargo::Attn => RowsOf::Attn,
                    Cargo::Act => RowsOf::Act,
                    Cargo::Choices => {
                        writes.push(rows(to, RowsOf::Delta));
                        RowsOf::Choices
                    }
                    Cargo::Share => RowsOf::Share,
                };
                reads.push(rows(flip(to), what));
                writes.push(rows(to, what));
            }
            Kind::Stream { slot, .. } => writes.push(Buffer::Weights(slot)),
            Kind::PageOut { .. } | Kind::PageIn { .. } | Kind::Join => {}
        }
        let row_wise =
            |b: &Buffer| matches!(b, Buffer::Rows(..) | Buffer::MailboxIn(_) | Buffer::MailboxOut(_));
        let has = |list: &[Region], buffer: &Buffer| {
            list.iter().any(|r| r.buffer == *buffer && (!row_wise(buffer) || r.span == op.rows))
        };
        if let Some(missing) = reads.iter().find(|b| !has(&op.reads, b)) {
            return Err(format!("does not declare that it reads {missing:?}"));
        }
        if let Some(missing) = writes.iter().find(|b| !has(&op.writes, b)) {
            return Err(format!("does not declare that it writes {missing:?}"));
        }
        match op.kind {
            Kind::Append { staged, .. } => self.names_pages(op, staged, None),
            Kind::Attend { staged, part, .. } => self.names_pages(op, staged, Some(part)),
            _ => Ok(()),
        }
    }

    /// Whether an operation that stores or attends names the pages of its groups: those of staging memory by request, others all
    /// together, and those of requests whose pages move in this step by request as well.
    fn names_pages(&self, op: &Op, staged: Option<u8>, part: Option<Part>) -> Result<(), String> {
        let (side, layer) = (side_of(op), self.layer(op)?);
        let list = if part.is_some() { &op.reads } else { &op.writes };
        let here = layer..layer + 1;
        let groups = Buffer::GroupPages(side, op.sub_batch);
        let together = |r: &Region| r.buffer == groups && r.layers == here && r.span == op.groups;
        if staged.is_none() && !op.groups.is_empty() && !list.iter().any(together) {
            return Err(format!("does not declare the pages of its groups: {groups:?}"));
        }
        let rows = &self.rows[op.sub_batch as usize];
        let places = rows.runs().iter().filter(|run| run.is_own());
        for run in places.filter(|run| op.groups.contains(&run.groups.start)) {
            let group = rows.group(run);
            let moves = |(at, layers): &(Side, Range<u32>)| *at == side && layers.contains(&layer);
            let (buffer, layers) = match staged {
                Some(slot) => (Buffer::StagedPages(slot, group.request), 0..1),
                None if self.moved.get(&group.request).is_some_and(|all| all.iter().any(moves)) => {
                    (Buffer::Pages(side, group.request), here.clone())
                }
                None => continue,
            };
            let window = self.placement.window(layer as usize);
            let (first, end) =
                part.map_or((group.first, group.end()), |part| tokens::attended(group, part, window));
            let page = PAGE_TOKENS as u32;
            let named = |r: &Region| {
                let all = r.span.start <= first / page && end.div_ceil(page) <= r.span.end;
                r.buffer == buffer && r.layers == layers && (first >= end || all)
            };
            if !list.iter().any(named) {
                return Err(format!("does not declare the pages of {:?}", group.request));
            }
        }
        Ok(())
    }
}
