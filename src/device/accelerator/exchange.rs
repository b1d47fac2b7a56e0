//! What crosses between accelerator and host within a step: rows, and attention in parts.

use std::sync::Arc;

use super::shape::Shape;
use crate::device::runtime::{DevPtr, Pinned};

/// Rows that cross to the host and back in mapped pinned memory: queries, keys and values one way, attention
/// outputs the other.
///
/// layout: 64 bytes that begin with a u32, the epoch of the rows there; `rows` times q|k|v (f32 `[qkv_dim]`, biases,
/// norms and RoPE applied), in the order of the step's rows attended elsewhere; `rows` times o (f32 `[q_dim]`).
#[derive(Clone)]
pub struct Mailbox {
    /// The memory.
    pub memory: Arc<dyn Pinned>,
    /// Rows it has room for.
    pub rows: usize,
}

impl Mailbox {
    /// Bytes before the rows.
    pub const HEADER: usize = 64;

    /// Bytes of a mailbox for `rows` rows.
    pub fn bytes(shape: &Shape, rows: usize) -> usize {
        Mailbox::HEADER + rows * 4 * (shape.qkv_dim() + shape.q_dim())
    }

    /// Byte offset of q|k|v of row `row`.
    pub fn row_at(&self, shape: &Shape, row: usize) -> usize {
        Mailbox::HEADER + row * 4 * shape.qkv_dim()
    }

    /// Byte offset of o of row `row`.
    pub fn out_at(&self, shape: &Shape, row: usize) -> usize {
        self.row_at(shape, self.rows) + row * 4 * shape.q_dim()
    }
}

/// Where rows attended elsewhere are published, and as which epoch.
#[derive(Clone, Copy)]
pub struct Publish<'a> {
    /// Where.
    pub mailbox: &'a Mailbox,
    /// The mailbox's epoch becomes [`StepDesc::epoch`](super::StepDesc::epoch) plus this once all rows are there;
    /// the host polls it with acquire.
    pub epoch_add: u32,
}

/// Partial attention of some rows (f32, natural-log units): see [`crate::simd::attention::Partial`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PartialRows {
    /// `[rows][n_heads]`: largest scores.
    pub m: DevPtr,
    /// `[rows][n_heads]`: sums of exponentials.
    pub s: DevPtr,
    /// `[rows][q_dim]`: weighted values.
    pub o: DevPtr,
}
