//! The accelerator contract: coarse sublayer operations on rows of a workspace.
//!
//! An [`Accelerator`] is a [`Runtime`] (memory, lanes, events) plus what a transformer needs of it. The engine
//! sizes and allocates all memory up front, describes a step once ([`Accelerator::prepare`]), and then
//! enqueues sublayers layer by layer. Nothing here waits: an operation is in flight when its call returns.
//!
//! ```text
//! embed ─► qkv ─► attend ─► out_proj ─► ffn_up ─► ffn_down ─► … ─► logits ─► argmax
//!           │        ▲
//!           └publish─┴collect, merge       (rows whose attention happens elsewhere, in full or in part)
//! ```
//!
//! Rows are ranges, so two sub-batches can share one workspace; weights and KV pages are addresses, so a
//! layer may sit anywhere in the device's memory, a staging buffer included. Every operation on a row
//! gives the same bits whatever other rows are in the batch, as long as [`Accelerator::row_bucket`] of the
//! number of rows is the same.
//!
//! Formats: the residual stream, what is added to it, q|k|v before RoPE and logits are f32; normed activations
//! are [`Half`] (`act`); queries, keys and values after RoPE are [`Half`] (`kv`). Pages are
//! `[page][kv_head][K, V][32 tokens][head_dim]` per layer.
//!
//! The trait is here; what it speaks of, a file each: [`shape`], [`weights`], [`workspace`], [`step`], [`exchange`].

pub mod exchange;
pub mod shape;
pub mod step;
pub mod weights;
pub mod workspace;

use std::ops::Range;
use std::sync::Arc;

pub use self::exchange::{Mailbox, PartialRows, Publish};
pub use self::shape::{Half, Limits, Shape};
pub use self::step::{Attend, Context, Step, StepDesc, StepSeq};
pub use self::weights::{EmbedWeight, LayerWeights, LinearSource, LinearWeight, NormWeight, UpWeight};
pub use self::workspace::{Residual, RowBytes, Workspace};
use super::runtime::{DevPtr, Lane, Runtime};
use crate::Result;
use crate::host::Pool;
use crate::tensor::DType;

/// An accelerator: see the [module](self).
pub trait Accelerator: Send + Sync {
    /// Its memory, lanes and events.
    fn runtime(&self) -> &Arc<dyn Runtime>;

    /// Whether it can run a model of this shape at all.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`], naming what it cannot.
    fn check(&self, shape: &Shape) -> Result<()>;

    /// The type of activations that suits weights of `dtype`: `None` if the device cannot multiply them.
    fn activations_for(&self, dtype: DType) -> Option<Half>;

    /// Bytes of a packed matrix.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for a dtype or size that it cannot multiply.
    fn packed_bytes(&self, source: &LinearSource<'_>, act: Half) -> Result<usize>;

    /// Whether a packed head can serve as the embedding's table too, so that a tied model needs one copy only.
    /// `positions`: learned positions are added.
    fn embeds_packed(&self, dtype: DType, act: Half, positions: bool) -> bool;

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
    fn prepare(
        &self,
        lane: Lane,
        shape: &Shape,
        limits: &Limits,
        step: &StepDesc<'_>,
        memory: DevPtr,
    ) -> Result<Step>;

    /// hidden = embedding of the step's tokens (+ learned positions), for `rows`.
    fn embed(&self, cx: &Context<'_>, weight: &EmbedWeight, rows: Range<usize>) -> Result<()>;

    /// hidden += residual; x = norm(hidden); q|k|v = W·x + bias, head norms, RoPE; keys and values of rows
    /// attended here go to their pages in `kv` (base of this layer's pages), all of q|k|v of rows attended
    /// elsewhere to `publish`.
    fn qkv(
        &self,
        cx: &Context<'_>,
        layer: &LayerWeights,
        kv: DevPtr,
        residual: Residual,
        publish: Option<Publish<'_>>,
        rows: Range<usize>,
    ) -> Result<()>;

    /// attn = attention of the step's rows that are attended here, over their pages; `ws.partial` = that of rows
    /// with [`Attend::From`].
    fn attend(&self, cx: &Context<'_>, layer: &LayerWeights, kv: DevPtr) -> Result<()>;

    /// delta = W·attn + bias.
    fn out_proj(&self, cx: &Context<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()>;

    /// hidden += residual; x = norm(hidden); act = activation(W·x + bias).
    fn ffn_up(
        &self,
        cx: &Context<'_>,
        layer: &LayerWeights,
        residual: Residual,
        rows: Range<usize>,
    ) -> Result<()>;

    /// delta = W·act + bias.
    fn ffn_down(&self, cx: &Context<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()>;

    /// logits = head(norm(hidden + residual)) of the rows that want them, soft-capped.
    fn logits(
        &self,
        cx: &Context<'_>,
        norm: NormWeight,
        head: &LinearWeight,
        residual: Residual,
    ) -> Result<()>;

    /// argmax\[i\] = the token of the largest logit, the lowest index among equals.
    fn argmax(&self, cx: &Context<'_>) -> Result<()>;

    /// attn of the step's rows attended elsewhere = o of `mailbox`. The host has written o before the call.
    fn collect(&self, cx: &Context<'_>, mailbox: &Mailbox) -> Result<()>;

    /// attn of the step's rows with [`Attend::From`] = `ws.partial` merged with `other`, attended elsewhere over
    /// the tokens before `from`.
    fn merge(&self, cx: &Context<'_>, other: &PartialRows) -> Result<()>;

    /// Copies pages of one layer to `out`, in the host's page layout ([`crate::cache`]), page after page.
    /// `pages` are u32 in device memory; `out` is device or mapped memory.
    fn gather_pages(&self, cx: &Context<'_>, kv: DevPtr, pages: DevPtr, n: usize, out: DevPtr) -> Result<()>;

    /// The inverse of [`Accelerator::gather_pages`].
    fn scatter_pages(
        &self,
        cx: &Context<'_>,
        kv: DevPtr,
        pages: DevPtr,
        n: usize,
        from: DevPtr,
    ) -> Result<()>;
}
