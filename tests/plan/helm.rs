//! HELM's closed form of a step (HELM §4.1) and the two ways to choose its boundary, exhaustive search and greedy filling, by which the
//! paper's tables are recomputed. The planner has its own sums (`src/plan/choose/helm.rs`; `tests/cli/plan.rs` holds them against this), which count keys and values, activations
//! and staging.
//!
//! T(k) = max(Σ T_cpu, k·δ_cpu) + max(Σ T_gpu, (N−k)·δ_gpu) + T_comm, where T_comm = 0 if one side has all units.

use proptest::prelude::*;
use tandem::plan::Prefix;

/// What one step costs wherever the boundary is.
#[derive(Debug, Clone)]
pub struct Stages {
    /// Seconds of each unit on the CPU.
    pub cpu: Prefix,
    /// Seconds of each unit on the GPU.
    pub gpu: Prefix,
    /// Seconds to carry the hidden state across.
    pub comm: f64,
    /// Least seconds of a unit on the CPU, then on the GPU.
    pub issue: (f64, f64),
}

impl Stages {
    /// Units.
    pub fn units(&self) -> usize {
        self.cpu.len()
    }

    /// (T_cpu, T_gpu, T_comm) with the first `k` units on the CPU.
    pub fn split(&self, k: usize) -> (f64, f64, f64) {
        let n = self.units();
        let cpu = self.cpu.sum(0..k).max(k as f64 * self.issue.0);
        let gpu = self.gpu.sum(k..n).max((n - k) as f64 * self.issue.1);
        (cpu, gpu, if k == 0 || k == n { 0.0 } else { self.comm })
    }

    /// Seconds of a step with the first `k` units on the CPU.
    pub fn total(&self, k: usize) -> f64 {
        let (cpu, gpu, comm) = self.split(k);
        cpu + gpu + comm
    }
}

/// The boundary with the least `cost` of those that are `feasible`; of equals the smallest. `None` if none is.
pub fn search_boundary(
    units: usize,
    feasible: impl Fn(usize) -> bool,
    cost: impl Fn(usize) -> f64,
) -> Option<usize> {
    (0..=units).filter(|&k| feasible(k)).min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
}

/// The smallest feasible boundary: what filling the GPU without a cost model gives (Accelerate).
pub fn greedy_boundary(units: usize, feasible: impl Fn(usize) -> bool) -> Option<usize> {
    (0..=units).find(|&k| feasible(k))
}

/// Whether units `k..` fit in `available` bytes by the paper's rule: weights alone, the head counted even when it is the
/// embedding's matrix.
pub fn weights_fit(unit_bytes: &[u64], k: usize, available: u64) -> bool {
    unit_bytes[k..].iter().sum::<u64>() <= available
}

/// Weights alone, one bandwidth on each side.
fn stages(bytes: &[u64], cpu_bw: f64, gpu_bw: f64) -> Stages {
    Stages {
        cpu: Prefix::new(bytes.iter().map(|&b| b as f64 / cpu_bw)),
        gpu: Prefix::new(bytes.iter().map(|&b| b as f64 / gpu_bw)),
        comm: 5e-6,
        issue: (0.0, 0.0),
    }
}

proptest! {
    /// A crossing is saved only by moving everything, so units are kept large against it.
    #[test]
    fn with_weights_alone_the_search_is_greedy_filling(
        bytes in prop::collection::vec(100_000_000u64..900_000_000, 3..130),
        room in 0.0f64..1.2,
    ) {
        let s = stages(&bytes, 45e9, 218e9);
        let room = (bytes.iter().sum::<u64>() as f64 * room) as u64;
        let feasible = |k: usize| weights_fit(&bytes, k, room);
        let best = search_boundary(s.units(), feasible, |k| s.total(k));
        prop_assert_eq!(best, greedy_boundary(s.units(), feasible));
    }
}

/// Where it earns its keep: attention over long contexts that is cheap on the CPU's side of memory. Keys and values
/// of GPU units must be streamed when they do not fit beside the weights, so a larger k wins.
#[test]
fn with_keys_and_values_the_search_beats_greedy_filling() {
    let weights = vec![386_000_000u64; 38];
    let kv = 491_520_000u64; // 4 KiB a token, 120 000 tokens
    let room = 8_000_000_000u64;
    let link = 16e9;
    let spilled = |k: usize| {
        let units = (weights.len() - k) as u64;
        let left = room.saturating_sub(units * weights[0]);
        (units * kv).saturating_sub(left) as f64
    };
    let total = |k: usize| {
        let (cpu, gpu) = (k as f64, (weights.len() - k) as f64);
        let bytes = (weights[0] + kv) as f64;
        cpu * bytes / 45e9 + gpu * bytes / 218e9 + spilled(k) / link
    };
    let feasible = |k: usize| weights_fit(&weights, k, room);
    let (best, first) = (
        search_boundary(weights.len(), feasible, total).unwrap(),
        greedy_boundary(weights.len(), feasible).unwrap(),
    );
    assert!(best > first && total(best) < total(first), "{best} {first}");
}

#[test]
fn issuing_is_a_lower_bound() {
    let s = Stages { issue: (1e-3, 2e-3), ..stages(&[1000; 10], 1e9, 1e9) };
    assert_eq!(s.split(4), (4e-3, 12e-3, 5e-6));
    assert_eq!((s.split(0).2, s.split(10).2), (0.0, 0.0));
}

#[test]
fn nothing_feasible_is_no_boundary() {
    assert_eq!(search_boundary(5, |_| false, |_| 0.0), None);
    assert_eq!(greedy_boundary(5, |k| k == 5), Some(5));
}
