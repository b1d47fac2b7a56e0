//! Options of an engine: how to run a model.

use std::sync::Arc;

use crate::cache::{KvGeometry, KvType};
use crate::host::NumaBinding;
use crate::model::{ModelSpec, Position, Rope, RouterProfile};
use crate::plan::StepTimes;
use crate::program::Far;
use crate::simd::Isa;
use crate::simd::linear::Mode;
use crate::{Error, Result};

/// Default number of prompt rows computed together: enough to be compute-bound on every tier, few enough that
/// activations stay in the caches.
pub const DEFAULT_CHUNK: usize = 512;

/// Rows of logits that have room in a step, if that is more than one of each sequence.
pub(super) const LOGIT_ROWS: usize = 64;

/// How to run a model.
#[derive(Debug, Clone)]
pub struct Options {
    /// Threads; `None`: all cores this process may use, minus one for the thread that drives a device if there is a device and
    /// more than two cores.
    pub threads: Option<usize>,
    /// Most threads for attention of single rows on the host, which is memory-bound; `None`: all. The knee of the
    /// bandwidth curve gives a number that reads as fast as all threads
    /// ([`CpuLimits::knee`](crate::profile::CpuLimits::knee)).
    pub readers: Option<usize>,
    /// Tier of kernels.
    pub isa: Isa,
    /// Whether results must not depend on batch composition and chunking.
    pub mode: Mode,
    /// Storage of keys and values.
    pub kv_dtype: KvType,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Most sequences at a time (each may grow to `context`, if there are pages).
    pub sequences: usize,
    /// Pages of keys and values for all sequences; `None`: as many as they need at full length.
    pub pages: Option<usize>,
    /// Rows of a prompt computed together.
    pub chunk: usize,
    /// Rows of a step whose logits are kept: one per sequence, unless a step wants more.
    pub logits: usize,
    /// Pages of keys and values on the device, in each layer that keeps them there; `None`: as many as all sequences
    /// need. With fewer, the oldest pages move to the host.
    pub kv_pages: Option<usize>,
    /// Pages of keys and values in pinned host memory for sequences that live there
    /// ([`Engine::add_at`](super::Engine::add_at)), in addition to those on the device. With this set, pages move only
    /// by [`Engine::swap`](super::Engine::swap) or the swaps of a step: the caller is the scheduler. `None`: pages move
    /// by themselves if `kv_pages` are too few.
    pub far_pages: Option<usize>,
    /// How tokens whose pages moved to the host are attended; `None`: in each step in the way with the least time by
    /// [`Options::times`], or on the host without them.
    pub far: Option<Far>,
    /// Predictions of steps.
    pub times: Option<StepTimes>,
    /// Sub-batches of a step that may be in flight side by side ([`Engine::run`](super::Engine::run)):
    /// each has its own activations.
    pub sub_batches: usize,
    /// Memory nodes for weights on the host; `None`: the system decides. Other memory is not affected.
    pub weights_node: Option<NumaBinding>,
    /// How often the routers of a mixture of experts choose which expert: where a layer's experts are divided, the device has the most
    /// used ones. `None`: the first.
    pub router: Option<Arc<RouterProfile>>,
    /// Where a layer's experts are divided, the device's are exchanged for those that the router chooses more often: choices that make up
    /// for the exchange of an expert; 0: any that is chosen more often comes. `None`: they stay where they are.
    pub follow: Option<f64>,
}

impl Options {
    /// The defaults for one sequence of up to `context` tokens.
    pub fn new(isa: Isa, context: usize) -> Options {
        Options {
            threads: None,
            readers: None,
            isa,
            mode: Mode::Fast,
            kv_dtype: KvType::BF16,
            context,
            sequences: 1,
            pages: None,
            chunk: DEFAULT_CHUNK,
            logits: 1,
            kv_pages: None,
            far_pages: None,
            far: None,
            times: None,
            sub_batches: 1,
            weights_node: None,
            router: None,
            follow: None,
        }
    }
}

impl Options {
    /// Rows of the widest step.
    pub(super) fn rows(&self) -> usize {
        self.chunk.min(self.context).max(self.sequences)
    }

    /// Most rows of a step whose logits fit.
    pub(super) fn logit_rows(&self) -> usize {
        self.logits.clamp(self.sequences, self.rows())
    }

    /// Rows of a step whose logits have room. On the CPU those above [`Options::logit_rows`] are not in the plan: a step that has so
    /// many checks that there is memory.
    pub(super) fn logit_room(&self) -> usize {
        self.logit_rows().max(self.sequences).max(LOGIT_ROWS.min(self.rows()))
    }

    /// Pages of keys and values.
    pub(super) fn n_pages(&self) -> usize {
        let all = KvGeometry::pages_for(self.context).saturating_mul(self.sequences);
        self.pages.map_or(all, |pages| pages.min(all))
    }

    /// Returns the number of pages of keys and values, or an error for options that no engine supports.
    pub(super) fn check(&self, spec: &ModelSpec) -> Result<usize> {
        if self.context == 0 || self.chunk == 0 || self.sequences == 0 {
            return Err(Error::usage(
                "the context, the chunk and the number of sequences must be at least 1",
            ));
        }
        if self.sub_batches == 0 || self.sub_batches > usize::from(u8::MAX) {
            return Err(Error::usage(format!("{} sub-batches; 1 to {} can be", self.sub_batches, u8::MAX)));
        }
        if self.context > spec.max_context {
            return Err(Error::usage(format!(
                "a context of {} tokens, but the model was made for at most {}",
                self.context, spec.max_context
            )));
        }
        if let Position::Rope(Rope { query_scaling: Some(q), .. }) = &spec.position
            && q.beta != 0.0
            && self.context > q.original_context
        {
            return Err(Error::usage(format!(
                "a context of {} tokens, but from position {} on the model scales its queries \
                 (llama_4_scaling_beta {}), which is not supported; a context of {} is",
                self.context, q.original_context, q.beta, q.original_context
            )));
        }
        if self.threads == Some(0) {
            return Err(Error::usage("0 threads; at least 1 is needed"));
        }
        if self.readers == Some(0) {
            return Err(Error::usage("0 threads for attention on the host; at least 1 is needed"));
        }
        if self.far_pages == Some(0) {
            return Err(Error::usage("0 pages of keys and values on the host for sequences that live there"));
        }
        if self.pages == Some(0) {
            return Err(Error::usage("0 pages of keys and values; at least 1 is needed"));
        }
        let all = KvGeometry::pages_for(self.context).checked_mul(self.sequences);
        all.map(|_| self.n_pages()).ok_or_else(|| Error::usage("context times sequences overflows"))
    }
}
