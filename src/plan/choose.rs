//! The candidates: every way of running a model on a machine that there is a strategy for, predicted and compared.
//!
//! ```text
//! cpu-only   all on the CPU                        stream   weights streamed to the GPU for every step (FlexGen, ZeRO)
//! gpu-only   all on the GPU                        helm     the best boundary k, by exhaustive search
//! greedy     the GPU filled, the rest on the CPU   lia      the best of 64 vectors, whole blocks pinned in spare memory
//! ```
//! One placement has two policies: a helm candidate may stream its host blocks to the GPU for long prompts and compute
//! them in place in decode, where that is predicted to be faster.

mod helm;
mod lia;

use serde::Serialize;

use super::cost::Costs;
use super::hardware::Hardware;
use super::memory::{Available, Fitted, Load, Memory, ladder, longest_context, memory};
use super::price::{Spilled, Stage, Times, Workload, price};
use super::roofline::Roofline;
use super::sizes::Sizes;
use crate::program::{LayerPlacement, Placement, Policy, Residence, Side};
use crate::{Error, Result};

/// How CPU and GPU share the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// All on the CPU.
    CpuOnly,
    /// All on the GPU.
    GpuOnly,
    /// The GPU filled without a cost model.
    Greedy,
    /// Weights streamed.
    Stream,
    /// HELM.
    Helm,
    /// LIA.
    Lia,
}

impl Strategy {
    /// All, baselines first.
    pub const ALL: [Strategy; 6] = [
        Strategy::CpuOnly,
        Strategy::GpuOnly,
        Strategy::Greedy,
        Strategy::Stream,
        Strategy::Helm,
        Strategy::Lia,
    ];

    /// Of equal times the least wins: one side alone, then the systems, then the baselines.
    fn preference(self) -> u8 {
        match self {
            Strategy::CpuOnly => 0,
            Strategy::GpuOnly => 1,
            Strategy::Helm => 2,
            Strategy::Lia => 3,
            Strategy::Stream => 4,
            Strategy::Greedy => 5,
        }
    }

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::CpuOnly => "cpu-only",
            Strategy::GpuOnly => "gpu-only",
            Strategy::Greedy => "greedy",
            Strategy::Stream => "stream",
            Strategy::Helm => "helm",
            Strategy::Lia => "lia",
        }
    }
}

/// What is to be run, and what the user fixed.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
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
}

/// Most rows of a prefill step.
const MAX_CHUNK: u64 = 16_384;

/// Fewest rows of a prefill step that are tried.
const MIN_CHUNK: u64 = 32;

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
        4 * d * wide(spec.d_ff),
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

impl Request {
    /// Whether it makes sense for `sizes`.
    ///
    /// # Errors
    /// A length or batch of zero, or beyond the model's context or all reason.
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
        Ok(())
    }

    fn work(&self, chunk: u64) -> Workload {
        Workload { prompt: self.prompt, gen_len: self.gen_len, batch: self.batch, chunk }
    }

    fn load(&self, chunk: u64) -> Load {
        Load { sequences: self.batch, context: self.prompt + self.gen_len, chunk }
    }

    /// Rows of a prefill step to try, ascending.
    fn chunks(&self) -> Vec<u64> {
        if let Some(chunk) = self.chunk {
            return vec![chunk];
        }
        let most = (self.prompt * self.batch).min(MAX_CHUNK);
        let mut all: Vec<u64> =
            std::iter::successors(Some(MIN_CHUNK), |c| Some(c * 2)).take_while(|&c| c < most).collect();
        all.push(most);
        all
    }

    fn default_chunk(&self) -> u64 {
        self.chunk.unwrap_or(DEFAULT_CHUNK.min(self.prompt * self.batch))
    }
}

/// One way of running it.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    /// Whose.
    pub strategy: Strategy,
    /// Whether it fits.
    pub feasible: bool,
    /// What it does, or why it cannot.
    pub reason: String,
    /// Units on the CPU before the boundary, of strategies that have one.
    pub k: Option<usize>,
    /// Units whose weights stay on the CPU's side.
    pub cpu_units: usize,
    /// Units whose weights stay on the GPU.
    pub gpu_units: usize,
    /// Seconds of the whole prefill; none without a GPU where one is needed.
    pub t_prefill_s: Option<f64>,
    /// Seconds of all decode steps.
    pub t_decode_s: Option<f64>,
    /// Seconds of one decode step, in the middle of the answer.
    pub t_decode_step_s: Option<f64>,
    /// Prefill and decode.
    pub t_total_s: Option<f64>,
    /// LIA's vector for prompts, of the blocks that are not pinned: 1 is the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_policy: Option<[u8; 6]>,
    /// LIA's vector for decode rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_policy: Option<[u8; 6]>,
    /// Blocks that LIA keeps on the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_blocks: Option<usize>,
    /// Rows of a prefill step.
    pub chunk: u64,
    /// How keys and values that the GPU's pages cannot hold are attended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spilled: Option<Spilled>,
    /// Time by stage.
    pub stages: Vec<Stage>,
    /// Bytes on each side.
    pub memory: Memory,
    /// The longest context that fits this placement with this batch.
    pub longest_context: u64,
    /// What else there is to say.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Where everything lives.
    pub placement: Placement,
}

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct Plan {
    /// In the order of [`Strategy::ALL`].
    pub candidates: Vec<Candidate>,
    /// The fastest of those that fit.
    pub chosen: Option<usize>,
    /// Why it won.
    pub why: String,
}

/// What the strategies share.
struct Planner<'a> {
    sizes: &'a Sizes,
    hardware: &'a Hardware,
    request: &'a Request,
    costs: &'a dyn Costs,
    available: Available,
}

/// A placement with its rows, before it is turned into a candidate.
struct Draft {
    placement: Placement,
    chunk: u64,
    reason: String,
    k: Option<usize>,
    policies: Option<(Policy, Policy)>,
    pinned: Option<usize>,
    notes: Vec<String>,
}

impl Draft {
    fn new(placement: Placement, chunk: u64, reason: impl Into<String>) -> Draft {
        Draft {
            placement,
            chunk,
            reason: reason.into(),
            k: None,
            policies: None,
            pinned: None,
            notes: Vec::new(),
        }
    }
}

impl Planner<'_> {
    fn memory(&self, placement: &Placement, chunk: u64) -> Memory {
        memory(self.sizes, placement, &self.request.load(chunk), self.available)
    }

    fn times(&self, placement: &Placement, chunk: u64) -> Times {
        price(self.costs, self.sizes, placement, &self.request.work(chunk))
    }

    fn total(&self, placement: &Placement, chunk: u64) -> f64 {
        let t = self.times(placement, chunk);
        t.prefill + self.request.gen_len as f64 * t.step
    }

    fn pages(&self) -> usize {
        self.request.load(1).pages() as usize
    }

    fn units(&self) -> usize {
        self.sizes.units()
    }

    /// The draft as a candidate: priced, measured, and infeasible if it does not fit.
    fn candidate(&self, strategy: Strategy, draft: Draft) -> Candidate {
        let memory = self.memory(&draft.placement, draft.chunk);
        let lack = memory.lack();
        let there = self.hardware.accelerator.is_some() || !draft.placement.uses(Side::Device);
        let times = there.then(|| self.times(&draft.placement, draft.chunk));
        let decode = times.as_ref().map(|t| t.step * self.request.gen_len as f64);
        let on_gpu = |layer: &LayerPlacement| matches!(layer.weights, Residence::Device | Residence::Both);
        let ends = [draft.placement.embedding, draft.placement.head];
        let gpu_units = draft.placement.layers.iter().filter(|l| on_gpu(l)).count()
            + ends.iter().filter(|&&side| side == Side::Device).count();
        Candidate {
            strategy,
            feasible: there && lack.is_none(),
            reason: match lack {
                _ if !there => "this machine has no GPU".into(),
                Some(lack) => lack,
                None => draft.reason,
            },
            k: draft.k,
            cpu_units: self.units() - gpu_units,
            gpu_units,
            t_prefill_s: times.as_ref().map(|t| t.prefill),
            t_decode_s: decode,
            t_decode_step_s: times.as_ref().map(|t| t.step),
            t_total_s: times.as_ref().zip(decode).map(|(t, d)| t.prefill + d),
            prefill_policy: draft.policies.map(|p| p.0.bits()),
            decode_policy: draft.policies.map(|p| p.1.bits()),
            pinned_blocks: draft.pinned,
            chunk: draft.chunk,
            spilled: times.as_ref().and_then(|t| t.spilled),
            stages: times.map(|t| t.stages).unwrap_or_default(),
            memory,
            longest_context: if there {
                longest_context(self.sizes, &draft.placement, &self.request.load(draft.chunk), self.available)
            } else {
                0
            },
            notes: draft.notes,
            placement: draft.placement,
        }
    }

    /// The chunk with which `placement` fits and is fastest, of those as good the nearest to the engine's default,
    /// which it is too if it fits with none.
    fn best_chunk(&self, placement: &Placement) -> u64 {
        const AS_GOOD: f64 = 1.002;
        let chunks = self.request.chunks();
        let usable = self.hardware.accelerator.is_some() || !placement.uses(Side::Device);
        let fitting = chunks.iter().copied().filter(|&c| usable && self.memory(placement, c).fits());
        let timed: Vec<(u64, f64)> = fitting.map(|c| (c, self.total(placement, c))).collect();
        let least = timed.iter().map(|t| t.1).fold(f64::INFINITY, f64::min);
        let default = self.request.default_chunk();
        let good = timed.into_iter().filter(|t| t.1 <= least * AS_GOOD).map(|t| t.0);
        good.min_by_key(|c| c.abs_diff(default)).unwrap_or(default)
    }

    fn cpu_only(&self) -> Candidate {
        let placement = Placement::all(Side::Host, self.sizes.layers(), self.pages());
        let chunk = self.best_chunk(&placement);
        let mut draft = Draft::new(placement, chunk, "everything on the CPU");
        draft.k = Some(self.units());
        self.candidate(Strategy::CpuOnly, draft)
    }

    fn gpu_only(&self) -> Candidate {
        let placement = Placement::all(Side::Device, self.sizes.layers(), self.pages());
        let chunk = self.best_chunk(&placement);
        let mut draft = Draft::new(placement, chunk, "everything on the GPU");
        draft.k = Some(0);
        self.candidate(Strategy::GpuOnly, draft)
    }

    /// The GPU filled by the ladder of [`memory`](super::memory): no time is looked at.
    fn greedy(&self) -> Candidate {
        let (units, pages) = (self.units(), self.pages());
        let chunk = self.request.default_chunk();
        let shortest = self.request.chunk.unwrap_or(MIN_CHUNK);
        let at = |k: usize, device_pages: usize| {
            let mut placement = Placement::boundary(k, self.sizes.layers(), device_pages, pages);
            if device_pages < pages {
                placement.host_pages = pages;
            }
            placement
        };
        let mut draft = match ladder(self.sizes, &self.request.load(chunk), self.available, shortest) {
            // The candidate says what it lacks.
            Err(_) => Draft { k: Some(units), ..Draft::new(at(units, pages), chunk, "") },
            Ok(Fitted { k, chunk, device_pages, rungs }) => {
                let reason = match k {
                    0 if rungs.is_empty() => "everything on the GPU".to_owned(),
                    k if k == units => "nothing fits the GPU: everything on the CPU".to_owned(),
                    _ => format!("the GPU filled: {}", rungs.join(", ")),
                };
                Draft { k: Some(k), ..Draft::new(at(k, device_pages as usize), chunk, reason) }
            }
        };
        if self.hardware.accelerator.is_none() {
            draft.reason = "no GPU to fill: everything on the CPU".into();
        }
        self.candidate(Strategy::Greedy, draft)
    }

    /// All blocks streamed; keys and values on the GPU, or on the host with attention on either side: the fastest that
    /// fits.
    fn stream(&self) -> Candidate {
        let gpu = Policy::all(Side::Device);
        let of = |kv: Side, decode: Policy| Placement {
            embedding: Side::Host,
            layers: vec![
                LayerPlacement { weights: Residence::Streamed, prefill: gpu, decode, kv };
                self.sizes.layers()
            ],
            head: Side::Device,
            device_pages: if kv == Side::Device { self.pages() } else { 0 },
            host_pages: if kv == Side::Host { self.pages() } else { 0 },
        };
        let ways = [
            (of(Side::Device, gpu), "weights streamed for every step"),
            (
                of(Side::Host, Policy::ATTENTION_ON_HOST),
                "weights streamed for every step, decode attention on the CPU",
            ),
            (of(Side::Host, gpu), "weights, keys and values streamed for every step"),
        ];
        let draft = ways.into_iter().map(|(placement, reason)| {
            let chunk = self.best_chunk(&placement);
            Draft::new(placement, chunk, reason)
        });
        self.fastest(draft.collect(), Strategy::Stream)
    }

    /// The fastest of the drafts that fit; the first if none does.
    fn fastest(&self, drafts: Vec<Draft>, strategy: Strategy) -> Candidate {
        let mut best: Option<Candidate> = None;
        for draft in drafts {
            let candidate = self.candidate(strategy, draft);
            let better = best
                .as_ref()
                .is_none_or(|b| candidate.feasible && (!b.feasible || candidate.t_total_s < b.t_total_s));
            if better {
                best = Some(candidate);
            }
        }
        best.expect("there is a draft")
    }

    fn run(&self, strategy: Strategy) -> Candidate {
        match strategy {
            Strategy::CpuOnly => self.cpu_only(),
            Strategy::GpuOnly => self.gpu_only(),
            Strategy::Greedy => self.greedy(),
            Strategy::Stream => self.stream(),
            Strategy::Helm => helm::candidate(self),
            Strategy::Lia => lia::candidate(self),
        }
    }
}

/// Seconds of the run at every boundary that fits, for a drawing.
///
/// # Errors
/// As [`plan`].
pub fn boundary_curve(sizes: &Sizes, hardware: &Hardware, request: &Request) -> Result<Vec<(usize, f64)>> {
    request.check(sizes)?;
    let (costs, available) = (Roofline::new(hardware, sizes), Available::new(hardware, request.gpu_memory));
    Ok(helm::curve(&Planner { sizes, hardware, request, costs: &costs, available }))
}

/// Compares `strategies` by the analytic roofline of `hardware`.
///
/// # Errors
/// A request that makes no sense for the model.
pub fn plan(sizes: &Sizes, hardware: &Hardware, request: &Request, strategies: &[Strategy]) -> Result<Plan> {
    plan_with(sizes, hardware, request, strategies, &Roofline::new(hardware, sizes))
}

/// The same by other costs: measured tables, say.
///
/// # Errors
/// As [`plan`].
pub fn plan_with(
    sizes: &Sizes,
    hardware: &Hardware,
    request: &Request,
    strategies: &[Strategy],
    costs: &dyn Costs,
) -> Result<Plan> {
    request.check(sizes)?;
    let available = Available::new(hardware, request.gpu_memory);
    let planner = Planner { sizes, hardware, request, costs, available };
    let candidates: Vec<Candidate> = strategies.iter().map(|&s| planner.run(s)).collect();
    let total = |i: usize| candidates[i].t_total_s.unwrap_or(f64::INFINITY);
    let mut order: Vec<usize> = (0..candidates.len()).filter(|&i| candidates[i].feasible).collect();
    // Sums in another order differ in their last bits: that is a tie, too.
    let least = order.iter().map(|&i| total(i)).fold(f64::INFINITY, f64::min);
    let billionths = |i: usize| (total(i) / least * 1e9).round() as u64;
    order.sort_by_key(|&i| (billionths(i), candidates[i].strategy.preference()));
    let why = match order[..] {
        [] => String::new(),
        [only] => format!("{}: the only one that fits", candidates[only].strategy.name()),
        [first, second, ..] => {
            let (a, b) = (&candidates[first], &candidates[second]);
            let ratio = total(second) / total(first);
            let lead = match ratio {
                r if r < 1.001 => format!("as fast as {}", b.strategy.name()),
                r if r < 1.1 => format!("{:.1}% faster than {}", (r - 1.0) * 100.0, b.strategy.name()),
                r => format!("{r:.1} times as fast as {}", b.strategy.name()),
            };
            format!("{}: {}; {lead}", a.strategy.name(), a.reason)
        }
    };
    let chosen = order.first().copied();
    Ok(Plan { candidates, chosen, why })
}

#[cfg(test)]
mod tests;
