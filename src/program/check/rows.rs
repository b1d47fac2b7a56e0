//! Rows that are in the same state are followed together: neighbouring groups that go the same way, until an operation tells
//! them apart.
//!
//! Operations name whole groups, and of these all rows or those that want logits. So all rows of neighbours with the same phase, side
//! and wants have the same values at any time, but for the two kinds; a run of such groups is one entry, and is cut where an
//! operation begins or ends within it. What is verified is every row, in as many steps as there are runs.

use std::ops::Range;

use super::tokens::{self, Cells};
use crate::program::iteration::{Group, Kv, SubBatch};
use crate::program::op::Part;
use crate::program::placement::{Phase, Side};

/// The values of a row on one side. Values of the residual stream are counted by the sublayers added: 2l before block l,
/// 2l + 1 between its halves.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SideRow {
    pub hidden: Option<u32>,
    /// With delta added, hidden has this value.
    pub delta: Option<u32>,
    pub qkv: Option<u32>,
    pub attn: Option<u32>,
    pub partial: Option<u32>,
    pub far: Option<u32>,
    pub act: Option<u32>,
    /// Of a layer whose experts are divided: what they are chosen by, what the device's give, what the host's do.
    pub choices: Option<u32>,
    pub own: Option<u32>,
    pub share: Option<u32>,
    pub logits: bool,
    pub picked: bool,
}

/// What the mailbox holds of a row.
#[derive(Clone, Copy, Default)]
pub(super) struct MailState {
    pub qkv: Option<(u32, bool)>,
    pub out: Option<(u32, Part)>,
}

/// A row's values, on each side and between them.
#[derive(Clone, Copy, Default)]
pub(super) struct RowState {
    pub rows: [SideRow; 2],
    pub mail: MailState,
}

/// What neighbours have in common that are followed together.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Like {
    phase: Phase,
    kv: KvHome,
    /// Whether there are rows without logits, and with.
    rows: [bool; 2],
    cells: Cells,
    /// Its tokens are followed by number.
    own: bool,
}

/// The kind of a [`Kv`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum KvHome {
    Device,
    Host,
    Split,
}

/// See the [module](self).
#[derive(Clone)]
pub(super) struct Run {
    pub groups: Range<u32>,
    /// Rows of all groups.
    pub rows: Range<u32>,
    /// From the first row that wants logits to the last.
    pub wanted: Range<u32>,
    like: Like,
    /// States of rows without logits, and of rows with.
    states: [RowState; 2],
    /// By layer and side, which of its tokens are stored, unless they are followed by number.
    pub stored: Vec<[u8; 2]>,
}

impl Run {
    pub fn phase(&self) -> Phase {
        self.like.phase
    }

    pub fn home(&self) -> KvHome {
        self.like.kv
    }

    pub fn cells(&self) -> Cells {
        self.like.cells
    }

    /// Whether its tokens are followed by number: then it is one group.
    pub fn is_own(&self) -> bool {
        self.like.own
    }

    /// Whether rows want logits.
    pub fn wants(&self) -> bool {
        self.like.rows[1]
    }

    /// The rows that count: one of each kind, with its number.
    pub fn live(&mut self, wanted_only: bool) -> impl Iterator<Item = (u32, &mut RowState)> {
        let (some, first) = (self.like.rows, [self.rows.start, self.wanted.start]);
        let kinds = self.states.iter_mut().enumerate();
        kinds
            .filter(move |(kind, _)| some[*kind] && (*kind == 1 || !wanted_only))
            .map(move |(kind, state)| (first[kind], state))
    }

    /// The same, to be looked at.
    pub fn states(&self, wanted_only: bool) -> impl Iterator<Item = (u32, &RowState)> {
        let first = [self.rows.start, self.wanted.start];
        let kinds = self.states.iter().enumerate();
        kinds
            .filter(move |(kind, _)| self.like.rows[*kind] && (*kind == 1 || !wanted_only))
            .map(move |(kind, state)| (first[kind], state))
    }
}

/// The rows of a sub-batch.
pub(super) struct BatchRows<'a> {
    pub groups: &'a [Group],
    /// The first row of each group, and how many there are.
    starts: Vec<u32>,
    runs: Vec<Run>,
}

impl<'a> BatchRows<'a> {
    /// For a model with this many layers and these windows; `own` names the requests whose tokens are followed by number.
    pub fn new(
        batch: &'a SubBatch,
        layers: usize,
        windows: &[Option<u32>],
        own: impl Fn(u32, &Group) -> bool,
    ) -> BatchRows<'a> {
        let mut starts = Vec::with_capacity(batch.groups.len() + 1);
        let mut runs: Vec<Run> = Vec::new();
        let mut row = 0;
        for (at, group) in (0u32..).zip(&batch.groups) {
            starts.push(row);
            let kv = match group.kv {
                Kv::Device => KvHome::Device,
                Kv::Host => KvHome::Host,
                Kv::Split { .. } => KvHome::Split,
            };
            let cells = Cells::of(group, windows);
            let (cells, own) = match cells {
                Some(cells) => (cells, own(at, group)),
                None => (Cells::default(), true),
            };
            let wanted = group.wanted().min(group.tokens);
            let rows = [wanted < group.tokens, wanted > 0];
            let like = Like { phase: group.phase, kv, rows, cells, own };
            let (begin, end) = (row, row + group.tokens);
            match runs.last_mut() {
                Some(run) if run.like == like && !own => {
                    (run.groups.end, run.rows.end) = (at + 1, end);
                    run.wanted.end = end;
                }
                _ => runs.push(Run {
                    groups: at..at + 1,
                    rows: begin..end,
                    wanted: end - wanted..end,
                    like,
                    states: Default::default(),
                    stored: if own { Vec::new() } else { vec![[0; 2]; layers] },
                }),
            }
            row = end;
        }
        starts.push(row);
        BatchRows { groups: &batch.groups, starts, runs }
    }

    /// The runs of the batch, in the order of its rows.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// All of them, to be changed.
    pub fn runs_mut(&mut self) -> &mut [Run] {
        &mut self.runs
    }

    /// The runs of these groups.
    ///
    /// # Errors
    /// There are no such groups.
    pub fn of(&mut self, groups: &Range<u32>) -> Result<Range<usize>, String> {
        if groups.start > groups.end || groups.end as usize > self.groups.len() {
            return Err(format!("groups {groups:?} of {}", self.groups.len()));
        }
        if groups.is_empty() {
            return Ok(0..0);
        }
        self.cut(groups.start);
        self.cut(groups.end);
        let first = self.runs.partition_point(|run| run.groups.end <= groups.start);
        let last = self.runs.partition_point(|run| run.groups.start < groups.end);
        Ok(first..last)
    }

    /// A run begins with group `at`.
    fn cut(&mut self, at: u32) {
        let place = self.runs.partition_point(|run| run.groups.end <= at);
        let Some(run) = self.runs.get_mut(place).filter(|run| run.groups.start < at) else { return };
        let mut behind = run.clone();
        let row = self.starts[at as usize];
        (run.groups.end, behind.groups.start) = (at, at);
        (run.rows.end, behind.rows.start) = (row, row);
        run.wanted.end = row;
        let first = &self.groups[at as usize];
        behind.wanted.start = row + first.tokens - first.wanted().min(first.tokens);
        self.runs.insert(place + 1, behind);
    }

    /// The group of a run whose tokens are followed by number.
    pub fn group(&self, run: &Run) -> &'a Group {
        &self.groups[run.groups.start as usize]
    }

    /// Puts what earlier steps have stored into runs whose tokens are not followed by number; `kv_on_host` says of which layers
    /// all keys and values are on the host.
    pub fn stored_before(&mut self, kv_on_host: impl Fn(usize) -> bool) {
        for run in self.runs.iter_mut().filter(|run| !run.like.own) {
            for (layer, stored) in run.stored.iter_mut().enumerate() {
                let (host, device) = match (kv_on_host(layer), run.like.kv) {
                    (true, _) | (_, KvHome::Host) => (tokens::FAR | tokens::NEAR, 0),
                    (_, KvHome::Device) => (0, tokens::FAR | tokens::NEAR),
                    (_, KvHome::Split) => (tokens::FAR, tokens::NEAR),
                };
                stored[Side::Host as usize] = host;
                stored[Side::Device as usize] = device;
            }
        }
    }
}
