//! The candidates: every way of running a model on a machine that there is a strategy for, predicted and compared.
//!
//! ```text
//! cpu-only         all on the CPU                                        stream  every block streamed to the GPU for every step
//! gpu-only         all on the GPU                                        helm    the best boundary k, by exhaustive search
//! greedy           the GPU filled, the rest computed on the CPU          lia     the best of 64 vectors, whole blocks pinned
//! accelerate       the GPU filled, the rest copied there and waited for  in spare memory
//! flexgen          the best share of blocks on the GPU, the rest streamed ahead; keys and values, and attention, on either side
//! zero-inference   every block streamed ahead, keys and values on the GPU
//! ```
//! The last three, and `greedy`, are what others do ([`baselines`]). What the user fixed ([`Fixed`]) binds the strategy that it is of.
//!
//! One placement has two policies: a helm candidate may stream its host blocks to the GPU for long prompts and compute
//! them in place in decode, where that is predicted to be faster.
//!
//! Weights on the host lie where [`Hardware::with_weights_on`] says. Two plans of one request that differ in that are one
//! by [`Plan::or`], which keeps the faster candidate of each strategy.

mod baselines;
mod helm;
mod lia;
mod request;

use serde::Serialize;

pub use self::request::{Fixed, Request, countable};

use super::cost::Costs;
use super::hardware::{Energy, Hardware};
use super::memory::{Available, Memory, longest_context, memory};
use super::price::{Spilled, Stage, price};
use super::programs::{Busy, FarForecast, OperationTime, PredictedRun, far_forecast, programs};
use super::roofline::Roofline;
use super::sizes::Sizes;
use crate::Result;
use crate::program::{LayerPlacement, Placement, Policy, Residence, Side};

/// How CPU and GPU share the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// All on the CPU.
    CpuOnly,
    /// All on the GPU.
    GpuOnly,
    /// The GPU filled without a cost model, the rest computed on the CPU (llama.cpp's `--n-gpu-layers`).
    Greedy,
    /// Hugging Face Accelerate: the GPU filled, the rest copied there in each forward, nothing computed on the CPU.
    Accelerate,
    /// FlexGen: a share of the blocks on the GPU, the rest streamed.
    Flexgen,
    /// DeepSpeed ZeRO-Inference: every block streamed, keys and values on the GPU.
    ZeroInference,
    /// Every block streamed; keys and values, and attention, on either side.
    Stream,
    /// HELM.
    Helm,
    /// LIA.
    Lia,
}

impl Strategy {
    /// All, baselines first.
    pub const ALL: [Strategy; 9] = [
        Strategy::CpuOnly,
        Strategy::GpuOnly,
        Strategy::Greedy,
        Strategy::Accelerate,
        Strategy::Flexgen,
        Strategy::ZeroInference,
        Strategy::Stream,
        Strategy::Helm,
        Strategy::Lia,
    ];

    /// Among equal times the least wins: one side alone, then the systems, then the baselines.
    pub fn preference(self) -> u8 {
        match self {
            Strategy::CpuOnly => 0,
            Strategy::GpuOnly => 1,
            Strategy::Helm => 2,
            Strategy::Lia => 3,
            Strategy::Stream => 4,
            Strategy::Greedy => 5,
            Strategy::Flexgen => 6,
            Strategy::ZeroInference => 7,
            Strategy::Accelerate => 8,
        }
    }

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::CpuOnly => "cpu-only",
            Strategy::GpuOnly => "gpu-only",
            Strategy::Greedy => "greedy",
            Strategy::Accelerate => "accelerate",
            Strategy::Flexgen => "flexgen",
            Strategy::ZeroInference => "zero-inference",
            Strategy::Stream => "stream",
            Strategy::Helm => "helm",
            Strategy::Lia => "lia",
        }
    }
}

/// One way of running it.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    /// The strategy whose candidate it is.
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
    /// Seconds of one decode step, the mean over the answer.
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
    /// What decode steps take with them attended in either way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub far: Option<FarForecast>,
    /// Time by stage.
    pub stages: Vec<Stage>,
    /// Busy time by kind of operation and unit.
    pub operations: Vec<OperationTime>,
    /// How busy each unit is in prefill and in decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busy: Option<[Busy; 2]>,
    /// What the run draws and costs, on a machine whose description says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy: Option<Energy>,
    /// Bytes on each side.
    pub memory: Memory,
    /// Memory nodes with weights of the host, if not all are in the CPU's own memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights_nodes: Option<Vec<usize>>,
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
    /// What it takes, once that has been predicted.
    run: Option<Result<PredictedRun>>,
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
            run: None,
        }
    }
}

impl Planner<'_> {
    fn memory(&self, placement: &Placement, chunk: u64) -> Memory {
        memory(self.sizes, placement, &self.request.load(chunk), self.available)
    }

    /// In closed form.
    fn total(&self, placement: &Placement, chunk: u64) -> f64 {
        let t = price(self.costs, self.sizes, placement, &self.request.work(chunk));
        t.prefill + self.request.gen_len as f64 * t.step
    }

    /// Predicts by programs.
    fn predict(&self, draft: &mut Draft) {
        let work = self.request.work(draft.chunk);
        draft.run = Some(programs(self.costs, self.sizes, &draft.placement, &work));
    }

    fn pages(&self) -> usize {
        self.request.load(1).pages() as usize
    }

    fn units(&self) -> usize {
        self.sizes.units()
    }

    /// What the run draws and costs.
    fn energy(&self, run: &PredictedRun) -> Option<Energy> {
        let Request { batch, gen_len, .. } = *self.request;
        let phases = [run.prefill, run.decode].into_iter().zip(run.busy);
        let (host, gpu) = phases.fold((0.0, 0.0), |(host, gpu), (t, b)| (host + t * b.host, gpu + t * b.gpu));
        let total = run.total();
        let tokens = batch as f64 * gen_len as f64;
        self.hardware.power?.energy(total, (host / total, gpu / total), tokens, self.hardware.price.as_ref())
    }

    /// The draft as a candidate: predicted, measured, and infeasible if it does not fit.
    fn candidate(&self, strategy: Strategy, mut draft: Draft) -> Candidate {
        let memory = self.memory(&draft.placement, draft.chunk);
        let lack = memory.lack();
        let weights = self.hardware.weights.as_ref().filter(|_| memory.nodes.is_some());
        let there = self.hardware.accelerator.is_some() || !draft.placement.uses(Side::Device);
        if there && draft.run.is_none() {
            self.predict(&mut draft);
        }
        let (run, refused) = match draft.run {
            Some(Ok(run)) => (Some(run), None),
            Some(Err(e)) => (None, Some(e.to_string())),
            None => (None, None),
        };
        let of = |f: fn(&PredictedRun) -> f64| run.as_ref().map(f);
        let (prefill, decode, total) = (of(|r| r.prefill), of(|r| r.decode), of(PredictedRun::total));
        let on_gpu = |layer: &LayerPlacement| matches!(layer.weights, Residence::Device | Residence::Both);
        let ends = [draft.placement.embedding, draft.placement.head];
        let gpu_units = draft.placement.layers.iter().filter(|l| on_gpu(l)).count()
            + ends.iter().filter(|&&side| side == Side::Device).count();
        Candidate {
            strategy,
            feasible: run.is_some() && lack.is_none(),
            reason: match lack.or(refused) {
                _ if !there => "this machine has no GPU".into(),
                Some(problem) => problem,
                None => draft.reason,
            },
            k: draft.k,
            cpu_units: self.units() - gpu_units,
            gpu_units,
            t_prefill_s: prefill,
            t_decode_s: decode,
            t_decode_step_s: decode.map(|d| d / self.request.gen_len as f64),
            t_total_s: total,
            prefill_policy: draft.policies.map(|p| p.0.bits()),
            decode_policy: draft.policies.map(|p| p.1.bits()),
            pinned_blocks: draft.pinned,
            chunk: draft.chunk,
            spilled: run.as_ref().and_then(|r| r.spilled),
            far: run.as_ref().filter(|r| r.spilled.is_some()).and_then(|_| {
                let work = self.request.work(draft.chunk);
                far_forecast(self.costs, self.sizes, &draft.placement, &work).ok().flatten()
            }),
            energy: run.as_ref().and_then(|r| self.energy(r)),
            busy: run.as_ref().map(|r| r.busy),
            operations: run.as_ref().map(|r| r.operations.clone()).unwrap_or_default(),
            stages: run.map(|r| r.stages).unwrap_or_default(),
            memory,
            weights_nodes: weights.map(|on| on.nodes.clone()),
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

    /// The fastest of the drafts by their programs, of those that fit; the first if none does.
    fn fastest(&self, mut drafts: Vec<Draft>, strategy: Strategy) -> Candidate {
        let seconds = |d: &Draft| match (&d.run, self.memory(&d.placement, d.chunk).fits()) {
            (Some(Ok(run)), true) => run.total(),
            _ => f64::INFINITY,
        };
        if drafts.len() > 1 && self.hardware.accelerator.is_some() {
            drafts.iter_mut().for_each(|draft| self.predict(draft));
        }
        let times: Vec<f64> = drafts.iter().map(seconds).collect();
        let best = (0..drafts.len()).min_by(|&a, &b| times[a].total_cmp(&times[b]));
        self.candidate(strategy, drafts.swap_remove(best.expect("there is a draft")))
    }

    fn run(&self, strategy: Strategy) -> Candidate {
        let mut candidate = match strategy {
            Strategy::CpuOnly => self.cpu_only(),
            Strategy::GpuOnly => self.gpu_only(),
            Strategy::Greedy => baselines::greedy(self),
            Strategy::Accelerate => baselines::accelerate(self),
            Strategy::Flexgen => baselines::flexgen(self),
            Strategy::ZeroInference => baselines::zero_inference(self),
            Strategy::Stream => baselines::stream(self),
            Strategy::Helm => helm::candidate(self),
            Strategy::Lia => lia::candidate(self),
        };
        if let (Some(on), Some(_)) = (&self.hardware.weights, &candidate.weights_nodes) {
            candidate.reason += &match candidate.feasible {
                true => format!("; weights of the CPU's side on {}", on.describe()),
                false => format!(", with weights on {}", on.describe()),
            };
        }
        candidate
    }
}

/// Seconds of the run at every boundary that fits, for a drawing.
///
/// # Errors
/// A request that makes no sense for the model.
pub fn boundary_curve(sizes: &Sizes, hardware: &Hardware, request: &Request) -> Result<Vec<(usize, f64)>> {
    request.check(sizes)?;
    let (costs, available) = (Roofline::new(hardware, sizes), Available::new(hardware, request.gpu_memory));
    Ok(helm::curve(&Planner { sizes, hardware, request, costs: &costs, available }))
}

/// Compares `strategies` by `costs`: the analytic roofline of `hardware`, or measured tables.
///
/// # Errors
/// A request that makes no sense for the model.
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
    Ok(Plan::of(strategies.iter().map(|&s| planner.run(s)).collect()))
}

impl Plan {
    /// Chooses among candidates.
    fn of(candidates: Vec<Candidate>) -> Plan {
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
        Plan { candidates, chosen, why }
    }

    /// This plan with each candidate replaced by that of `other` where only that one fits, or is faster. `other` is of the
    /// same strategies in the same order.
    pub fn or(self, other: Plan) -> Plan {
        let seconds =
            |c: &Candidate| if c.feasible { c.t_total_s.unwrap_or(f64::INFINITY) } else { f64::INFINITY };
        let pairs = self.candidates.into_iter().zip(other.candidates);
        Plan::of(pairs.map(|(a, b)| if seconds(&b) < seconds(&a) { b } else { a }).collect())
    }
}

#[cfg(test)]
mod tests;
