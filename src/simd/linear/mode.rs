//! The promise that a product makes about its bits.

/// Whether results may depend, in their last bits, on how many rows are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The fastest kernel for each M.
    #[default]
    Fast,
    /// The same kernel, in the same order, for every M.
    Deterministic,
}
