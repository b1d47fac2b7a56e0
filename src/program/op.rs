//! A program: operations in the order in which they are issued, with what each reads and writes.
//!
//! Events are not part of it: which operation waits for which follows from regions ([`super::order`]).

use std::ops::Range;

use serde::Serialize;

use super::iteration::{Flow, RequestId};
use super::placement::{Side, Sublayer};
use super::unit::Unit;

/// Which of a sequence's tokens an attention covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// All that the row may see.
    Whole,
    /// Those from the group's boundary on; the result is partial (m, s, o).
    FromBoundary,
    /// Those before the group's boundary; the result is partial.
    UpToBoundary,
}

/// What a transfer of rows between the sides carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cargo {
    /// The residual stream, f32 `[d]` a row: with what is still to be added to it, if `pending` names the
    /// sublayer that made it.
    Hidden {
        /// [`Sublayer::Out`] or [`Sublayer::Down`] of the operation's layer.
        pending: Option<Sublayer>,
    },
    /// The last sublayer's output alone, f32 `[d]` a row.
    Delta {
        /// [`Sublayer::Out`] or [`Sublayer::Down`] of the operation's layer.
        of: Sublayer,
    },
    /// Queries, keys and values, after norms and RoPE.
    Qkv,
    /// The output of attention.
    Attn,
    /// The activations between the matrices of the feed-forward.
    Act,
    /// What the host needs to compute its experts: normed rows, their choices and the weights of these.
    Choices,
    /// What the host's experts give.
    Share,
}

/// What an operation does. Sides of computations follow from [`Op::unit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// hidden = embedding of the tokens.
    Embed,
    /// hidden += delta (if `add`); q, k, v = projections of norm(hidden), head norms, RoPE.
    Project {
        /// Whether the last sublayer's output is still to be added.
        add: bool,
    },
    /// Keys and values of rows into the pages of that side.
    Append {
        /// On the host: they come from the mailbox.
        mailbox: bool,
        /// On the device: the slot of staging memory that they go to, instead of the pages.
        staged: Option<u8>,
    },
    /// Queries (and, unless `queries_only`, keys and values) of rows to the mailbox.
    Publish {
        /// The keys and values stay on the device.
        queries_only: bool,
    },
    /// Attention of rows over pages of that side.
    Attend {
        /// Which tokens.
        part: Part,
        /// On the host: queries come from the mailbox.
        from_mailbox: bool,
        /// On the host: results go to the mailbox.
        to_mailbox: bool,
        /// On the device: the slot of staging memory with the pages.
        staged: Option<u8>,
    },
    /// attn = the mailbox's results.
    Collect,
    /// attn = the device's partial results over the tokens from the boundary on, merged with those before it.
    Merge {
        /// The latter come from the mailbox (else the device made them, over staged pages).
        mailbox: bool,
    },
    /// delta = output projection of attn.
    OutProj,
    /// hidden += delta (if `add`); act = activation of the first matrices times norm(hidden). Of a block whose experts are divided: the
    /// choice of experts, and no more.
    FfnUp {
        /// Whether the last sublayer's output is still to be added.
        add: bool,
    },
    /// delta = last matrix of the feed-forward times act; of a block whose experts are divided, all of what the device's give.
    FfnDown,
    /// On the host, of a block whose experts are divided: share = what the chosen ones of the host's give.
    Experts,
    /// delta += share.
    AddShare,
    /// Logits of the rows that want them, of norm(hidden + delta (if `add`)).
    Head {
        /// Whether the last sublayer's output is still to be added.
        add: bool,
    },
    /// The likeliest token of each row with logits.
    Pick,
    /// Rows to the other side.
    Carry {
        /// What of them.
        cargo: Cargo,
        /// The side they arrive at.
        to: Side,
    },
    /// The cohort's attention of the layer is looked for, just when this is issued: if it is done, the cohort's operations behind
    /// this one are carried out, if not, none of them is and the cohort stays parked (APEX §4). Nobody waits.
    Join,
    /// A layer's weights to a staging buffer.
    Stream {
        /// Which buffer.
        slot: u8,
        /// Whether these are its feed-forward's alone ([`Residence::StreamedExperts`](super::Residence)).
        experts: bool,
    },
    /// Pages of a request to the host: of all layers of the device, or of one layer from staging memory.
    PageOut {
        /// The slot of staging memory that they come from.
        staged: Option<u8>,
    },
    /// Pages of a request to the device: of all its layers, or of one layer to staging memory.
    PageIn {
        /// The slot of staging memory that they go to.
        staged: Option<u8>,
    },
}

impl Kind {
    /// The name of the operation in messages, tables and timelines.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Embed => "embed",
            Kind::Project { .. } => "project",
            Kind::Append { .. } => "append",
            Kind::Publish { .. } => "publish",
            Kind::Attend { .. } => "attend",
            Kind::Collect => "collect",
            Kind::Merge { .. } => "merge",
            Kind::OutProj => "out_proj",
            Kind::FfnUp { .. } => "ffn_up",
            Kind::FfnDown => "ffn_down",
            Kind::Experts => "experts",
            Kind::AddShare => "add_share",
            Kind::Head { .. } => "head",
            Kind::Pick => "pick",
            Kind::Carry { .. } => "carry",
            Kind::Join => "join",
            Kind::Stream { .. } => "stream",
            Kind::PageOut { .. } => "page_out",
            Kind::PageIn { .. } => "page_in",
        }
    }

    /// The sublayer with whose weights it multiplies.
    pub const fn product(self) -> Option<Sublayer> {
        match self {
            Kind::Project { .. } => Some(Sublayer::Qkv),
            Kind::OutProj => Some(Sublayer::Out),
            Kind::FfnUp { .. } => Some(Sublayer::Up),
            Kind::FfnDown | Kind::Experts => Some(Sublayer::Down),
            _ => None,
        }
    }
}

/// Rows of a sub-batch on one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowsOf {
    /// The residual stream.
    Hidden,
    /// The last sublayer's output.
    Delta,
    /// Queries, keys and values.
    Qkv,
    /// The output of attention.
    Attn,
    /// Partial attention over the tokens from the boundary on.
    Partial,
    /// Partial attention over the tokens before the boundary.
    FarPartial,
    /// Activations between the matrices of the feed-forward.
    Act,
    /// Normed rows, their choices of experts and the weights of these.
    Choices,
    /// What the host's experts give.
    Share,
    /// Logits of the rows that want them.
    Logits,
    /// Their likeliest tokens.
    Picked,
}

/// Memory that operations share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Buffer {
    /// Rows of a sub-batch; the span is of rows.
    Rows(Side, u8, RowsOf),
    /// q, k and v on the way to the host; the span is of rows of the sub-batch.
    MailboxIn(u8),
    /// Attention results on the way to the device; the span is of rows of the sub-batch.
    MailboxOut(u8),
    /// Pages on a side of all groups of a sub-batch; the span is of groups. Where pages of one of their requests move
    /// in the same step, [`Buffer::Pages`] says in addition which of its pages are meant.
    GroupPages(Side, u8),
    /// A request's pages on a side; the span is of page numbers within the sequence.
    Pages(Side, RequestId),
    /// Staging memory of a layer's weights; the span is the whole.
    Weights(u8),
    /// Staging memory of a layer's pages: slot and request; the span is of page numbers within the sequence.
    StagedPages(u8, RequestId),
}

/// A part of a buffer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Region {
    /// The buffer.
    pub buffer: Buffer,
    /// Layers, for pages; 0..1 for the rest.
    pub layers: Range<u32>,
    /// Rows or pages: see [`Buffer`].
    pub span: Range<u32>,
}

impl Region {
    /// Whether both have memory in common.
    pub fn overlaps(&self, other: &Region) -> bool {
        let meet = |a: &Range<u32>, b: &Range<u32>| a.start < b.end && b.start < a.end;
        self.buffer == other.buffer && meet(&self.layers, &other.layers) && meet(&self.span, &other.span)
    }
}

/// How much there is to do: what a cost model needs beside kind, unit and layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Work {
    /// Rows computed or moved.
    pub rows: u64,
    /// For attention, tokens whose keys and values are read, over all sequences.
    pub kv_tokens: u64,
    /// For attention, pairs of a row and a token.
    pub pairs: u64,
    /// For page moves, pages, counted per layer.
    pub pages: u64,
    /// For the feed-forward of a block whose experts are divided, how many the device has
    /// ([`LayerPlacement::device_experts`](super::LayerPlacement)); else 0.
    pub device_experts: u16,
}

/// An operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Op {
    /// What is done.
    pub kind: Kind,
    /// The unit that runs it.
    pub unit: Unit,
    /// The block; embedding and head have none. A transfer names the layer whose value it carries.
    pub layer: Option<u32>,
    /// Its sub-batch.
    pub sub_batch: u8,
    /// Its rows.
    pub rows: Range<u32>,
    /// Its groups (page moves: the one group or none).
    pub groups: Range<u32>,
    /// Only rows whose logits are wanted are computed: no later layer reads the others.
    pub wanted_only: bool,
    /// The end of the iteration does not wait for it: the host's attention of a cohort's next layer, and the layers that it computes
    /// behind it.
    pub detached: bool,
    /// What it computes and moves, for its price.
    pub work: Work,
    /// Memory it reads.
    pub reads: Vec<Region>,
    /// Memory it writes.
    pub writes: Vec<Region>,
}

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Program {
    /// In the order of issue.
    pub ops: Vec<Op>,
    /// The iteration's flow.
    pub flow: Flow,
}

impl Program {
    /// Whether the operation is of a cohort: [`Flow::Async`].
    pub fn is_of_cohort(&self, op: &Op) -> bool {
        self.flow == Flow::Async && op.sub_batch > 0
    }

    /// Whether every operation is on the host's workers (or every one on the device's compute lane): such a program
    /// runs as one segment.
    pub fn one_unit(&self) -> Option<Unit> {
        let first = self.ops.first()?.unit;
        self.ops.iter().all(|op| op.unit == first).then_some(first)
    }
}
