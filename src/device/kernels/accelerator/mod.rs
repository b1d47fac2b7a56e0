//! The accelerator contract by the kernels of `cuda/`, on whatever runs them: a GPU, or their host emulation.
//!
//! This file says what the kernels can run, computes sizes, and calls the file that implements each operation. Each
//! part of the model has a file: [`ends`] (embedding and head), [`qkv`], [`attend`], [`ffn`], [`experts`]; [`exchange`] talks to the
//! host. [`step`] makes a step's lists, [`pack`] packs matrices, [`uses`] declares which pages launches touch, and
//! [`product`] multiplies.

mod attend;
mod ends;
mod exchange;
mod experts;
mod ffn;
mod lists;
mod pack;
mod qkv;
mod scratch;
mod step;
mod uses;

use std::ops::Range;
use std::sync::Arc;

use self::scratch::{Scratch, attention_shape};
use super::exchange::{pages_from_host, pages_to_host};
use super::product::{self, choose};
use super::quant::PackedLayout;
use crate::device::accelerator::{
    Accelerator, FeedForward, LayerPages, Limits, LinearSource, LinearWeight, PageMove, RowOp, Shape, Step,
    StepContext, StepDesc, Workspace,
};
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::host::Pool;
use crate::tensor::{DType, Half};
use crate::{Error, Result};

/// An accelerator that runs the kernels of `cuda/`.
pub struct KernelAccelerator {
    runtime: Arc<dyn Runtime>,
}

impl KernelAccelerator {
    /// Creates the accelerator that launches on `runtime`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the runtime has no kernels.
    pub fn new(runtime: Arc<dyn Runtime>) -> Result<KernelAccelerator> {
        if !runtime.has_kernel("softcap") {
            return Err(Error::Unsupported(format!(
                "{}: no kernels for it in this build",
                runtime.info().name
            )));
        }
        Ok(KernelAccelerator { runtime })
    }

    fn rt(&self) -> &dyn Runtime {
        &*self.runtime
    }
}

impl Accelerator for KernelAccelerator {
    fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.runtime
    }

    fn check(&self, shape: &Shape) -> Result<()> {
        if shape.exact.is_some() {
            return Err(Error::Unsupported(format!(
                "{}: deterministic mode: a result's rounding depends on the size of its batch; run on the CPU with `device` cpu",
                self.rt().info().name
            )));
        }
        attention_shape(shape).check(self.rt())?;
        let widths = [
            ("hidden size", shape.d_model),
            ("width of the query heads", shape.q_dim()),
            ("width of the key heads", shape.kv_dim()),
            ("feed-forward width", shape.d_ff),
        ];
        for (what, n) in widths {
            if !n.is_multiple_of(8) {
                return Err(Error::Unsupported(format!(
                    "{what} {n}: the kernels want a multiple of 8; run on the CPU with `device` cpu"
                )));
            }
        }
        Ok(())
    }

    fn activations_for(&self, dtype: DType) -> Option<Half> {
        let bf16 = self.runtime.info().sm >= 80;
        match dtype {
            DType::BF16 if bf16 => Some(Half::BF16),
            _ if dtype.is_quantised() && !PackedLayout::dtypes().any(|d| d == dtype) => None,
            // Quantised weights are decoded to either half type.
            _ => Some(Half::F16),
        }
    }

    fn multiplies_experts(&self, dtype: DType) -> bool {
        self.activations_for(dtype).is_some() && experts::has_kernels(self.rt(), dtype)
    }

    fn packed_bytes(&self, source: &LinearSource<'_>, _act: Half) -> Result<usize> {
        let k = source.k();
        let whole = source.dtype().row_bytes(k).is_some();
        if !k.is_multiple_of(8) || !whole {
            return Err(Error::Unsupported(format!(
                "a matrix of {k} columns: the kernels want a multiple of 8"
            )));
        }
        Ok(pack::packed_bytes(source))
    }

    fn embeds_packed(&self, dtype: DType, act: Half, positions: bool) -> bool {
        match dtype {
            // Rows that already have the activations' type are copied unchanged.
            DType::F16 => act == Half::F16,
            DType::BF16 => act == Half::BF16,
            DType::F32 => false,
            _ => !positions,
        }
    }

    fn gate_up_row(&self, i: usize, _n: usize) -> (bool, usize) {
        product::gate_up_row(i)
    }

    fn pack(&self, source: &LinearSource<'_>, act: Half, pool: &Pool, out: &mut [u8]) {
        pack::pack(source, act, pool, out);
    }

    fn scratch_bytes(&self, shape: &Shape, limits: &Limits, weights: &[LinearWeight]) -> usize {
        let rt = self.rt();
        let linear = weights.iter().map(|w| product::scratch_bytes(rt, w, limits.rows)).max().unwrap_or(0);
        Scratch::new(shape, limits).linear + linear
    }

    fn step_bytes(&self, _shape: &Shape, limits: &Limits) -> usize {
        step::bytes(limits)
    }

    fn row_bucket(&self, rows: usize) -> usize {
        choose::row_bucket(rows)
    }

    fn prepare(
        &self,
        lane: Lane,
        shape: &Shape,
        limits: &Limits,
        step: &StepDesc<'_>,
        memory: DevPtr,
    ) -> Result<Step> {
        step::prepare(self.rt(), lane, shape, limits, step, memory)
    }

    fn enqueue(&self, cx: &StepContext<'_>, op: RowOp<'_>, rows: Range<usize>) -> Result<()> {
        let rt = self.rt();
        let ws = || cx.ws.at_row(cx.shape, rows.start);
        match op {
            RowOp::Embed(weight) => ends::embed(rt, cx, weight, rows),
            RowOp::Fold(residual) => qkv::fold(rt, cx, residual, &rows),
            RowOp::Project { layer, residual } => qkv::project(rt, cx, layer, residual, &rows),
            RowOp::Append { kv } => qkv::append(rt, cx, kv, &rows),
            RowOp::Publish(publish) => qkv::publish(rt, cx, publish, &rows),
            RowOp::Qkv { layer, kv, residual, publish } => {
                qkv::qkv(rt, cx, layer, kv, residual, publish, &rows)
            }
            RowOp::Attend { layer, kv } => attend::attend(rt, cx, layer, kv, &rows),
            RowOp::Merge { layer, other } => attend::merge(rt, cx, layer, other, &rows),
            RowOp::Collect(mailbox) => exchange::collect(rt, cx, mailbox, &rows),
            RowOp::OutProj(layer) => ffn::to_delta(rt, cx, &layer.o, ws().attn, &rows),
            RowOp::FfnUp { layer, residual } => match &layer.ffn {
                FeedForward::Experts(e) => experts::up(rt, cx, layer, e, residual, rows),
                _ => ffn::up(rt, cx, layer, residual, rows),
            },
            RowOp::FfnDown(layer) => match &layer.ffn {
                FeedForward::Experts(e) => experts::down(rt, cx, e, rows),
                other => ffn::to_delta(rt, cx, &other.dense()?.down, ws().act, &rows),
            },
            RowOp::AddShare(_) => experts::add_share(rt, cx, &rows),
            RowOp::Logits { norm, head, residual } => ends::logits(rt, cx, norm, head, residual, rows),
            RowOp::Argmax => ends::argmax(rt, cx, &rows),
        }
    }

    fn declare_pages(
        &self,
        cx: &StepContext<'_>,
        kv: DevPtr,
        rows: Range<usize>,
        appends: bool,
    ) -> Result<()> {
        // A recorded step keeps all of its pages on the device, including pages that a window has left behind.
        let how = if appends { uses::Use::Append } else { uses::Use::Attend(None) };
        uses::declare(self.rt(), cx, kv, &rows, how)
    }

    fn top(&self, lane: Lane, shape: &Shape, ws: &Workspace, factors: &[f32]) -> Result<()> {
        ends::top(self.rt(), lane, shape, ws, factors)
    }

    fn gather_pages(
        &self,
        lane: Lane,
        shape: &Shape,
        layers: &[LayerPages],
        pages: &[PageMove],
    ) -> Result<()> {
        PageMove::check(pages, true)?;
        uses::declare_moves(self.rt(), lane, shape, layers, pages, true)?;
        pages_to_host(self.rt(), lane, &exchange::page_moves(shape, layers, pages))
    }

    fn scatter_pages(
        &self,
        lane: Lane,
        shape: &Shape,
        layers: &[LayerPages],
        pages: &[PageMove],
    ) -> Result<()> {
        PageMove::check(pages, false)?;
        uses::declare_moves(self.rt(), lane, shape, layers, pages, false)?;
        pages_from_host(self.rt(), lane, &exchange::page_moves(shape, layers, pages))
    }
}
