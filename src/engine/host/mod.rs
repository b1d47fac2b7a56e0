//! The sublayers of a model on the CPU: the accelerator's operations, with the same names, on rows of host memory.
//!
//! ```text
//! embed ─► project ─► append ─► attend ─► out_proj ─► ffn_up ─► ffn_down ─► … ─► head ─► pick
//! ```
//!
//! | a file | what |
//! |---|---|
//! | `workspace` | [`HostWorkspace`]: activations, rows of f32, each a `row_buffer` |
//! | `step` | [`HostStep`]: tokens, positions, pages and attention plans of a sub-batch, for all layers |
//! | `residual` | [`Residual`]: the output still to be added to the residual stream; the norm that adds it |
//! | `ends` | embed, head, pick |
//! | `qkv` | project, append |
//! | `attend` | attend, out_proj |
//! | `ffn` | ffn_up, ffn_down |
//! | `choices` | counts which experts rows choose, if asked to |
//! | `experts` | the same of experts; [`model::route`](crate::model::route) chooses, `expert_rows` sorts and has the memory |
//!
//! Any sublayer of any layer runs on any range of rows, so that an executor may alternate with an accelerator: between
//! two operations, other code may write and read rows of [`HostWorkspace::hidden`], q, k, v and attn, and appending and
//! attending can also take rows from, and write results to, memory outside the workspace (a mailbox). Sub-batches use
//! disjoint rows of one workspace; data that depends on all rows of a sub-batch is in its step.
//!
//! A row's bits depend on its own input and, outside deterministic mode, on the number of rows of an operation. They do
//! not depend on where rows lie in the workspace, on the number of threads, or on operations that ran in between.

mod attend;
mod choices;
mod ends;
mod expert_rows;
mod experts;
mod ffn;
mod qkv;
mod residual;
mod rope;
mod row_buffer;
mod step;
mod workspace;

use std::ops::Range;

use super::prepare::Prepared;
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::host::{Pool, RowSet};
use crate::model::{ModelSpec, Position, RopePairing};
use crate::rope::RopeTable;
use crate::simd::attention::{AttnPlan, AttnShape};
use crate::simd::linear::Mode;
use crate::simd::tuning::Tuning;
use crate::simd::{Isa, Kernels};

pub(super) use self::attend::whole;
pub(super) use self::choices::count_choices;
pub use self::residual::Residual;
use self::rope::RopeCache;
pub use self::step::{HostSeq, HostStep};
pub use self::workspace::HostWorkspace;

/// Data that all sublayers of a model need in every step: kernels, and the RoPE tables.
pub struct Host {
    kernels: &'static Kernels,
    isa: Isa,
    mode: Mode,
    threads: usize,
    /// Threads for memory-bound attention; `None`: all.
    readers: Option<usize>,
    rope: Option<RopeCache>,
    /// RoPE cache of windowed layers, if it differs.
    rope_local: Option<RopeCache>,
    pairing: RopePairing,
    shape: AttnShape,
    window: Option<usize>,
}

impl Host {
    /// A host for `spec`, with the kernels of `isa`, on a pool of `threads`, for sequences of up to `context` tokens.
    ///
    /// # Errors
    /// If the attention kernels do not cover the head size, or the RoPE is not supported.
    pub fn new(spec: &ModelSpec, isa: Isa, mode: Mode, threads: usize, context: usize) -> Result<Host> {
        let shape = Host::attention(spec, None);
        shape.check()?;
        let (rope, rope_local, pairing) = match &spec.position {
            Position::Rope(r) => {
                let local = RopeTable::local(r, context)?.map(RopeCache::new);
                (Some(RopeCache::new(RopeTable::new(r, context)?)), local, r.pairing)
            }
            Position::Learned { .. } => (None, None, RopePairing::Half),
        };
        Ok(Host {
            kernels: Kernels::for_isa(isa),
            isa,
            mode,
            threads,
            readers: None,
            rope,
            rope_local,
            pairing,
            shape,
            window: spec.window.as_ref().map(|w| w.size),
        })
    }

    /// Limits the threads for memory-bound attention (decode).
    pub fn with_readers(self, readers: Option<usize>) -> Host {
        Host { readers, ..self }
    }

    /// A plan of attention without rows.
    fn plan(&self, shape: &AttnShape) -> Result<AttnPlan> {
        let plan = Host::empty_plan(shape, self.mode, self.threads)?;
        Ok(plan.with_readers(self.readers.unwrap_or(self.threads)))
    }

    /// A plan of attention without rows, for `threads`. In deterministic mode tokens are summed page by page, so that a row's bits
    /// do not depend on where its pages are (docs/decisions/0018).
    pub(super) fn empty_plan(shape: &AttnShape, mode: Mode, threads: usize) -> Result<AttnPlan> {
        let plan = AttnPlan::new(shape, &[], threads)?;
        Ok(match mode {
            Mode::Fast => plan.with_vector_rows(Tuning::current().attention_vector_rows),
            Mode::Deterministic => plan.in_segments_of(PAGE_TOKENS),
        })
    }

    /// The attention shape of a layer with `window`.
    pub(super) fn attention(spec: &ModelSpec, window: Option<usize>) -> AttnShape {
        AttnShape {
            n_heads: spec.n_heads,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            scale: spec.attn_scale,
            softcap: spec.attn_softcap,
            window,
        }
    }

    /// Bytes of the RoPE tables once positions below `context` have been seen.
    pub(super) fn rope_bytes(spec: &ModelSpec, context: usize) -> usize {
        let Position::Rope(r) = &spec.position else { return 0 };
        let tables = 1 + usize::from(r.local_theta.is_some());
        tables * RopeCache::bytes(r.dim / 2, context)
    }

    /// The attention shape of a layer.
    fn shape(&self, windowed: bool) -> AttnShape {
        AttnShape { window: self.window.filter(|_| windowed), ..self.shape }
    }

    fn rope(&self, windowed: bool) -> Option<&RopeCache> {
        if windowed { self.rope_local.as_ref().or(self.rope.as_ref()) } else { self.rope.as_ref() }
    }

    /// The sublayers of `model`, computed by `pool`.
    ///
    /// # Panics
    /// If the model was prepared for another tier, or the pool has more threads than planned.
    pub fn with<'a>(&'a self, model: &'a Prepared, pool: &'a Pool) -> HostContext<'a> {
        assert!(model.isa == self.isa, "a model prepared for {}, kernels of {}", model.isa, self.isa);
        assert!(pool.threads() <= self.threads, "{} threads, planned {}", pool.threads(), self.threads);
        HostContext { host: self, model, pool }
    }
}

/// The sublayers of a model: one method each, in the files of this folder. Rows are rows of the workspace.
#[derive(Clone, Copy)]
pub struct HostContext<'a> {
    host: &'a Host,
    model: &'a Prepared,
    pool: &'a Pool,
}

/// Elements below which waking threads for a row-wise operation does not pay.
const PARALLEL_ELEMENTS: usize = 16 * 1024;

/// Rows of a chunk: threads share few cache lines (whole pages of one sequence would share none), and a decode step of
/// many sequences still occupies all threads.
const ROWS_PER_CHUNK: usize = 4;

/// Calls `f` with each row of `rows` once, on several threads if that pays. `width` is the number of elements that a
/// call reads or writes.
pub(super) fn each_row<R: RowSet>(pool: &Pool, rows: R, width: usize, f: impl Fn(usize, R::Row) + Sync) {
    pool.rows(rows.rows() * width >= PARALLEL_ELEMENTS, ROWS_PER_CHUNK, rows, f);
}

/// # Panics
/// If `rows` are not rows of the step.
#[track_caller]
fn check_rows(step: &HostStep, rows: &Range<usize>) {
    let own = step.rows();
    assert!(
        rows.start >= own.start && rows.end <= own.end && rows.start <= rows.end,
        "rows {rows:?} of a step with rows {own:?}"
    );
}
