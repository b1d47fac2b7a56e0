//! A small program and its priced operations.

use crate::program::Program;

/// A small program.
pub(super) struct Run {
    pub program: Program,
    pub waits: Vec<Vec<usize>>,
    /// For each operation, its place in [`Template::ops`](super::shape::Template::ops).
    pub priced: Vec<usize>,
}
