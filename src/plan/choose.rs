//! The candidates: every way of running a model on a machine that there is a strategy for, predicted and compared.
//!
//! ```text
//! cpu-only         all on the CPU                                        stream  every block streamed to the GPU for every step
//! gpu-only         all on the GPU                                        helm    the best boundary k, by exhaustive search
//! greedy           the GPU filled, the rest computed on the CPU          lia     the best of 64 vectors, whole blocks pinned
//! accelerate       the GPU filled, the rest copied there and waited for  in spare memory
//! flexgen          the best share of blocks on the GPU, the rest streamed ahead; keys and values, and attention, on either side
//! zero-inference   every block streamed ahead, keys and values on the GPU
//! cpu-moe          of a mixture of experts: the experts on the CPU, all else on the GPU
//! ncmoe            those of the first blocks on the CPU, as few as fit
//! experts          those of the first blocks on the CPU, and where all else is, by predicted time
//! ```
//! `greedy`, `accelerate`, `flexgen` and `zero-inference` are what others do, each as good as its own rules make it. What the user fixed
//! ([`Fixed`]) binds the strategy that it is of. A strategy is a file: a function from what all share (the planner) to its best candidate.
//!
//! | strategy | on the GPU | the other blocks | keys and values | on the CPU |
//! |---|---|---|---|---|
//! | `greedy` | as many units as fit | computed by the CPU | beside their blocks | these blocks |
//! | `accelerate` | as many blocks as fit | copied from pageable memory, each waited for | GPU | nothing |
//! | `flexgen` | a share of the blocks, searched | streamed ahead from pinned memory | either side | attention, if that is faster |
//! | `zero-inference` | nothing | streamed ahead from pinned memory | GPU | nothing |
//! | `stream` | nothing | streamed ahead from pinned memory | either side | attention, if that is faster |
//!
//! One placement has two policies: a helm candidate may stream its host blocks to the GPU for long prompts and compute
//! them in place in decode, where that is predicted to be faster.
//!
//! Weights on the host lie where [`Hardware::with_weights_on`] says. Two plans of one request that differ in that are one
//! by [`Plan::or`], which keeps the faster candidate of each strategy.

mod accelerate;
mod cpu_only;
mod experts;
mod flexgen;
mod gpu_only;
mod greedy;
mod helm;
mod lia;
mod planner;
mod request;
mod strategy;
mod stream;
mod streamed;
mod zero_inference;

use serde::Serialize;

pub use self::experts::{FEW_REQUESTS, experts_for_requests, experts_on_host};
pub use self::request::{Fixed, PlanRequest, countable};
pub use self::strategy::Strategy;

use self::planner::Planner;
use self::strategy::Ffns;

use super::bytes::Bytes;
use super::cost::Costs;
use super::experts::ExpertCounts;
use super::hardware::{Energy, Hardware};
use super::memory::Memory;
use super::price::{Spilled, UnitRun};
use super::programs::{BusyShares, FarForecast, OperationTime};
use super::roofline::Roofline;
use super::sizes::Sizes;
use crate::program::{Far, Placement};
use crate::{Error, Result};

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
    /// Of a mixture of experts: those on each side.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertCounts>,
    /// Rows of a prefill step.
    pub chunk: u64,
    /// How tokens whose pages have left the GPU are attended, if any have: as said, or in each step in the faster way.
    #[serde(skip)]
    pub way: Option<Far>,
    /// How keys and values that the GPU's pages cannot hold are attended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spilled: Option<Spilled>,
    /// What decode steps take with them attended in either way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub far: Option<FarForecast>,
    /// Time by stage.
    pub stages: Vec<UnitRun>,
    /// Busy time by kind of operation and unit.
    pub operations: Vec<OperationTime>,
    /// How busy each unit is in prefill and in decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busy: Option<[BusyShares; 2]>,
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

/// The best candidate of a strategy.
fn best_of(strategy: Strategy, planner: &Planner<'_>) -> Candidate {
    let of: fn(&Planner<'_>) -> Candidate = match strategy {
        Strategy::CpuOnly => cpu_only::candidate,
        Strategy::GpuOnly => gpu_only::candidate,
        Strategy::Greedy => greedy::candidate,
        Strategy::Accelerate => accelerate::candidate,
        Strategy::Flexgen => flexgen::candidate,
        Strategy::ZeroInference => zero_inference::candidate,
        Strategy::Stream => stream::candidate,
        Strategy::Helm => helm::candidate,
        Strategy::Lia => lia::candidate,
        Strategy::CpuMoe => experts::cpu_moe,
        Strategy::Ncmoe => experts::ncmoe,
        Strategy::Experts => experts::experts,
    };
    let mut candidate = of(planner);
    if let (Some(on), Some(_)) = (&planner.hardware.weights, &candidate.weights_nodes) {
        candidate.reason += &match candidate.feasible {
            true => format!("; weights of the CPU's side on {}", on.describe()),
            false => format!(", with weights on {}", on.describe()),
        };
    }
    candidate
}

/// Seconds of the run at every boundary that fits, for a drawing.
///
/// # Errors
/// A request that makes no sense for the model.
pub fn boundary_curve(
    sizes: &Sizes,
    hardware: &Hardware,
    request: &PlanRequest,
) -> Result<Vec<(usize, f64)>> {
    request.check(sizes)?;
    let bytes = request.outline(sizes, hardware);
    let costs = Roofline::new(hardware, sizes);
    Ok(helm::curve(&Planner { sizes, hardware, request, costs: &costs, bytes: &bytes }))
}

/// Compares `strategies` by `costs`: the analytic roofline of `hardware`, or measured tables. Memory is counted from the sizes alone.
///
/// # Errors
/// A request that makes no sense for the model.
pub fn plan_with(
    sizes: &Sizes,
    hardware: &Hardware,
    request: &PlanRequest,
    strategies: &[Strategy],
    costs: &dyn Costs,
) -> Result<Plan> {
    request.check(sizes)?;
    plan_within(&request.outline(sizes, hardware), sizes, hardware, request, strategies, costs)
}

/// Compares `strategies` by `costs` in the memory that `bytes` counts.
///
/// # Errors
/// The request fixes something that the model does not have, or vectors that cannot run; strategies that place no such model.
pub fn plan_within(
    bytes: &dyn Bytes,
    sizes: &Sizes,
    hardware: &Hardware,
    request: &PlanRequest,
    strategies: &[Strategy],
    costs: &dyn Costs,
) -> Result<Plan> {
    request.fixed.check(sizes)?;
    let ffns = match sizes.spec.experts {
        None => Ffns::Dense,
        Some(_) if bytes.computes_experts() => Ffns::Experts,
        Some(_) => Ffns::ExpertsOnHost,
    };
    let wanted = strategies.first().map_or("auto", |s| s.name());
    let strategies: Vec<Strategy> = strategies.iter().copied().filter(|s| s.places(ffns)).collect();
    if strategies.is_empty() {
        return Err(Error::Unsupported(match ffns {
            Ffns::Dense => format!("`strategy` {wanted}: this model has no experts"),
            _ => "experts that run on the CPU only for now: use `strategy` cpu-moe or cpu-only".to_owned(),
        }));
    }
    let planner = Planner { sizes, hardware, request, costs, bytes };
    Ok(Plan::of(strategies.iter().map(|&s| best_of(s, &planner)).collect()))
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
            [only] if candidates.len() == 1 => {
                format!("{}: {}", candidates[only].strategy.name(), candidates[only].reason)
            }
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
