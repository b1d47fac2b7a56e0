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

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::host::Pool;
use super::runtime::{DevPtr, Lane, Pinned, Runtime};
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::model::spec::{Ffn, Norm, RopePairing};
use crate::tensor::{DType, Tensor};

/// A 16-bit float type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
}

impl Half {
    /// `f16` or `bf16`, as in the names of kernels.
    pub const fn name(self) -> &'static str {
        match self {
            Half::F16 => "f16",
            Half::BF16 => "bf16",
        }
    }
}

/// What stays the same in all steps of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// d.
    pub d_model: usize,
    /// h_a.
    pub n_heads: usize,
    /// h_kv.
    pub n_kv_heads: usize,
    /// d_h.
    pub head_dim: usize,
    /// I.
    pub d_ff: usize,
    /// V.
    pub vocab: usize,
    /// The norm of all blocks.
    pub norm: Norm,
    /// Activation of the feed-forward.
    pub ffn: Ffn,
    /// Multiplies q·k.
    pub attn_scale: f32,
    /// Multiplies embeddings.
    pub embed_scale: f32,
    /// Rotated elements per head; 0 without RoPE.
    pub rope_dim: usize,
    /// Pairs of RoPE.
    pub pairing: RopePairing,
    /// Sliding window of the layers that have one.
    pub window: Option<usize>,
    /// Soft-cap of the logits.
    pub logit_softcap: Option<f32>,
    /// Type of normed activations.
    pub act: Half,
    /// Type of queries, keys and values.
    pub kv: Half,
}

impl Shape {
    /// h_a·d_h.
    pub fn q_dim(&self) -> usize {
        self.n_heads * self.head_dim
    }
    /// h_kv·d_h.
    pub fn kv_dim(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }
    /// Width of q|k|v.
    pub fn qkv_dim(&self) -> usize {
        self.q_dim() + 2 * self.kv_dim()
    }
    /// Bytes of one page of one layer.
    pub fn page_bytes(&self) -> usize {
        self.n_kv_heads * 2 * PAGE_TOKENS * self.head_dim * 2
    }
}

/// Upper bounds of all steps, from which memory is sized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Rows of a step.
    pub rows: usize,
    /// Rows that want logits in a step.
    pub logit_rows: usize,
    /// Sequences in a step.
    pub sequences: usize,
    /// Pages of a sequence.
    pub pages_per_sequence: usize,
}

/// Matrices to be multiplied together: concatenated rows, or gate and up of a gated feed-forward.
#[derive(Debug, Clone, Copy)]
pub enum LinearSource<'a> {
    /// All rows of the parts, one after the other; equal dtypes and columns.
    Rows(&'a [&'a Tensor]),
    /// `ffn_up` multiplies both and applies the activation; equal shapes and dtypes.
    GateUp(&'a Tensor, &'a Tensor),
}

impl LinearSource<'_> {
    /// Storage type of the weights.
    pub fn dtype(&self) -> DType {
        match self {
            LinearSource::Rows(parts) => parts[0].dtype,
            LinearSource::GateUp(gate, _) => gate.dtype,
        }
    }
    /// Rows in all.
    pub fn n(&self) -> usize {
        match self {
            LinearSource::Rows(parts) => parts.iter().map(|p| p.rows()).sum(),
            LinearSource::GateUp(gate, up) => gate.rows() + up.rows(),
        }
    }
    /// Columns.
    pub fn k(&self) -> usize {
        match self {
            LinearSource::Rows(parts) => parts[0].cols(),
            LinearSource::GateUp(gate, _) => gate.cols(),
        }
    }
    /// Whether it is a gate and an up projection.
    pub fn is_gate_up(&self) -> bool {
        matches!(self, LinearSource::GateUp(..))
    }
}

/// A packed matrix in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearWeight {
    /// Where [`Accelerator::pack`]'s bytes lie.
    pub ptr: DevPtr,
    /// What it was packed from.
    pub dtype: DType,
    /// Rows (gate and up counted both).
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// f32 `[n]`, or NULL.
    pub bias: DevPtr,
}

/// Weights of a norm, f32 `[d]`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct NormWeight {
    /// Multiplies.
    pub w: DevPtr,
    /// Is added (LayerNorm), or NULL.
    pub b: DevPtr,
}

/// The feed-forward's first matrices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpWeight {
    /// Packed from [`LinearSource::GateUp`].
    GateUp(LinearWeight),
    /// Gate and up of different dtypes.
    Separate(LinearWeight, LinearWeight),
    /// No gate.
    Plain(LinearWeight),
}

/// One block's weights. Plain addresses: the block may lie in memory of its own or in a staging buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerWeights {
    /// Before attention.
    pub attn_norm: NormWeight,
    /// q|k|v in one to three parts, in this order (parts where dtypes differ).
    pub qkv: Vec<LinearWeight>,
    /// f32 `[qkv_dim]`, or NULL.
    pub qkv_bias: DevPtr,
    /// Per-head norms of q and k, f32 `[head_dim]`, or NULL.
    pub q_norm: DevPtr,
    /// See `q_norm`.
    pub k_norm: DevPtr,
    /// Out-projection.
    pub o: LinearWeight,
    /// Norm of attention's output before it is added, f32 `[d]`, or NULL.
    pub post_attn: DevPtr,
    /// Before the feed-forward.
    pub ffn_norm: NormWeight,
    /// Up (and gate).
    pub up: UpWeight,
    /// Down.
    pub down: LinearWeight,
    /// Norm of the feed-forward's output before it is added, f32 `[d]`, or NULL.
    pub post_ffn: DevPtr,
    /// Whether attention has the model's sliding window.
    pub windowed: bool,
    /// cos and sin tables of RoPE for this layer, f32 `[positions][rope_dim/2]` each; NULL without RoPE.
    pub rope: [DevPtr; 2],
}

/// The embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbedWeight {
    /// `[V][d]`, rows as in the file, unless `packed`.
    pub table: DevPtr,
    /// Its storage type.
    pub dtype: DType,
    /// The table is the tied head, as [`Accelerator::pack`] left it.
    pub packed: bool,
    /// Learned positions `[P][d]`, rows as in the file, or NULL.
    pub positions: DevPtr,
    /// Their storage type.
    pub positions_dtype: DType,
    /// Rows of the positions.
    pub n_positions: usize,
    /// Row of position 0.
    pub position_offset: usize,
}

/// What is still to be added to the residual stream before a norm: the last sublayer's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residual {
    /// Nothing (before the first sublayer).
    None,
    /// `delta`.
    Delta,
    /// `delta`, normed with these weights (f32 `[d]`) first.
    Normed(DevPtr),
}

impl Residual {
    /// `delta`, through `post` if that is not NULL.
    pub fn after(post: DevPtr) -> Residual {
        if post.is_null() { Residual::Delta } else { Residual::Normed(post) }
    }
}

/// Addresses of the activations of up to [`Limits::rows`] rows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Workspace {
    /// Residual stream, f32 `[rows][d]`.
    pub hidden: DevPtr,
    /// To be added to it, f32 `[rows][d]`.
    pub delta: DevPtr,
    /// Normed, act `[rows][d]`.
    pub x: DevPtr,
    /// f32 `[rows][qkv_dim]`.
    pub qkv: DevPtr,
    /// kv `[rows][q_dim]`.
    pub q: DevPtr,
    /// Attention's output, act `[rows][q_dim]`.
    pub attn: DevPtr,
    /// f32 `[rows][2 · d_ff]`, where gate and up cannot be fused; NULL if never.
    pub gate_up: DevPtr,
    /// act `[rows][d_ff]`.
    pub act: DevPtr,
    /// act `[logit_rows][d]`.
    pub head_x: DevPtr,
    /// f32 `[logit_rows][V]`.
    pub logits: DevPtr,
    /// u32 `[logit_rows]`.
    pub argmax: DevPtr,
    /// Partial attention of the rows with [`Attend::From`], in order; NULL where none ever has.
    pub partial: PartialRows,
    /// [`Accelerator::scratch_bytes`] of working memory, zeroed once.
    pub scratch: DevPtr,
}

/// Whose attention over which tokens happens in [`Accelerator::attend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attend {
    /// All of it, here.
    Here,
    /// Here over the tokens from `from` on (a multiple of the page): the rest is attended elsewhere and merged in
    /// ([`Accelerator::merge`]).
    From {
        /// First token whose page is on the device.
        from: usize,
    },
    /// None of it: the rows are published, and their outputs collected.
    Elsewhere,
}

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct StepSeq<'a> {
    /// Its pages on the device, all tokens of this step included.
    pub pages: &'a [u32],
    /// Position of the first row.
    pub first_pos: usize,
    /// First row.
    pub row0: usize,
    /// Rows.
    pub n_rows: usize,
    /// Where attention happens.
    pub attend: Attend,
}

/// What a step computes.
#[derive(Debug, Clone, Copy)]
pub struct StepDesc<'a> {
    /// Sequences in the order of their rows.
    pub seqs: &'a [StepSeq<'a>],
    /// One per row.
    pub tokens: &'a [u32],
    /// Rows that want logits, ascending.
    pub logit_rows: &'a [u32],
    /// Base of the epochs that this step publishes.
    pub epoch: u32,
    /// Rows to launch for: at least the rows there are; the rest is padding.
    pub launch_rows: usize,
}

/// A prepared step: the implementation's own lists, in device memory.
#[derive(Clone)]
pub struct Step {
    /// Rows launched for.
    pub rows: usize,
    /// Rows that want logits.
    pub n_logits: usize,
    /// Equal keys: the same launches with other contents of device memory, so that a recorded graph of one
    /// runs the other. `None`: not to be recorded.
    pub graph_key: Option<u64>,
    /// The implementation's.
    pub inner: Arc<dyn Any + Send + Sync>,
}

/// What every operation needs to know.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Where it is enqueued.
    pub lane: Lane,
    /// The model's sizes.
    pub shape: &'a Shape,
    /// Activations.
    pub ws: &'a Workspace,
    /// The step.
    pub step: &'a Step,
}

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
    /// The mailbox's epoch becomes [`StepDesc::epoch`] plus this once all rows are there; the host polls it with
    /// acquire.
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
