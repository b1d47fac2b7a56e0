//! What a step is asked to compute.

use super::sequences::SeqId;

/// Consecutive new tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Whose.
    pub seq: SeqId,
    /// Token ids; they follow what the sequence holds.
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
