//! Which rows are computed now, in which sub-batches, and which pages move: made at every step by a scheduler.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::placement::{Phase, Side};

/// A request: a slot, and how often the slot has been given out. A late message about an earlier request of the same
/// slot names a generation that is gone, and is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestId {
    /// The slot.
    pub slot: u32,
    /// Requests that had the slot before.
    pub generation: u32,
}

/// How the pages of a sequence's beginning that were moved to the host are attended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Far {
    /// On the host, in place; the partial results are merged with the device's (split attention).
    Attend,
    /// On the device, from pages copied to staging memory (streaming attention, HELM §4).
    Stream,
}

/// Where a sequence's keys and values are, in the layers whose [`LayerPlacement::kv`](super::LayerPlacement::kv) is the
/// device. In the other layers they are on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kv {
    /// All on the device.
    Device,
    /// All on the host.
    Host,
    /// The tokens before `boundary` on the host, the rest (new ones too) on the device.
    Split {
        /// First token on the device: a multiple of the page, at most the first new token's position.
        boundary: u32,
        /// How the tokens before it are attended.
        far: Far,
    },
}

/// Which rows of a group want logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wants {
    /// None (a chunk in the middle of a prompt).
    Nothing,
    /// The last.
    Last,
    /// All (perplexity).
    All,
}

/// Consecutive new tokens of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The request that the tokens belong to.
    pub request: RequestId,
    /// Prompt rows, or a decode row.
    pub phase: Phase,
    /// Position of the first: the tokens stored before.
    pub first: u32,
    /// How many, at least 1.
    pub tokens: u32,
    /// Where its keys and values are.
    pub kv: Kv,
    /// Rows with logits.
    pub wants: Wants,
}

impl Group {
    /// Position after the last token.
    pub fn end(&self) -> u32 {
        self.first + self.tokens
    }

    /// Rows that want logits.
    pub fn wanted(&self) -> u32 {
        match self.wants {
            Wants::Nothing => 0,
            Wants::Last => 1,
            Wants::All => self.tokens,
        }
    }
}

/// Groups computed together: row i of the sub-batch is the i-th token of all groups.
///
/// Groups with the same [`Phase`] and the same kind of [`Kv`] should be neighbours (prompts to the host, prompts on the
/// device, decode on the device, decode on the host): neighbours are computed by one operation where the placement lets them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SubBatch {
    /// In the order of their rows.
    pub groups: Vec<Group>,
    /// With [`Flow::Async`], of a cohort: its rows are parked with attention of this layer under way. `None`: they begin
    /// with their token's embedding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<u32>,
}

impl From<Vec<Group>> for SubBatch {
    fn from(groups: Vec<Group>) -> SubBatch {
        SubBatch::of(groups)
    }
}

impl SubBatch {
    /// Rows that begin with the embedding.
    pub fn of(groups: Vec<Group>) -> SubBatch {
        SubBatch { groups, at: None }
    }

    /// A cohort whose attention of layer `at` is under way on the host ([`Flow::Async`]).
    pub fn parked(groups: Vec<Group>, at: u32) -> SubBatch {
        SubBatch { groups, at: Some(at) }
    }

    /// Rows of all groups.
    pub fn rows(&self) -> u32 {
        self.groups.iter().map(|g| g.tokens).sum()
    }

    /// Each group with its rows.
    pub fn with_rows(&self) -> impl Iterator<Item = (&Group, Range<u32>)> {
        let mut row = 0;
        self.groups.iter().map(move |g| {
            row += g.tokens;
            (g, row - g.tokens..row)
        })
    }
}

/// Whole pages of a request that change sides, in all layers with keys and values on the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRequest {
    /// The request whose pages move.
    pub request: RequestId,
    /// The side they are on afterwards.
    pub to: Side,
    /// Which of its pages, by position in the sequence.
    pub pages: Range<u32>,
}

/// How sub-batches share the lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Flow {
    /// One sub-batch after the other.
    #[default]
    Serial,
    /// Two sub-batches in lock step: the host attends one while the device computes the other (NEO §3).
    TwoLanes,
    /// The first sub-batch flows through the device. Each further one is a cohort of decode rows with keys and values on the host: it
    /// advances by one layer an iteration if its attention on the host is done when the device comes to that layer, and
    /// stays parked if not; the device never waits (APEX §4).
    Async,
}

/// What one step computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iteration {
    /// One, or two with [`Flow::TwoLanes`]. With [`Flow::Async`] the device's rows, which may be none, and the cohorts.
    pub sub_batches: Vec<SubBatch>,
    /// Moves of pages. Those of requests in this iteration are done before their groups' operations: a group's
    /// [`Kv`] says where its pages are after them.
    pub moves: Vec<MoveRequest>,
    /// How sub-batches share the lanes.
    pub flow: Flow,
    /// Whether each row that wants logits is reduced to its likeliest token.
    pub pick: bool,
    /// Without `pick`: whether logits stay on a device that computes them, and what sampling needs of each row comes back.
    #[serde(default)]
    pub top: bool,
}

impl Iteration {
    /// One sub-batch, nothing moved.
    pub fn serial(groups: Vec<Group>, pick: bool) -> Iteration {
        Iteration {
            sub_batches: vec![groups.into()],
            moves: Vec::new(),
            flow: Flow::Serial,
            pick,
            top: false,
        }
    }

    /// Rows of prompts.
    pub fn prompt_rows(&self) -> u64 {
        let groups = self.sub_batches.iter().flat_map(|b| &b.groups);
        groups.filter(|g| g.phase == Phase::Prefill).map(|g| u64::from(g.tokens)).sum()
    }

    /// The sub-batches that are cohorts, with their numbers.
    pub fn cohorts(&self) -> impl Iterator<Item = (u8, &SubBatch)> {
        let cohorts = (0u8..).zip(&self.sub_batches).skip(1);
        cohorts.filter(|(_, batch)| self.flow == Flow::Async && !batch.groups.is_empty())
    }
}
