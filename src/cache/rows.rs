//! The rows of a step that belong to a sequence.

/// `n_rows` consecutive tokens of one sequence in a step: decode has one, a prefill chunk many.
#[derive(Debug, Clone, Copy)]
pub struct SeqRows<'a> {
    /// The sequence's pages, in order of position ([`super::BlockTable::pages`]).
    pub pages: &'a [u32],
    /// Position of the first of these tokens.
    pub first_pos: usize,
    /// Number of tokens.
    pub n_rows: usize,
    /// Row of the first one in the step's activations (q, k, v, out); the others follow it.
    pub row0: usize,
}
