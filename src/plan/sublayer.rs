//! LIA: each of the six sublayers of a block on the CPU or the GPU, by 64 vectors (LIA §5).
//!
//! ```text
//! p_i = 1: the CPU computes sublayer i        1 QKV   2 Q·Kᵀ   3 S·V   4 out-projection   5 FC1   6 FC2        p_0 = p_6
//! load X_i      if p_i ≠ p_{i−1}                     keys, values in prefill  made by sublayer 1: moved if p_i ≠ p_1
//! load Y_i      if p_i = 0, Y_i not on the GPU       new keys, values         stored on their side if p_1 is the other
//! load residual at i = 4 if p_4 ≠ p_1, at i = 6 if p_6 ≠ p_4
//! compute       (D_X + D_Y)/BW + C/TH of the side
//! ```
//! The printed conditions of equations (5), (8) and (9) have the sides exchanged, and the residual at i = 6 has the size
//! of X_6; both are put right here. A key or value that sublayer 1 has already stored on the side that attends is not
//! moved twice. Costs know what is resident: a block whose weights, or keys and values, are on the GPU loads neither.
//! Queries and KV heads may differ in number, the feed-forward may have a gate.
//!
//! With overlap (LIA §5.3) what is known before the block begins (weights; stored keys and values in decode) is loaded
//! under the compute of the block before: a block costs the larger of the two. Without, all adds up.

use super::cost::{Batch, Costs, Direction};
use super::sizes::{ELEMENT, Sizes};
use crate::program::{Phase, Policy, Residence, Side, Sublayer};

/// Where a block's weights, keys and values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resident {
    /// Weights; [`Residence::Host`] and [`Residence::Streamed`] are the same here: on the host.
    pub weights: Residence,
    /// Keys and values.
    pub kv: Side,
}

impl Resident {
    /// All on the host: LIA without pinned blocks.
    pub const HOST: Resident = Resident { weights: Residence::Host, kv: Side::Host };
    /// All on the GPU.
    pub const DEVICE: Resident = Resident { weights: Residence::Device, kv: Side::Device };

    /// Whether the CPU would need weights, or keys and values, that only the GPU has.
    pub fn forbids(self, policy: Policy) -> bool {
        let attends = [Sublayer::Scores, Sublayer::Values];
        self.weights == Residence::Device && Sublayer::PRODUCTS.iter().any(|&s| policy.side(s) == Side::Host)
            || self.kv == Side::Device && attends.iter().any(|&s| policy.side(s) == Side::Host)
    }
}

/// Seconds of one block in one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BlockTime {
    /// Both sides' compute.
    pub compute: f64,
    /// Transfers that the compute waits for: hidden states, residuals, queries, outputs, keys and values just made.
    pub exchange: f64,
    /// Transfers that can run under the block before: weights, stored keys and values.
    pub load: f64,
    /// Keys and values that are stored on the host after they are made: nothing in this step waits for them.
    pub store: f64,
}

impl BlockTime {
    /// All one after the other.
    pub fn serial(&self) -> f64 {
        self.compute + self.exchange + self.load + self.store
    }

    /// Loads and stores under the compute of neighbouring blocks, each on its own direction of the link.
    pub fn overlapped(&self) -> f64 {
        (self.compute + self.exchange).max(self.load).max(self.store)
    }

    /// One or the other.
    pub fn total(&self, overlap: bool) -> f64 {
        if overlap { self.overlapped() } else { self.serial() }
    }
}

/// Seconds of block `layer` by `policy`. `before` is the side of the sublayer before it: p_6 of the same vector in the
/// middle of equal blocks.
pub fn block_time(
    costs: &dyn Costs,
    sizes: &Sizes,
    layer: usize,
    policy: Policy,
    before: Side,
    at: Resident,
    batch: &Batch<'_>,
) -> BlockTime {
    let (spec, rows) = (&sizes.spec, batch.rows());
    let p = |s: Sublayer| policy.side(s);
    let mut t = BlockTime::default();
    let to = |side: Side, bytes: u64| {
        let direction = if side == Side::Device { Direction::ToDevice } else { Direction::ToHost };
        costs.transfer(direction, bytes)
    };
    let new_half = rows * spec.kv_dim() as u64 * ELEMENT;
    let stored_half = {
        let window = sizes.blocks[layer].window;
        let all = batch.tokens_read(window) * sizes.kv_token() / 2;
        let own = rows * sizes.kv_token() / 2;
        all.saturating_sub(if batch.groups.iter().any(|g| g.causal) { own } else { 0 })
    };
    let mut previous = before;
    for sublayer in Sublayer::ALL {
        let side = p(sublayer);
        let attends = matches!(sublayer, Sublayer::Scores | Sublayer::Values);
        if side != previous {
            t.exchange += to(side, incoming_bytes(sizes, layer, sublayer, batch));
        }
        if attends {
            // What this step has made lies where sublayer 1 ran, and will lie where it is kept.
            if side != p(Sublayer::Qkv) && side != at.kv {
                t.exchange += to(side, new_half);
            }
            if side != at.kv {
                t.load += to(side, stored_half);
            }
        } else {
            let weights = sizes.blocks[layer].of(sublayer).device;
            if side == Side::Device && !at.weights.stays_on_device(sublayer) {
                t.load += costs.stream(weights);
            }
        }
        let residual = match sublayer {
            Sublayer::Out => p(Sublayer::Out) != p(Sublayer::Qkv),
            Sublayer::Down => p(Sublayer::Down) != p(Sublayer::Out),
            _ => false,
        };
        if residual {
            t.exchange += to(side, sizes.hidden(rows));
        }
        previous = side;
    }
    if p(Sublayer::Qkv) != at.kv {
        // Attention on the side that keeps them waits for them; otherwise nobody in this step does.
        let waits = p(Sublayer::Scores) == at.kv || p(Sublayer::Values) == at.kv;
        let seconds = to(at.kv, 2 * new_half);
        if waits { t.exchange += seconds } else { t.store += seconds }
    }
    t.compute = compute(costs, layer, policy, batch);
    t
}

/// Both sides' compute of a block.
fn compute(costs: &dyn Costs, layer: usize, policy: Policy, batch: &Batch<'_>) -> f64 {
    let one = |s: Sublayer| costs.sublayer(policy.side(s), layer, s, batch);
    let attention = match policy.attention() {
        Some(side) => costs.attention(side, layer, batch),
        None => one(Sublayer::Scores) + one(Sublayer::Values),
    };
    attention + Sublayer::PRODUCTS.into_iter().map(one).sum::<f64>()
}

/// Bytes of X_i: activations that a sublayer takes from the one before.
pub fn incoming_bytes(sizes: &Sizes, layer: usize, sublayer: Sublayer, batch: &Batch<'_>) -> u64 {
    let (spec, rows) = (&sizes.spec, batch.rows());
    match sublayer {
        Sublayer::Qkv | Sublayer::Up => sizes.hidden(rows),
        Sublayer::Scores | Sublayer::Out => rows * spec.q_dim() as u64 * ELEMENT,
        // A score for each query head.
        Sublayer::Values => batch.pairs(sizes.blocks[layer].window) * spec.n_heads as u64 * ELEMENT,
        Sublayer::Down => rows * spec.d_ff as u64 * ELEMENT,
    }
}

/// A policy and what it costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Priced {
    /// The vector.
    pub policy: Policy,
    /// Seconds of a block.
    pub seconds: f64,
}

/// All 64 vectors that a block with these residents allows, in the order of their bits.
pub fn policies(at: Resident) -> impl Iterator<Item = Policy> {
    (0u8..64)
        .map(|n| Policy::from_bits(std::array::from_fn(|i| n >> (5 - i) & 1 == 1)))
        .filter(move |&p| !at.forbids(p))
}

/// The cheapest of all vectors for a block among blocks like it, and the cheapest of those that an engine can run. Of
/// equals the one with fewer sublayers on the CPU.
pub fn best_policies(
    costs: &dyn Costs,
    sizes: &Sizes,
    layer: usize,
    at: Resident,
    batch: &Batch<'_>,
    overlap: bool,
) -> (Priced, Priced) {
    let price = |policy: Policy| {
        let before = policy.side(Sublayer::Down);
        let seconds = block_time(costs, sizes, layer, policy, before, at, batch).total(overlap);
        Priced { policy, seconds }
    };
    let least = |only_runnable: bool| {
        policies(at)
            .filter(|&p| !only_runnable || runs(sizes, p))
            .map(price)
            .min_by(|a, b| a.seconds.total_cmp(&b.seconds))
            .expect("all on the GPU is never forbidden")
    };
    (least(false), least(true))
}

/// Whether an engine can run a vector of this model. Where the outputs of sublayers are normed, the sublayers on either side of the
/// norm are on one side; and both parts of experts are.
fn runs(sizes: &Sizes, policy: Policy) -> bool {
    const TOGETHER: [Policy; 3] =
        [Policy::all(Side::Device), Policy::all(Side::Host), Policy::ATTENTION_ON_HOST];
    let whole = sizes.spec.experts.is_none() || policy.side(Sublayer::Up) == policy.side(Sublayer::Down);
    policy.attention().is_some() && whole && (!sizes.spec.post_norms || TOGETHER.contains(&policy))
}

/// Why a vector cannot be run.
pub fn refusal(policy: Policy) -> Option<String> {
    let bits = policy.bits().map(|b| b.to_string()).join(",");
    policy.attention().is_none().then(|| {
        format!(
            "({bits}): Q·Kᵀ and S·V on different sides; scores and values share one pass over the keys and values, so \
             this vector is priced and not run"
        )
    })
}

/// The number of rows from which weights are better streamed to the GPU than used on the CPU, without overlap: LIA's
/// thresholds in closed form, for 16-bit weights (2 bytes and 2 FLOPs a row each).
///
/// n* = (1/BW_link + 1/BW_gpu − 1/BW_cpu) / (1/TH_cpu − 1/TH_gpu); independent of the model. `None`: never.
pub fn streaming_threshold(
    link: f64,
    gpu_bw: f64,
    cpu_bw: f64,
    cpu_flops: f64,
    gpu_flops: f64,
) -> Option<f64> {
    let (gain, cost) = (1.0 / cpu_flops - 1.0 / gpu_flops, 1.0 / link + 1.0 / gpu_bw - 1.0 / cpu_bw);
    (gain > 0.0).then(|| (cost / gain).max(0.0))
}

/// The best vectors for a batch of `sequences` and prompts of `tokens`: (prefill, decode), each (any, runnable).
pub fn batch_policies(
    costs: &dyn Costs,
    sizes: &Sizes,
    sequences: u64,
    tokens: u64,
    overlap: bool,
) -> ((Priced, Priced), (Priced, Priced)) {
    use super::cost::Group;
    let prompts = [Group::prompts(sequences, tokens)];
    let decode = [Group::decode(sequences, tokens)];
    let of = |phase, groups: &[Group]| {
        best_policies(costs, sizes, 0, Resident::HOST, &Batch { phase, groups }, overlap)
    };
    (of(Phase::Prefill, &prompts), of(Phase::Decode, &decode))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth;
    use crate::plan::cost::{Group, Scan};
    use crate::plan::{Roofline, hardware};

    fn sizes(name: &str) -> Sizes {
        Sizes::of_spec(&synth::parse(name).unwrap().spec)
    }

    fn bits(p: Policy) -> String {
        p.bits().map(|b| b.to_string()).concat()
    }

    /// What pinned blocks save: no loads, and the all-GPU vector.
    #[test]
    fn a_resident_block_is_not_loaded() {
        let (h, s) = (hardware::named("a100-spr").unwrap(), sizes("opt-30b"));
        let costs = Roofline::serial(&h, &s);
        let groups = [Group::decode(4, 100)];
        let batch = Batch::decode(&groups);
        let gpu = Policy::all(Side::Device);
        let t = |at| block_time(&costs, &s, 0, gpu, Side::Device, at, &batch);
        assert_eq!((t(Resident::DEVICE).load, t(Resident::DEVICE).store), (0.0, 0.0));
        assert!(t(Resident::HOST).load > 1e9 / 25e9 && t(Resident::HOST).store > 0.0);
        assert_eq!(bits(best_policies(&costs, &s, 0, Resident::DEVICE, &batch, false).0.policy), "000000");
        assert_eq!(policies(Resident::DEVICE).count(), 1);
        // Weights on the GPU, keys and values on the host: attention goes where they are.
        let pinned = Resident { weights: Residence::Device, kv: Side::Host };
        let groups = [Group::decode(64, 2000)];
        assert_eq!(
            bits(best_policies(&costs, &s, 0, pinned, &Batch::decode(&groups), true).0.policy),
            "011000"
        );
    }

    /// Every term by hand, on round numbers, for (1,0,0,1,1,1) in decode: QKV on the CPU, attention on the GPU.
    #[test]
    fn transfers_are_the_formulas() {
        struct Bytes;
        impl Costs for Bytes {
            fn embed(&self, _: Side, _: u64) -> f64 {
                0.0
            }
            fn sublayer(&self, _: Side, _: usize, _: Sublayer, _: &Batch<'_>) -> f64 {
                1.0
            }
            fn attend(&self, _: Side, _: usize, _: &Scan) -> f64 {
                2.0
            }
            fn head(&self, _: Side, _: u64) -> f64 {
                0.0
            }
            fn copy(&self, _: Side, _: u64) -> f64 {
                0.0
            }
            fn transfer(&self, _: Direction, bytes: u64) -> f64 {
                bytes as f64
            }
            fn issue(&self, _: Side) -> f64 {
                0.0
            }
        }
        let s = sizes("tiny-llama"); // d 256, 4 query heads and 2 KV heads of 64, I 512
        let groups = [Group::decode(3, 10)];
        let batch = Batch::decode(&groups);
        let policy = Policy::from_bits([true, false, false, true, true, true]);
        let t = block_time(&Bytes, &s, 0, policy, Side::Host, Resident::HOST, &batch);
        let (q, new, stored, out) = (3 * 256 * 2, 2 * 3 * 128 * 2, 2 * 3 * 10 * 128 * 2, 3 * 256 * 2);
        assert_eq!((t.exchange, t.load), ((q + new + out) as f64, stored as f64));
        assert_eq!((t.store, t.compute), (0.0, 6.0));
        // (0,1,1,0,0,0): hidden stays, q down, attention up, residual stays; K and V stored, and waited for.
        let t = block_time(&Bytes, &s, 0, Policy::ATTENTION_ON_HOST, Side::Device, Resident::HOST, &batch);
        assert_eq!(t.exchange, (q + new + out) as f64);
        assert_eq!(t.load, s.blocks[0].total().device as f64);
        // FC2 alone on the GPU: X_6 and the residual of width d up, the result down at the next block's QKV.
        let policy = Policy::from_bits([true, true, true, true, true, false]);
        let t = block_time(&Bytes, &s, 0, policy, Side::Device, Resident::HOST, &batch);
        assert_eq!(t.exchange, (3 * 512 * 2 + 3 * 256 * 2 + 3 * 256 * 2) as f64);
    }

    #[test]
    fn split_attention_vectors_are_priced_and_refused() {
        let split = Policy::from_bits([false, true, false, false, false, false]);
        assert!(refusal(split).unwrap().starts_with("(0,1,0,0,0,0): Q·Kᵀ and S·V on different sides"));
        assert_eq!(refusal(Policy::ATTENTION_ON_HOST), None);
        assert_eq!(policies(Resident::HOST).count(), 64);
        assert_eq!(policies(Resident::HOST).filter(|p| refusal(*p).is_some()).count(), 32);
    }

    #[test]
    fn overlap_hides_the_smaller_of_compute_and_loads() {
        let t = BlockTime { compute: 3.0, exchange: 1.0, load: 5.0, store: 0.5 };
        assert_eq!((t.serial(), t.overlapped()), (9.5, 5.0));
        assert_eq!(BlockTime { load: 2.0, ..t }.overlapped(), 4.0);
    }

    #[test]
    fn the_threshold_needs_a_faster_gpu() {
        assert_eq!(streaming_threshold(25e9, 1555e9, 260e9, 20e12, 10e12), None);
        assert_eq!(streaming_threshold(25e9, 1555e9, 10e9, 20e12, 150e12), Some(0.0));
    }
}
