//! Plans for a model whose tensors are known, with the bytes that a run would take: the same chooser, the same count, the same
//! prediction as for an engine, for a machine that is described.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::place::fit_types;
use super::settings::Settings;
use crate::cache::KvType;
use crate::device::{self, Accelerator, Emulation, Kind};
use crate::engine::{Options, Sizes};
use crate::hardware::Hardware;
use crate::model::LoadedModel;
use crate::plan::{self, Bytes, Costs, FAR_WAYS, Memory, Outline, Plan, PlanRequest, Strategy};
use crate::program::{Far, Placement};
use crate::simd::Isa;
use crate::{Error, Result};

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
        ..Options::new(Isa::selected()?, (request.prompt + request.gen_len) as usize)
    };
    // What is not the default was asked for.
    let kv_type = Some(sizes.kv()).filter(|&kv| kv != KvType::BF16);
    fit_types(&Settings { kv_type, ..Settings::default() }, &*accelerator, &mut options)?;
    let dry = Dry { model, outline, accelerator, options, sized: RefCell::default() };
    // What is wrong with the tensors is said before anything is compared.
    dry.sizes(request.default_chunk())?;
    plan::plan_within(&dry, sizes, hardware, request, strategies, costs)
}

/// The engine's sizes with chunks of any length.
struct Dry<'a> {
    model: &'a LoadedModel,
    outline: Outline<'a>,
    accelerator: Arc<dyn Accelerator>,
    options: Options,
    sized: RefCell<BTreeMap<u64, Arc<Sizes>>>,
}

impl Dry<'_> {
    fn sizes(&self, chunk: u64) -> Result<Arc<Sizes>> {
        if let Some(sizes) = self.sized.borrow().get(&chunk) {
            return Ok(sizes.clone());
        }
        let chunk_rows = usize::try_from(chunk).map_err(|_| Error::usage("the chunk is too long"))?;
        let options = Options { chunk: chunk_rows, ..self.options.clone() };
        let LoadedModel { spec, weights, .. } = self.model;
        let sizes = Arc::new(Sizes::new(spec, weights, &options, &*self.accelerator)?);
        self.sized.borrow_mut().insert(chunk, sizes.clone());
        Ok(sizes)
    }
}

impl Bytes for Dry<'_> {
    fn memory(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> Memory {
        let available = self.outline.available;
        match self.sizes(chunk) {
            Ok(sizes) => {
                let memory = sizes.counted_beside(available.host).memory(placement, chunk, far);
                memory.with_weights_on(available.nodes)
            }
            // The default chunk has been counted; another that cannot be fits nowhere.
            Err(_) => Memory::beyond(available),
        }
    }

    fn computes_experts(&self) -> bool {
        // It is the same for all chunks, of which the default one was counted.
        self.sized.borrow().values().next().is_some_and(|sizes| sizes.computes_experts())
    }

    fn pages(&self) -> usize {
        self.outline.pages()
    }

    /// A step of the engine is no longer than the context.
    fn longest_chunk(&self) -> u64 {
        self.options.context.max(self.options.sequences) as u64
    }

    fn fewest_pages(&self, chunk: u64) -> usize {
        self.sizes(chunk).map_or(self.pages(), |sizes| sizes.counted().fewest_pages(chunk))
    }

    fn ways(&self) -> &[Option<Far>] {
        &FAR_WAYS
    }

    /// By the sizes alone, which count a little more for a small model.
    fn longest_context(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> u64 {
        let fits = self.memory(placement, chunk, far).fits();
        let context = if fits { self.options.context as u64 } else { 0 };
        self.outline.longest_context(placement, chunk, far).max(context)
    }
}
