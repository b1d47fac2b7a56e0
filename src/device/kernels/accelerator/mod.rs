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
    Accelerator, EmbedWeight, FeedForward, LayerPages, LayerWeights, Limits, LinearSource, LinearWeight,
    Mailbox, NormWeight, PageMove, PartialRows, Publish, Residual, Shape, Step, StepContext, StepDesc,
    Workspace,
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

    fn embed(&self, cx: &StepContext<'_>, weight: &EmbedWeight, rows: Range<usize>) -> Result<()> {
        ends::embed(self.rt(), cx, weight, rows)
    }

    fn fold(&self, cx: &StepContext<'_>, residual: Residual, rows: Range<usize>) -> Result<()> {
        qkv::fold(self.rt(), cx, residual, &rows)
    }

    fn project(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        residual: Residual,
        rows: Range<usize>,
    ) -> Result<()> {
        qkv::project(self.rt(), cx, layer, residual, &rows)
    }

    fn append(&self, cx: &StepContext<'_>, kv: DevPtr, rows: Range<usize>) -> Result<()> {
        qkv::append(self.rt(), cx, kv, &rows)
    }

    fn publish(&self, cx: &StepContext<'_>, publish: Publish<'_>, rows: Range<usize>) -> Result<()> {
        qkv::publish(self.rt(), cx, publish, &rows)
    }

    fn qkv(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        kv: DevPtr,
        residual: Residual,
        publish: Option<Publish<'_>>,
        rows: Range<usize>,
    ) -> Result<()> {
        qkv::qkv(self.rt(), cx, layer, kv, residual, publish, &rows)
    }

    fn attend(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        kv: DevPtr,
        rows: Range<usize>,
    ) -> Result<()> {
        attend::attend(self.rt(), cx, layer, kv, &rows)
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

    fn out_proj(&self, cx: &StepContext<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()> {
        let attn = cx.ws.at_row(cx.shape, rows.start).attn;
        ffn::to_delta(self.rt(), cx, &layer.o, attn, &rows)
    }

    fn ffn_up(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        residual: Residual,
        rows: Range<usize>,
    ) -> Result<()> {
        match &layer.ffn {
            FeedForward::Experts(e) => experts::up(self.rt(), cx, layer, e, residual, rows),
            _ => ffn::up(self.rt(), cx, layer, residual, rows),
        }
    }

    fn ffn_down(&self, cx: &StepContext<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()> {
        let act = cx.ws.at_row(cx.shape, rows.start).act;
        match &layer.ffn {
            FeedForward::Experts(e) => experts::down(self.rt(), cx, e, rows),
            other => ffn::to_delta(self.rt(), cx, &other.dense()?.down, act, &rows),
        }
    }

    fn add_share(&self, cx: &StepContext<'_>, _layer: &LayerWeights, rows: Range<usize>) -> Result<()> {
        experts::add_share(self.rt(), cx, &rows)
    }

    fn logits(
        &self,
        cx: &StepContext<'_>,
        weight: NormWeight,
        head: &LinearWeight,
        residual: Residual,
        rows: Range<usize>,
    ) -> Result<()> {
        ends::logits(self.rt(), cx, weight, head, residual, rows)
    }

    fn argmax(&self, cx: &StepContext<'_>, rows: Range<usize>) -> Result<()> {
        ends::argmax(self.rt(), cx, &rows)
    }

    fn top(&self, lane: Lane, shape: &Shape, ws: &Workspace, factors: &[f32]) -> Result<()> {
        ends::top(self.rt(), lane, shape, ws, factors)
    }

    fn collect(&self, cx: &StepContext<'_>, mailbox: &Mailbox, rows: Range<usize>) -> Result<()> {
        exchange::collect(self.rt(), cx, mailbox, &rows)
    }

    fn merge(
        &self,
        cx: &StepContext<'_>,
        layer: &LayerWeights,
        other: &PartialRows,
        rows: Range<usize>,
    ) -> Result<()> {
        attend::merge(self.rt(), cx, layer, other, &rows)
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
