//! The accelerator contract by plain functions on the host: for any machine, without a compiler for kernels.
//!
//! Every operation of the contract is one operation of a lane, with the exact bytes that it reads and
//! writes, so that every missing event between lanes is detected. Weights stay as their files store them. A row's
//! results do not depend on the other rows at all.
//!
//! For a shape that wants exact results ([`Shape::exact`]) rows are kept in f32 and computed by the CPU's kernels.
//!
//! The files have the same names as in `device/kernels/accelerator/`: [`ends`] (embedding and head), [`qkv`],
//! [`attend`] ([`exact`] with the CPU's bits), [`ffn`], [`experts`]; [`exchange`] talks to the host. [`operands`] are the spans that
//! an operation is enqueued with.

mod attend;
mod ends;
mod exact;
mod exchange;
mod experts;
mod ffn;
mod operands;
mod qkv;

use std::ops::Range;
use std::sync::Arc;

use self::operands::Operands;
use super::op::HostOp;
use super::ops::cpu::{CpuKernels, Plans};
use super::ops::linear::Arithmetic;
use super::runtime::EmulatedRuntime;
use super::step::CpuStep;
use crate::device::accelerator::{
    Accelerator, FeedForward, LayerPages, Limits, LinearSource, LinearWeight, PageMove, RowOp, Shape, Step,
    StepContext, StepDesc, Workspace,
};
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::host::Pool;
use crate::simd::{Isa, Kernels};
use crate::tensor::{DType, Half};
use crate::{Error, Result};

/// An accelerator whose operations are functions on the host.
pub struct EmulatedAccelerator {
    emulated: Arc<EmulatedRuntime>,
    runtime: Arc<dyn Runtime>,
    /// The CPU tier that decodes and rounds, unless results are exact.
    isa: Isa,
    /// A pool of the lane's thread alone, for the CPU's kernels where results are exact.
    pool: Arc<Pool>,
    /// Attention plans, where results are exact.
    plans: Arc<Plans>,
}

impl EmulatedAccelerator {
    /// Creates the accelerator on the lanes and memory of `runtime`.
    pub fn new(runtime: Arc<EmulatedRuntime>) -> EmulatedAccelerator {
        let isa = Isa::selected().unwrap_or(Isa::Reference);
        let pool = Arc::new(Pool::new(1));
        EmulatedAccelerator { runtime: runtime.clone(), emulated: runtime, isa, pool, plans: Arc::default() }
    }

    /// The arithmetic of operations on a model of this shape.
    fn arithmetic(&self, shape: &Shape) -> Arithmetic {
        let cpu = shape.exact.map(|isa| CpuKernels::new(isa, &self.pool, &self.plans));
        Arithmetic { kernels: Kernels::for_isa(shape.exact.unwrap_or(self.isa)), cpu }
    }

    fn step<'a>(&self, cx: &'a StepContext<'_>) -> &'a Arc<CpuStep> {
        cx.step.inner.downcast_ref().expect("a step that this accelerator prepared")
    }

    /// Operands that begin with the step's lists, so that every use of the step is ordered after their upload.
    fn operands(&self, cx: &StepContext<'_>) -> Operands {
        let mut operands = Operands { reads: Vec::with_capacity(16), writes: Vec::with_capacity(4) };
        operands.read(self.step(cx).list.ptr, self.step(cx).list.len);
        operands
    }

    fn enqueue_function(
        &self,
        cx: &StepContext<'_>,
        name: &'static str,
        operands: Operands,
        body: impl Fn(&[&[u8]], &mut [&mut [u8]]) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        let Operands { reads, writes } = operands;
        self.emulated.enqueue(cx.lane, HostOp { name: name.into(), reads, writes, body: Box::new(body) })
    }
}

impl Accelerator for EmulatedAccelerator {
    fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.runtime
    }

    fn check(&self, shape: &Shape) -> Result<()> {
        if !shape.head_dim.is_multiple_of(2) {
            return Err(Error::Unsupported(format!(
                "{}: heads of {}",
                self.runtime.info().name,
                shape.head_dim
            )));
        }
        shape.exact.map_or(Ok(()), |_| exact::attn_shape(shape, false).check())
    }

    fn activations_for(&self, dtype: DType) -> Option<Half> {
        Some(if dtype == DType::BF16 { Half::BF16 } else { Half::F16 })
    }

    fn multiplies_experts(&self, _dtype: DType) -> bool {
        true
    }

    fn packed_bytes(&self, source: &LinearSource<'_>, _act: Half) -> Result<usize> {
        let row = source.dtype().row_bytes(source.k());
        row.and_then(|r| r.checked_mul(source.n())).ok_or_else(|| {
            Error::Unsupported(format!("a {} matrix of {} columns", source.dtype(), source.k()))
        })
    }

    fn embeds_packed(&self, _dtype: DType, _act: Half, _positions: bool) -> bool {
        true // packed weights are the stored ones
    }

    fn gate_up_row(&self, i: usize, n: usize) -> (bool, usize) {
        (i >= n / 2, i % (n / 2))
    }

    fn pack(&self, source: &LinearSource<'_>, _act: Half, _pool: &Pool, out: &mut [u8]) {
        let both;
        let parts = match *source {
            LinearSource::Rows(parts) => parts,
            LinearSource::GateUp(gate, up) => {
                both = [gate, up];
                &both
            }
        };
        let mut out = out;
        for part in parts {
            let (to, rest) = out.split_at_mut(part.data.len());
            to.copy_from_slice(&part.data);
            out = rest;
        }
    }

    fn scratch_bytes(&self, _shape: &Shape, _limits: &Limits, _weights: &[LinearWeight]) -> usize {
        0
    }

    fn step_bytes(&self, _shape: &Shape, limits: &Limits) -> usize {
        4 * limits.rows
    }

    fn row_bucket(&self, rows: usize) -> usize {
        rows
    }

    fn prepare(
        &self,
        lane: Lane,
        _shape: &Shape,
        limits: &Limits,
        step: &StepDesc<'_>,
        memory: DevPtr,
    ) -> Result<Step> {
        let host = CpuStep::new(limits, step, memory)?;
        let tokens: Vec<u8> = step.tokens.iter().flat_map(|t| t.to_ne_bytes()).collect();
        self.runtime.upload(lane, memory, &tokens)?;
        Ok(Step {
            rows: step.launch_rows,
            n_logits: step.logit_rows.len(),
            lists: host.lists.clone(),
            // Work is enqueued for exactly the pages and rows of this step, so no graph can be reused.
            graph_key: None,
            inner: Arc::new(Arc::new(host)),
        })
    }

    fn enqueue(&self, cx: &StepContext<'_>, op: RowOp<'_>, rows: Range<usize>) -> Result<()> {
        let cpu = || self.arithmetic(cx.shape).cpu;
        match op {
            RowOp::Embed(weight) => ends::embed(self, cx, weight, rows),
            RowOp::Fold(residual) => qkv::fold(self, cx, residual, rows),
            RowOp::Project { layer, residual } => qkv::project(self, cx, layer, residual, rows),
            RowOp::Append { kv } => qkv::append(self, cx, kv, rows),
            RowOp::Publish(publish) => qkv::publish(self, cx, publish, rows),
            RowOp::Qkv { .. } => op.parts().try_for_each(|part| self.enqueue(cx, part, rows.clone())),
            RowOp::Attend { layer, kv } => match cpu() {
                Some(cpu) => exact::attend(self, cx, cpu, layer, kv, &rows),
                None => attend::attend(self, cx, layer, kv, &rows),
            },
            RowOp::Merge { layer, other } => match cpu() {
                Some(cpu) => exact::merge(self, cx, cpu, layer, other, &rows),
                None => attend::merge(self, cx, layer, other, &rows),
            },
            RowOp::Collect(mailbox) => exchange::collect(self, cx, mailbox, &rows),
            RowOp::OutProj(layer) => ffn::to_delta(self, cx, "out_proj", &layer.o, cx.ws.attn, rows),
            RowOp::FfnUp { layer, residual } => match &layer.ffn {
                FeedForward::Experts(e) => experts::up(self, cx, layer, e, residual, rows),
                _ => ffn::up(self, cx, layer, residual, rows),
            },
            RowOp::FfnDown(layer) => match &layer.ffn {
                FeedForward::Experts(e) => experts::down(self, cx, e, rows),
                other => ffn::to_delta(self, cx, "ffn_down", &other.dense()?.down, cx.ws.act, rows),
            },
            RowOp::AddShare(layer) => experts::add_share(self, cx, layer.ffn.experts()?, rows),
            RowOp::Logits { norm, head, residual } => ends::logits(self, cx, norm, head, residual, &rows),
            RowOp::Argmax => ends::argmax(self, cx, &rows),
        }
    }

    fn top(&self, lane: Lane, shape: &Shape, ws: &Workspace, factors: &[f32]) -> Result<()> {
        ends::top(self, lane, shape, ws, factors)
    }

    fn gather_pages(
        &self,
        lane: Lane,
        shape: &Shape,
        layers: &[LayerPages],
        pages: &[PageMove],
    ) -> Result<()> {
        self.emulated.move_pages(lane, exchange::page_moves(shape, layers, pages, true)?)
    }

    fn scatter_pages(
        &self,
        lane: Lane,
        shape: &Shape,
        layers: &[LayerPages],
        pages: &[PageMove],
    ) -> Result<()> {
        self.emulated.move_pages(lane, exchange::page_moves(shape, layers, pages, false)?)
    }
}
