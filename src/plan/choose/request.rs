//! What is to be run, and whether that makes sense.

use crate::plan::hardware::Hardware;
use crate::plan::memory::{Available, Load};
use crate::plan::outline::Outline;
use crate::plan::price::Workload;
use crate::plan::sizes::Sizes;
use crate::program::{
    Group, Iteration, Kv, LayerPlacement, Phase, Placement, Policy, RequestId, Residence, Side, Wants, lower,
};
use crate::{Error, Result};

use super::Strategy;

/// What the user fixed of a strategy's placement; nothing, unless said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fixed {
    /// HELM: units before the boundary.
    pub boundary: Option<usize>,
    /// LIA: blocks that stay on the GPU.
    pub pinned: Option<usize>,
    /// LIA: the vector of the other blocks, for prompts.
    pub prefill: Option<Policy>,
    /// LIA: their vector for decode rows.
    pub decode: Option<Policy>,
    /// `ncmoe`: how many blocks, the first ones, have their experts on the CPU.
    pub experts_on_host: Option<usize>,
    /// `experts`: how many experts of each block are on the GPU.
    pub gpu_experts: Option<usize>,
}

impl Fixed {
    /// Whether anything is fixed.
    pub fn is_some(&self) -> bool {
        *self != Fixed::default()
    }

    /// The strategy that what is fixed is of, if anything is.
    pub fn strategy(&self) -> Option<Strategy> {
        match self {
            _ if !self.is_some() => None,
            Fixed { boundary: Some(_), .. } => Some(Strategy::Helm),
            Fixed { experts_on_host: Some(_), .. } => Some(Strategy::Ncmoe),
            Fixed { gpu_experts: Some(_), .. } => Some(Strategy::Experts),
            _ => Some(Strategy::Lia),
        }
    }

    /// Whether the strategy of this name has what is fixed.
    ///
    /// # Errors
    /// A setting of another strategy.
    pub fn check_strategy(&self, strategy: &str) -> Result<()> {
        let settings = [
            (self.boundary.is_some(), "`boundary`", "helm"),
            (self.pinned.is_some(), "`pinned`", "lia"),
            (self.has_vectors(), "`policy`", "lia"),
            (self.experts_on_host.is_some(), "`n_cpu_moe`", "ncmoe"),
            (self.gpu_experts.is_some(), "`gpu_experts`", "experts"),
        ];
        match settings.into_iter().find(|&(given, _, owner)| given && strategy != owner) {
            Some((_, setting, owner)) => {
                Err(Error::usage(format!("{setting}: is of `strategy` {owner}, not of {strategy}")))
            }
            None => Ok(()),
        }
    }

    /// Whether a vector is given: at least one block is then not pinned.
    pub(super) fn has_vectors(&self) -> bool {
        self.prefill.is_some() || self.decode.is_some()
    }

    /// Whether the vectors can run, which no model and no device need be known for.
    ///
    /// # Errors
    /// [`Error::Usage`], as from [`lower()`].
    pub fn check_vectors(&self) -> Result<()> {
        let prefill = self.prefill.unwrap_or(Policy::all(Side::Device));
        let decode = self.decode.unwrap_or(Policy::all(Side::Host));
        let layer = LayerPlacement {
            weights: Residence::Streamed,
            prefill,
            decode,
            kv: Side::Host,
            device_experts: 0,
        };
        let placement = Placement { layers: vec![layer], ..Placement::all(Side::Host, 0, 0) };
        for phase in [Phase::Prefill, Phase::Decode] {
            let request = RequestId { slot: 0, generation: 0 };
            let group = Group { request, phase, first: 0, tokens: 1, kv: Kv::Device, wants: Wants::Last };
            lower(&placement, &Iteration::serial(vec![group], false))?;
        }
        Ok(())
    }

    pub(super) fn check(&self, sizes: &Sizes) -> Result<()> {
        self.check_vectors()?;
        let (n, units) = (sizes.layers(), sizes.units());
        if let Some(blocks) = self.experts_on_host.filter(|&blocks| blocks > n) {
            return Err(Error::usage(format!("`n_cpu_moe` {blocks}: the model has {n} blocks")));
        }
        let most = sizes.spec.experts.as_ref().map_or(0, |e| e.count);
        if let Some(experts) = self.gpu_experts.filter(|&experts| experts > most) {
            return Err(Error::usage(format!("`gpu_experts` {experts}: the model has {most} in a block")));
        }
        match (self.boundary, self.pinned) {
            (Some(k), _) if k > units => Err(Error::usage(format!(
                "`boundary` {k}: the model has {units} units (embedding, {n} blocks, head)"
            ))),
            (_, Some(p)) if p > n => Err(Error::usage(format!("`pinned` {p}: the model has {n} blocks"))),
            (_, Some(p)) if p == n && self.has_vectors() => {
                Err(Error::usage(format!("`pinned` {p}: all blocks, which leaves none to `policy`")))
            }
            _ => Ok(()),
        }
    }
}

/// What is to be run, and what the user fixed.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanRequest {
    /// Tokens of a prompt.
    pub prompt: u64,
    /// Decode steps.
    pub gen_len: u64,
    /// Sequences.
    pub batch: u64,
    /// Most GPU memory to use.
    pub gpu_memory: Option<u64>,
    /// Rows of a prefill step, if the user set them.
    pub chunk: Option<u64>,
    /// Whether LIA's vectors are chosen for transfers that overlap compute, not by the paper's serial costs. Predicted
    /// times overlap either way.
    pub overlap: bool,
    /// What the user fixed of a placement.
    pub fixed: Fixed,
}

/// Most rows of a prefill step.
const MAX_CHUNK: u64 = 16_384;

/// Fewest rows of a prefill step that are tried.
pub(super) const MIN_CHUNK: u64 = 32;

/// Rows of a prefill step of strategies that do not search.
const DEFAULT_CHUNK: u64 = 512;

/// Whether the bytes and FLOPs of `batch` sequences of `context` tokens can be counted in 64 bits.
///
/// # Errors
/// They cannot: far more than any machine has or does.
pub fn countable(sizes: &Sizes, batch: u64, context: u64) -> Result<()> {
    let spec = &sizes.spec;
    let wide = |n: usize| n as u128;
    let d = wide(spec.d_model);
    // Keys and values come in whole pages.
    let paged = context.saturating_add(crate::cache::PAGE_TOKENS as u64);
    // Of a row: attention, feed-forward, head, keys and values of all layers.
    let of_row = [
        4 * u128::from(paged) * wide(spec.q_dim()),
        4 * d * spec.experts.as_ref().map_or(0, |e| wide(e.used) * wide(e.d_ff)).max(wide(spec.d_ff)),
        2 * d * wide(spec.vocab),
        u128::from(sizes.kv_token()) * wide(sizes.layers()),
    ];
    let rows = u128::from(batch) * u128::from(paged);
    // A margin for sums of a few such terms.
    match rows.checked_mul(of_row.into_iter().max().unwrap_or(0)) {
        Some(n) if n < 1 << 60 => Ok(()),
        _ => Err(Error::usage(format!(
            "{batch} sequences of {context} tokens are more than can be planned for"
        ))),
    }
}

impl PlanRequest {
    /// Whether it makes sense for `sizes`.
    ///
    /// # Errors
    /// A length or batch of zero, or beyond the model's context or all reason; a fixed boundary or number of blocks that it does not
    /// have.
    pub fn check(&self, sizes: &Sizes) -> Result<()> {
        if self.prompt == 0 || self.gen_len == 0 || self.batch == 0 {
            return Err(Error::usage(
                "the prompt's length, the answer's length and the batch must be at least 1",
            ));
        }
        let most = sizes.spec.max_context as u64;
        let context = self.prompt.saturating_add(self.gen_len);
        if context > most {
            return Err(Error::usage(format!(
                "{} prompt and {} new tokens are {context}; {} was made for {most}",
                self.prompt, self.gen_len, sizes.spec.name
            )));
        }
        countable(sizes, self.batch, context)?;
        self.fixed.check(sizes)
    }

    pub(super) fn work(&self, chunk: u64) -> Workload {
        Workload { prompt: self.prompt, gen_len: self.gen_len, batch: self.batch, chunk }
    }

    pub(super) fn load(&self, chunk: u64) -> Load {
        Load { sequences: self.batch, context: self.prompt + self.gen_len, chunk, prompt: self.prompt }
    }

    /// The bytes of a model's sizes alone, in the memory of a machine.
    pub(crate) fn outline<'a>(&self, sizes: &'a Sizes, hardware: &Hardware) -> Outline<'a> {
        Outline { sizes, load: self.load(1), available: Available::new(hardware, self.gpu_memory) }
    }

    /// Rows of a prefill step to try, ascending.
    pub(super) fn chunks(&self) -> Vec<u64> {
        if let Some(chunk) = self.chunk {
            return vec![chunk];
        }
        let most = (self.prompt * self.batch).min(MAX_CHUNK);
        let mut all: Vec<u64> =
            std::iter::successors(Some(MIN_CHUNK), |c| Some(c * 2)).take_while(|&c| c < most).collect();
        all.push(most);
        all
    }

    /// Rows of a prefill step of strategies that do not search.
    pub(crate) fn default_chunk(&self) -> u64 {
        self.chunk.unwrap_or(DEFAULT_CHUNK.min(self.prompt * self.batch))
    }
}
