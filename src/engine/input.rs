//! The input of a step.

use super::kv::Swap;
use super::seq_id::SeqId;
use crate::program::Flow;

/// Consecutive new tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The sequence that the tokens belong to.
    pub seq: SeqId,
    /// Token ids, appended after those that the sequence holds.
    pub tokens: &'a [u32],
    /// Which of these rows need logits.
    pub logits: Logits,
}

/// Which rows need logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// None (a chunk in the middle of a prompt).
    None,
    /// The last.
    Last,
    /// All (perplexity).
    All,
}

/// How a step's inputs are computed together.
#[derive(Debug, Clone, Copy)]
pub struct StepPlan<'a> {
    /// The sub-batch of each input; `None`: all in one.
    pub split: Option<&'a [u8]>,
    /// How sub-batches share the lanes. In lock step ([`Flow::TwoLanes`]) the CPU attends the rows of one while the
    /// device computes those of the other.
    pub flow: Flow,
    /// Sequences that change sides: those in the step before their rows are computed, others during the step.
    pub swaps: &'a [Swap],
}

impl StepPlan<'static> {
    /// One sub-batch; no sequence changes sides.
    pub const ONE: StepPlan<'static> = StepPlan { split: None, flow: Flow::Serial, swaps: &[] };
}
