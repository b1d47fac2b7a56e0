//! A sub-batch of a step, and the rows of its groups.

use crate::cache::KvGeometry;
use crate::engine::host::HostSeq;
use crate::engine::kv::SequenceKv;
use crate::program::{Far, Group, Iteration, Kv, Phase, Wants};
use crate::{Error, Result};

/// Data of an iteration's group that the machine needs in addition to the group itself.
#[derive(Clone, Copy)]
pub(in crate::engine) struct GroupRows<'a> {
    /// The group's tokens, one per row.
    pub tokens: &'a [u32],
    /// The sequence's pages, with room for the new tokens.
    pub table: &'a SequenceKv,
    /// First row of the group's logits (or tokens) among all that were requested of the step.
    pub out: usize,
}

/// A sub-batch of a step.
pub(super) struct Part<'a> {
    pub groups: &'a [Group],
    pub rows: &'a [GroupRows<'a>],
    /// Tokens of all groups, in order.
    pub tokens: Vec<u32>,
    /// Rows that want logits, ascending.
    pub wanted: Vec<usize>,
    /// The destination row of the logits of each of them.
    pub places: Vec<usize>,
    /// For each group, its pages in the staging memory of layers with keys and values on the device, from token 0 on.
    pub staged: Vec<Vec<u32>>,
}

/// Pages of staging memory that a group uses.
fn staged_pages(group: &Group) -> usize {
    let tokens = match (group.kv, group.phase) {
        (Kv::Split { boundary, far: Far::Stream }, _) => boundary,
        (Kv::Host, Phase::Prefill) => group.end(),
        _ => 0,
    };
    KvGeometry::pages_for(tokens as usize)
}

impl<'a> Part<'a> {
    /// The sub-batches of an iteration; `rows` are those of all groups, in the order of the sub-batches.
    ///
    /// # Errors
    /// If the rows do not belong to the groups.
    pub fn of(iteration: &'a Iteration, mut rows: &'a [GroupRows<'a>]) -> Result<Vec<Part<'a>>> {
        let mut parts = Vec::with_capacity(iteration.sub_batches.len());
        let mut staged = 0;
        for batch in &iteration.sub_batches {
            let groups = batch.groups.as_slice();
            let fits = |(g, r): (&Group, &GroupRows<'_>)| g.tokens as usize == r.tokens.len() && g.tokens > 0;
            if rows.len() < groups.len() || !groups.iter().zip(rows).all(fits) {
                return Err(Error::usage("the tokens of a step are not those of its groups"));
            }
            let own;
            (own, rows) = rows.split_at(groups.len());
            let mut part = Part {
                groups,
                rows: own,
                tokens: own.iter().flat_map(|r| r.tokens).copied().collect(),
                wanted: Vec::new(),
                places: Vec::new(),
                staged: Vec::with_capacity(groups.len()),
            };
            let mut row = 0;
            for (group, rows) in groups.iter().zip(own) {
                let end = row + group.tokens as usize;
                let wanted = match group.wants {
                    Wants::Nothing => end..end,
                    Wants::Last => end - 1..end,
                    Wants::All => row..end,
                };
                part.places.extend(rows.out..rows.out + wanted.len());
                part.wanted.extend(wanted);
                let pages = staged_pages(group) as u32;
                part.staged.push((staged..staged + pages).collect());
                staged += pages;
                row = end;
            }
            parts.push(part);
        }
        match rows {
            [] => Ok(parts),
            _ => Err(Error::usage("a step has tokens of more groups than there are")),
        }
    }

    /// The sequences for the host: in layers with keys and values on the host, or (`far`) over pages away from the
    /// device.
    pub fn host_sequences(&self, far: bool) -> Vec<HostSeq<'a>> {
        let sequence = |(g, r): (&Group, &GroupRows<'a>)| HostSeq {
            pages: if far { r.table.far_pages() } else { r.table.host_pages() },
            first_pos: g.first as usize,
            n_rows: g.tokens as usize,
            tokens: match g.kv {
                Kv::Split { boundary, .. } if far => 0..boundary as usize,
                Kv::Device if far => 0..0,
                _ => HostSeq::ALL,
            },
        };
        self.groups.iter().zip(self.rows).map(sequence).collect()
    }

    /// For each group, the number of tokens whose pages are away from the device, in layers with keys and values there.
    pub fn boundaries(&self) -> Vec<usize> {
        let of = |g: &Group| match g.kv {
            Kv::Split { boundary, .. } => boundary as usize,
            _ => 0,
        };
        self.groups.iter().map(of).collect()
    }

    /// Whether the host attends pages away from the device.
    pub fn is_far(&self) -> bool {
        self.groups.iter().any(|g| g.kv != Kv::Device)
    }
}
