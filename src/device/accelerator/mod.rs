//! The accelerator contract: coarse sublayer operations on rows of a workspace.
//!
//! An [`Accelerator`] is a [`Runtime`] (memory, lanes, events) plus what a transformer needs of it. The engine
//! sizes and allocates all memory up front, describes a step once ([`Accelerator::prepare`]), and then
//! enqueues sublayers layer by layer. Nothing here waits: an operation is in flight when its call returns.
//!
//! ```text
//! embed ─► project ─► append ─► attend ─► out_proj ─► ffn_up ─► ffn_down ─► … ─► logits ─► argmax
//!             └─► publish ┄┄ host ┄┄► collect, merge     (rows whose attention is computed elsewhere, in full or in part)
//! ```
//!
//! Every operation ([`RowOp`]) is enqueued for a range of the step's rows, so that rows of one step may be computed in different
//! places and at different times. A sub-batch that runs concurrently with another has its own step and workspace
//! ([`SubBatches`]). Weights and KV pages are addresses: a layer may sit anywhere in the device's memory, a staging
//! buffer included, and rows may append to (and attend over) any pages, a layer's or a staging area's.
//!
//! Every operation on a row gives the same bits whatever other rows are in the batch, as long as
//! [`Accelerator::row_bucket`] of the number of rows is the same, and whether [`RowOp::Qkv`] computed it or
//! its parts one by one.
//!
//! A step or call that exceeds what was planned returns [`crate::Error::Capacity`], one that contradicts itself
//! [`crate::Error::Usage`]; in both cases the call has enqueued nothing.
//!
//! Formats: the residual stream, what is added to it, q|k|v and logits are f32; normed activations are [`Half`] (`act`);
//! queries, keys and values as attention reads them are [`Half`] (`kv`). Pages are
//! `[page][kv_head][K, V][32 tokens][head_dim]` per layer.
//!
//! This file defines the trait. Each of its argument types has a file: `op`, `shape`, `weights`, `workspace`, `desc`, `step`
//! and `rows`, `exchange`.

mod desc;
mod exchange;
mod experts;
mod op;
mod rows;
mod shape;
mod step;
mod top;
mod weights;
mod workspace;

use std::ops::Range;
use std::sync::Arc;

pub use self::desc::{Attend, StepDesc, StepSeq};
pub use self::exchange::{LayerPages, Mailbox, PageMove, Publish, Published};
pub use self::experts::ExpertRows;
pub use self::op::RowOp;
pub use self::rows::StepRows;
pub use self::shape::{ExpertShape, Limits, Shape};
pub use self::step::{Step, StepContext};
pub(crate) use self::top::write_top;
pub use self::top::{TOP_BYTES, TOP_K, top_error, top_of};
pub use self::weights::{
    AttnTables, EmbedWeight, ExpertWeights, FeedForward, FfnWeights, LayerWeights, LinearSource,
    LinearWeight, NO_SLOT, NormWeight, UpWeight,
};
pub use self::workspace::{PartialRows, Residual, RowBytes, RowSpan, SubBatch, SubBatches, Workspace};
use super::runtime::{DevPtr, Lane, Runtime};
use crate::Result;
use crate::host::Pool;
use crate::tensor::{DType, Half};

/// An accelerator: see the [module](self).
pub trait Accelerator: Send + Sync {
    /// The runtime with the device's memory, lanes and events.
    fn runtime(&self) -> &Arc<dyn Runtime>;

    /// Checks that it can run a model of this shape.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`], naming the unsupported property.
    fn check(&self, shape: &Shape) -> Result<()>;

    /// The type of activations that suits weights of `dtype`: `None` if the device cannot multiply them.
    fn activations_for(&self, dtype: DType) -> Option<Half>;

    /// Whether it multiplies experts of this type.
    fn multiplies_experts(&self, dtype: DType) -> bool;

    /// Bytes of a packed matrix.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for a dtype or size that it cannot multiply.
    fn packed_bytes(&self, source: &LinearSource<'_>, act: Half) -> Result<usize>;

    /// Whether a packed head can also serve as the embedding table, so that a tied model needs only one copy.
    /// `positions` says whether learned positions are added.
    fn embeds_packed(&self, dtype: DType, act: Half, positions: bool) -> bool;

    /// What row `i` of a packed gate and up of `n` rows in all is ([`LinearSource::GateUp`]): whether it is up's, and which of its rows.
    /// Their biases lie in the same order.
    fn gate_up_row(&self, i: usize, n: usize) -> (bool, usize);

    /// Packs a matrix on the host, into memory of [`Accelerator::packed_bytes`].
    fn pack(&self, source: &LinearSource<'_>, act: Half, pool: &Pool, out: &mut [u8]);

    /// Bytes of [`Workspace::scratch`].
    fn scratch_bytes(&self, shape: &Shape, limits: &Limits, weights: &[LinearWeight]) -> usize;

    /// Bytes of a step's lists.
    fn step_bytes(&self, shape: &Shape, limits: &Limits) -> usize;

    /// The number of rows that a step of `rows` rows is computed as: results of a row may differ (in rounding)
    /// between buckets, never within one.
    fn row_bucket(&self, rows: usize) -> usize;

    /// Writes the lists of a step to `memory` ([`Accelerator::step_bytes`]), enqueued on `lane`.
    ///
    /// # Errors
    /// As [`StepRows::new`]; a device that failed.
    fn prepare(
        &self,
        lane: Lane,
        shape: &Shape,
        limits: &Limits,
        step: &StepDesc<'_>,
        memory: DevPtr,
    ) -> Result<Step>;

    /// Enqueues an operation on rows of a step.
    ///
    /// # Errors
    /// [`crate::Error::Capacity`], [`crate::Error::Usage`]: see the [module](self); the runtime's error if the device has failed.
    fn enqueue(&self, cx: &StepContext<'_>, op: RowOp<'_>, rows: Range<usize>) -> Result<()>;

    /// Declares to a runtime that watches memory which pages of `kv` [`RowOp::Append`] (`appends`) or
    /// [`RowOp::Attend`] of these rows touches. Recorded work needs it, because a replay touches the pages of
    /// another step. Implementations whose work is never recorded need not override it.
    ///
    /// # Errors
    /// As [`Runtime::declare`].
    fn declare_pages(
        &self,
        cx: &StepContext<'_>,
        kv: DevPtr,
        rows: Range<usize>,
        appends: bool,
    ) -> Result<()> {
        let _ = (cx, kv, rows, appends);
        Ok(())
    }

    /// top\[i\] = the [`TOP_K`] likeliest tokens of row i of those that want logits, likeliest first (by the total order of
    /// floats, -0 below 0; the lowest token among equals; NaN last), and Σ e^(factor·(x − max)) over the row, within
    /// [`top_error`] of itself: for the first `factors.len()` of these rows, after
    /// [`RowOp::Logits`]. The sum
    /// is NaN if a logit is NaN, and if the largest or the factor is infinite.
    fn top(&self, lane: Lane, shape: &Shape, ws: &Workspace, factors: &[f32]) -> Result<()>;

    /// Copies the same pages of each of these layers to their host's side, device or mapped memory, in the host's page
    /// layout ([`crate::cache`]). Any lane will do: the call involves no step and no other memory, and the lists may be
    /// dropped at once. On a GPU this is a kernel even on a copy lane, because a copy engine could not convert between
    /// the layouts.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] for a token count that no page has, or a page that is written twice; the runtime's error
    /// if the device has failed.
    fn gather_pages(
        &self,
        lane: Lane,
        shape: &Shape,
        layers: &[LayerPages],
        pages: &[PageMove],
    ) -> Result<()>;

    /// The inverse of [`Accelerator::gather_pages`].
    ///
    /// # Errors
    /// As [`Accelerator::gather_pages`].
    fn scatter_pages(
        &self,
        lane: Lane,
        shape: &Shape,
        layers: &[LayerPages],
        pages: &[PageMove],
    ) -> Result<()>;
}
