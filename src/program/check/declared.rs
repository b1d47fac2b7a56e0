//! Whether operations name the memory that they touch: the order of lanes is made from what they name ([`super::super::order`]).

use super::super::op::{Buffer, Cargo, Kind, Op, Part, Region, RowsOf};
use super::{Walk, flip, side_of};

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
                };
                reads.push(rows(flip(to), what));
                writes.push(rows(to, what));
            }
            Kind::Stream { slot } => writes.push(Buffer::Weights(slot)),
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
        if let Kind::Append { .. } | Kind::Attend { .. } = op.kind {
            let list = if matches!(op.kind, Kind::Append { .. }) { &op.writes } else { &op.reads };
            for (group, _) in self.groups(op) {
                let named = |r: &Region| matches!(r.buffer, Buffer::Pages(_, q) | Buffer::StagedPages(_, q) if q == group.request);
                if !list.iter().any(named) {
                    return Err(format!("does not declare the pages of {:?}", group.request));
                }
            }
        }
        Ok(())
    }
}
