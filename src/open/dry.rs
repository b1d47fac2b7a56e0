//! Plans for a model whose tensors are known, with the bytes that a run would take: the same chooser, the same count, the same
//! prediction as for an engine, for a machine that is described.

use std::sync::Arc;

use super::by_chunk::ByChunk;
use super::place::fit_types;
use super::settings::Settings;
use crate::Result;
use crate::cache::KvType;
use crate::device::{self, Emulation, Kind};
use crate::engine::Options;
use crate::hardware::Hardware;
use crate::model::LoadedModel;
use crate::plan::{self, Bytes, Costs, Memory, Outline, Plan, PlanRequest, Strategy};
use crate::program::{Far, Placement};
use crate::simd::Isa;

/// Compares `strategies` for a model with these tensors by `costs`, as [`plan::plan_with`] does for sizes alone. Memory is that of the
/// engine's dry run on a device of this kind; on a machine without one, that of the sizes.
///
/// # Errors
/// A request that makes no sense for the model, tensors that the device cannot multiply.
pub fn planned(
    model: &LoadedModel,
    sizes: &plan::Sizes,
    hardware: &Hardware,
    request: &PlanRequest,
    strategies: &[Strategy],
    costs: &dyn Costs,
) -> Result<Plan> {
    request.check(sizes)?;
    if hardware.accelerator.is_none() {
        return plan::plan_with(sizes, hardware, request, strategies, costs);
    }
    let outline = request.outline(sizes, hardware);
    let kind = Kind::Timed(Emulation::Functions, Arc::new(hardware.clone()));
    let accelerator = device::open(&kind, Some(outline.available.gpu))?;
    let mut options = Options {
        sequences: request.batch as usize,
        logits: request.batch as usize,
        kv_dtype: sizes.kv(),
        follow: Settings::default().follows(&model.spec),
        ..Options::new(Isa::selected()?, (request.prompt + request.gen_len) as usize)
    };
    // What is not the default was asked for.
    let kv_type = Some(sizes.kv()).filter(|&kv| kv != KvType::BF16);
    fit_types(&Settings { kv_type, ..Settings::default() }, &*accelerator, &mut options);
    let chunks = ByChunk::new(model, &options, &*accelerator, outline.available, request.default_chunk())?;
    plan::plan_within(&Dry { outline, chunks }, sizes, hardware, request, strategies, costs)
}

/// The engine's sizes beside a described machine's memory.
struct Dry<'a> {
    outline: Outline<'a>,
    chunks: ByChunk<'a>,
}

impl Bytes for Dry<'_> {
    fn memory(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> Memory {
        self.chunks.memory(placement, chunk, far).with_weights_on(self.outline.available.nodes)
    }

    fn computes_experts(&self) -> bool {
        self.chunks.computes_experts()
    }

    fn pages(&self) -> usize {
        self.chunks.pages()
    }

    fn longest_chunk(&self) -> u64 {
        self.chunks.longest_chunk()
    }

    fn fewest_pages(&self, chunk: u64) -> usize {
        self.chunks.fewest_pages(chunk)
    }

    fn ways(&self) -> &[Option<Far>] {
        self.chunks.ways()
    }

    fn pages_move(&self, placement: &Placement) -> bool {
        self.chunks.pages_move(placement)
    }

    /// By the sizes alone, which count a little more for a small model.
    fn longest_context(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> u64 {
        let own = match self.memory(placement, chunk, far).fits() {
            true => self.chunks.longest_context(placement, chunk, far),
            false => 0,
        };
        self.outline.longest_context(placement, chunk, far).max(own)
    }
}
