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
//! Every operation takes a range of the step's rows, so that rows of one step may be computed in different
//! places and at different times. A sub-batch that runs concurrently with another has its own step and workspace
//! ([`SubBatches`]). Weights and KV pages are addresses: a layer may sit anywhere in the device's memory, a staging
//! buffer included, and rows may append to (and attend over) any pages, a layer's or a staging area's.
//!
//! Every operation on a row gives the same bits whatever other rows are in the batch, as long as
//! [`Accelerator::row_bucket`] of the number of rows is the same, and whether [`Accelerator::qkv`] computed it or
//! its parts one by one.
//!
//! A step or call that exceeds what was planned returns [`crate::Error::Capacity`], one that contradicts itself
//! [`crate::Error::Usage`]; in both cases the call has enqueued nothing.
//!
//! Formats: the residual stream, what is added to it, q|k|v and logits are f32; normed activations are [`Half`] (`act`);
//! queries, keys and values as attention reads them are [`Half`] (`kv`). Pages are
//! `[page][kv_head][K, V][32 tokens][head_dim]` per layer.
//!
//! This file defines the trait. Each of its argument types has a file: `shape`, `weights`, `workspace`, `desc`, `step`
//! and `rows`, `exchange`.

mod desc;
mod exchange;
mod experts;
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

    /// hidden = embedding of the step's tokens (+ learned positions).
    fn embed(&self, cx: &StepContext<'_>, weight: &EmbedWeight, rows: Range<usize>) -> Result<()>;

    /// hidden += residual. Rows that cross to the host must contain the residual.
    fn fold(&self, cx: &StepContext<'_>, residual: Residual, rows: Range<usize>) -> Result<()>;

    /// hidden += residual; x = norm(hidden), or hidden without a norm; qkv = W·x + bias, norms of q and k, RoPE.
    fn project(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        residual: Residual,
        rows: Range<usize>,
    ) -> Result<()>;

    /// Turns qkv into the inputs of attention: q = the rounded queries; keys and values of rows attended on this
    /// device, in full or in part, go to their pages in `kv`. `kv` is the base of a layer's pages, or of a staging area
    /// with the step's page numbers. The rows of qkv may have been projected on this device, or uploaded
    /// ([`Workspace::qkv_rows`]).
    fn append(&self, cx: &StepContext<'_>, kv: DevPtr, rows: Range<usize>) -> Result<()>;

    /// Copies the rows of qkv that are attended elsewhere, in full or in part, to their places in a mailbox, then
    /// publishes its epoch. Without such rows nothing is published.
    fn publish(&self, cx: &StepContext<'_>, publish: Publish<'_>, rows: Range<usize>) -> Result<()>;

    /// [`Accelerator::project`], [`Accelerator::append`] and [`Accelerator::publish`] in one, with the same results,
    /// except that the contents of qkv afterwards are unspecified. Implementations that do all three in one pass over
    /// the rows override it.
    fn qkv(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        kv: DevPtr,
        residual: Residual,
        publish: Option<Publish<'_>>,
        rows: Range<usize>,
    ) -> Result<()> {
        self.project(cx, layer, residual, rows.clone())?;
        self.append(cx, kv, rows.clone())?;
        publish.map_or(Ok(()), |p| self.publish(cx, p, rows))
    }

    /// attn = attention of the rows that are attended on this device, over their pages and with the layer's sinks; `ws.partial` = the
    /// partial attention of rows with [`Attend::From`] or [`Attend::UpTo`], which sinks do not join; attn of padding rows = 0. `rows` begin and end at
    /// [`StepDesc::cuts`], or are all rows.
    fn attend(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        kv: DevPtr,
        rows: Range<usize>,
    ) -> Result<()>;

    /// Declares to a runtime that watches memory which pages of `kv` [`Accelerator::append`] (`appends`) or
    /// [`Accelerator::attend`] of these rows touches. Recorded work needs it, because a replay touches the pages of
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

    /// delta = W·attn + bias.
    fn out_proj(&self, cx: &StepContext<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()>;

    /// hidden += residual; x = norm(hidden); act = activation(W·x + bias). Of experts: chooses those of each row, and computes
    /// the activations of the chosen ones, and of the shared one ([`ExpertRows`]). Where the host computes some of them it waits for
    /// the choices: then activations of the chosen ones belong to [`Accelerator::ffn_down`].
    fn ffn_up(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        residual: Residual,
        rows: Range<usize>,
    ) -> Result<()>;

    /// delta = W·act + bias. Of experts: Σ weight·(W·act) of the chosen ones, in the order of a row's choices, added to what the
    /// shared one gives.
    fn ffn_down(&self, cx: &StepContext<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()>;

    /// Of a layer whose experts are divided: delta += what the host's experts give ([`ExpertRows::share`]), after
    /// [`Accelerator::ffn_down`], which has computed the sum of the device's. With exact results both are added here, in the order of a
    /// row's choices.
    fn add_share(&self, cx: &StepContext<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()>;

    /// logits = head(norm(hidden + residual)) of the rows that want logits, soft-capped, each at its place among all
    /// rows of the step that want logits.
    fn logits(
        &self,
        cx: &StepContext<'_>,
        norm: NormWeight,
        head: &LinearWeight,
        residual: Residual,
        rows: Range<usize>,
    ) -> Result<()>;

    /// argmax\[i\] = the token of the largest logit, the lowest index among equals, of the rows that want logits, and
    /// log Σ e^x of the row's logits ([`Workspace::logsumexp_at`]), which is not finite if a logit is NaN or infinite.
    fn argmax(&self, cx: &StepContext<'_>, rows: Range<usize>) -> Result<()>;

    /// top\[i\] = the [`TOP_K`] likeliest tokens of row i of those that want logits, likeliest first (by the total order of
    /// floats, -0 below 0; the lowest token among equals; NaN last), and Σ e^(factor·(x − max)) over the row, within
    /// [`top_error`] of itself: for the first `factors.len()` of these rows, after
    /// [`Accelerator::logits`]. The sum
    /// is NaN if a logit is NaN, and if the largest or the factor is infinite.
    fn top(&self, lane: Lane, shape: &Shape, ws: &Workspace, factors: &[f32]) -> Result<()>;

    /// attn of the rows that are attended elsewhere = o of `mailbox`. The host has written o before the call.
    fn collect(&self, cx: &StepContext<'_>, mailbox: &Mailbox, rows: Range<usize>) -> Result<()>;

    /// attn of the rows with [`Attend::From`] = `ws.partial` merged with `other`, the attention over the tokens before
    /// `from`, and with the sinks of `layer`. `other` begins with the first such row of the step, and may lie in mapped memory; or it is the result of
    /// a step of the same rows with [`Attend::UpTo`], in a workspace with another `partial`.
    fn merge(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        other: &PartialRows,
        rows: Range<usize>,
    ) -> Result<()>;

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
