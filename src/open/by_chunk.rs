//! The bytes of a run by the length of its chunks: where that is not given, the chooser tries several.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device::Accelerator;
use crate::engine::{Options, Sizes};
use crate::model::LoadedModel;
use crate::plan::{Available, Bytes, FAR_WAYS, Memory};
use crate::program::{Far, Placement};
use crate::{Error, Result};

/// The engine's sizes with chunks of any length; see the [module](self).
pub(super) struct ByChunk<'a> {
    model: &'a LoadedModel,
    options: &'a Options,
    accelerator: &'a dyn Accelerator,
    available: Available,
    /// Of the length that was asked for first: what is the same for all.
    first: Arc<Sizes>,
    ways: Vec<Option<Far>>,
    sized: RefCell<BTreeMap<u64, Arc<Sizes>>>,
}

impl<'a> ByChunk<'a> {
    /// The sizes of `model` with chunks of `chunk` rows first, in the memory of `available`.
    ///
    /// # Errors
    /// As [`Sizes::new`]: what is wrong with the tensors is said before anything is compared.
    pub fn new(
        model: &'a LoadedModel,
        options: &'a Options,
        accelerator: &'a dyn Accelerator,
        available: Available,
        chunk: u64,
    ) -> Result<ByChunk<'a>> {
        let of_first = with_chunk(options, chunk)?;
        let first = Arc::new(Sizes::new(&model.spec, &model.weights, &of_first, accelerator)?);
        let sized = RefCell::new(BTreeMap::from([(chunk, first.clone())]));
        let ways = options.far.map_or(FAR_WAYS.to_vec(), |far| vec![Some(far)]);
        Ok(ByChunk { model, options, accelerator, available, first, ways, sized })
    }

    /// The sizes with chunks of `chunk` rows.
    ///
    /// # Errors
    /// Chunks that cannot be counted, or as [`Sizes::new`].
    pub fn sizes(&self, chunk: u64) -> Result<Arc<Sizes>> {
        if let Some(sizes) = self.sized.borrow().get(&chunk) {
            return Ok(sizes.clone());
        }
        let (model, options) = (self.model, with_chunk(self.options, chunk)?);
        let sizes = self.first.with_chunk(&model.spec, &model.weights, &options, self.accelerator)?;
        let sizes = Arc::new(sizes);
        self.sized.borrow_mut().insert(chunk, sizes.clone());
        Ok(sizes)
    }
}

fn with_chunk(options: &Options, chunk: u64) -> Result<Options> {
    let chunk = usize::try_from(chunk).map_err(|_| Error::usage("the chunk is too long"))?;
    Ok(Options { chunk, ..options.clone() })
}

impl Bytes for ByChunk<'_> {
    fn memory(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> Memory {
        match self.sizes(chunk) {
            Ok(sizes) => sizes.counted_beside(self.available.host).memory(placement, chunk, far),
            // The first has been counted; another that cannot be fits nowhere.
            Err(_) => Memory::beyond(self.available),
        }
    }

    fn computes_experts(&self) -> bool {
        self.first.computes_experts()
    }

    fn pages(&self) -> usize {
        self.first.counted_beside(0).pages()
    }

    fn fixed_pages(&self) -> Option<usize> {
        self.options.kv_pages
    }

    /// A step of the engine is no longer than the context.
    fn longest_chunk(&self) -> u64 {
        self.options.context.max(self.options.sequences) as u64
    }

    fn fewest_pages(&self, chunk: u64) -> usize {
        self.sizes(chunk).map_or(self.pages(), |sizes| sizes.counted_beside(0).fewest_pages(chunk))
    }

    fn ways(&self) -> &[Option<Far>] {
        &self.ways
    }

    /// The context that these sizes are of.
    fn longest_context(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> u64 {
        if self.memory(placement, chunk, far).fits() { self.options.context as u64 } else { 0 }
    }

    fn pages_move(&self, placement: &Placement) -> bool {
        self.first.counted_beside(0).pages_move(placement)
    }
}
