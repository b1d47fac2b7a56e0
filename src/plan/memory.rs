//! Bytes of a placement on each side, without allocating anything.
//!
//! ```text
//! GPU    weights │ keys, values │ staging │ activations │ workspace │ kernels' modules          of --gpu-memory, or of
//! host   weights (a second layout where the GPU's differs) │ keys, values │ activations │ pinned      the hardware's
//! ```

use serde::Serialize;

use super::crossings::pinned_rows;
use super::hardware::Hardware;
use super::sizes::Sizes;
use crate::cache::PAGE_TOKENS;
use crate::device::{ExpertRows, ExpertShape, Shape, TOP_BYTES};
use crate::program::{EXPERTS_UNDER_WAY, Far, LayerPlacement, Placement, Policy, Residence, Side, Sublayer};
use crate::tensor::Half;

/// What the driver and a context keep of a GPU's nominal memory. One rule gives all of HELM's published plans: nominal
/// GB less half of one.
pub const GPU_RESERVE: u64 = 500_000_000;

/// The share of host memory that is left to the system.
const HOST_RESERVE: f64 = 0.05;

/// Loaded kernels. A bound: the embedded PTX of one architecture assembles to less.
pub const MODULES: u64 = 16 << 20;

/// Working memory of split products on the GPU: what the tiled kernels ask on a GPU of up to 148 multiprocessors.
const PRODUCT_SCRATCH: u64 = 10 << 20;

/// Tokens of a span of split attention, and rows of a sequence that are split.
const SPLIT: (u64, u64) = (512, 8);

/// Buffers on the GPU start at multiples of this.
const GRANULE: u64 = 256;

/// What a placement has to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Sequences.
    pub sequences: u64,
    /// Tokens of each, the answer included.
    pub context: u64,
    /// Most rows of a prefill step.
    pub chunk: u64,
    /// Tokens of a prompt, of which a step's rows make whole ones or a piece of one.
    pub prompt: u64,
}

impl Load {
    /// Pages of one layer.
    pub fn pages(&self) -> u64 {
        self.sequences * self.context.div_ceil(PAGE_TOKENS as u64)
    }

    /// Pages of one layer of the prompts of one step: LIA's mini-batch (LIA §5.3). Those of a prompt in pieces are all that it has.
    fn mini_batch_pages(&self) -> u64 {
        let prompts = (self.chunk / self.prompt.max(1)).clamp(1, self.sequences.max(1));
        (prompts * self.prompt.div_ceil(PAGE_TOKENS as u64)).min(self.pages())
    }

    /// Most rows of a step.
    pub(super) fn rows(&self) -> u64 {
        self.chunk.max(self.sequences)
    }
}

/// GPU memory by purpose, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct GpuMemory {
    /// Weights that stay, and tables of rotary frequencies.
    pub weights: u64,
    /// Pages of keys and values.
    pub kv: u64,
    /// Two buffers for streamed blocks (one if they are waited for), and two for keys and values that come from the host.
    pub staging: u64,
    /// Rows of a step, logits included.
    pub activations: u64,
    /// Working memory of kernels, and the lists of a step.
    pub workspace: u64,
    /// Loaded kernels.
    pub modules: u64,
    /// Bytes in all.
    pub total: u64,
    /// Bytes that the GPU has for this.
    pub available: u64,
}

/// Host memory by purpose, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct HostMemory {
    /// Weights; twice where a block is streamed and computed in place, and its layouts differ.
    pub weights: u64,
    /// Pages of keys and values.
    pub kv: u64,
    /// Rows of a step, logits included.
    pub activations: u64,
    /// Pinned buffers for what crosses the link: hidden states, queries, keys, values, attention outputs, logits.
    pub pinned: u64,
    /// Bytes in all.
    pub total: u64,
    /// Bytes that the host has for this.
    pub available: u64,
}

/// Memory nodes beside the CPU's own memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct NodeMemory {
    /// Weights of the host.
    pub weights: u64,
    /// Bytes that the nodes have for this.
    pub available: u64,
}

/// Both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Memory {
    /// On the GPU.
    pub gpu: GpuMemory,
    /// On the host: in the CPU's own memory.
    pub host: HostMemory,
    /// On the nodes where weights of the host lie, if not in the CPU's own memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeMemory>,
}

impl Memory {
    /// What keeps it from fitting, with the numbers.
    pub fn lack(&self) -> Option<String> {
        // Those of small models are not all zero.
        let needed = self.gpu.total.max(self.host.total).max(self.nodes.map_or(0, |n| n.weights));
        let (unit, bytes) = if needed < 1_000_000_000 { ("MB", 1e6) } else { ("GB", 1e9) };
        let g = |b: u64| format!("{:.2}", b as f64 / bytes);
        let (gpu, host) = (&self.gpu, &self.host);
        if gpu.total > gpu.available {
            return Some(format!(
                "needs {} {unit} of GPU memory (weights {}, KV {}, staging {}, activations {}, workspace and kernels {}), {} \
                 {unit} available",
                g(gpu.total),
                g(gpu.weights),
                g(gpu.kv),
                g(gpu.staging),
                g(gpu.activations),
                g(gpu.workspace + gpu.modules),
                g(gpu.available)
            ));
        }
        if let Some(nodes) = self.nodes.filter(|n| n.weights > n.available) {
            return Some(format!(
                "needs {} {unit} for weights on memory nodes, {} {unit} available",
                g(nodes.weights),
                g(nodes.available)
            ));
        }
        (host.total > host.available).then(|| {
            format!(
                "needs {} {unit} of host memory (weights {}, KV {}, activations {}, pinned {}), {} {unit} available",
                g(host.total),
                g(host.weights),
                g(host.kv),
                g(host.activations),
                g(host.pinned),
                g(host.available)
            )
        })
    }

    /// The same with weights of the host on memory nodes, if they are to lie there.
    pub(crate) fn with_weights_on(mut self, nodes: Option<NodesRoom>) -> Memory {
        let Some(room) = nodes else { return self };
        let own = self.host.weights / room.nodes * room.own;
        let weights = self.host.weights - own;
        self.nodes = (weights > 0).then_some(NodeMemory { weights, available: room.bytes });
        self.host.weights = own;
        self.host.total -= weights;
        self
    }

    /// More than there is anywhere.
    pub(crate) fn beyond(available: Available) -> Memory {
        let mut m = Memory::default();
        (m.gpu.available, m.host.available) = (available.gpu, available.host);
        (m.gpu.total, m.host.total) = (u64::MAX, u64::MAX);
        m
    }

    /// Whether it fits.
    pub fn fits(&self) -> bool {
        let nodes = self.nodes.is_none_or(|n| n.weights <= n.available);
        nodes && self.gpu.total <= self.gpu.available && self.host.total <= self.host.available
    }
}

/// What there is on each side: (GPU, host), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Available {
    /// On the GPU; 0 without one.
    pub gpu: u64,
    /// On the host.
    pub host: u64,
    /// On the nodes of weights, where these do not lie in the CPU's own memory.
    pub nodes: Option<NodesRoom>,
}

/// Room for weights on memory nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodesRoom {
    /// Bytes, without what is the CPU's own memory.
    pub bytes: u64,
    /// Nodes, and how many of them are the CPU's own memory: pages alternate between all of them.
    pub nodes: u64,
    /// See [`nodes`](NodesRoom::nodes).
    pub own: u64,
}

impl Available {
    /// The memory of a machine, or `gpu_memory` if the user set it.
    pub fn new(hardware: &Hardware, gpu_memory: Option<u64>) -> Available {
        let nominal = hardware.accelerator.map_or(0, |(gpu, _)| gpu.mem_bytes as u64);
        let gpu = match (hardware.accelerator, gpu_memory) {
            (None, _) => 0,
            (Some(_), Some(bytes)) => bytes.min(nominal),
            (Some(_), None) => nominal.saturating_sub(GPU_RESERVE),
        };
        let usable = |bytes: f64| (bytes * (1.0 - HOST_RESERVE)) as u64;
        let nodes = hardware.weights.as_ref().map(|on| NodesRoom {
            bytes: usable(on.bytes),
            nodes: on.nodes.len() as u64,
            own: on.own as u64,
        });
        Available { gpu, host: usable(hardware.cpu.dram_bytes), nodes }
    }
}

fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(GRANULE)
}

/// Bytes of a page of one layer.
pub fn page_bytes(sizes: &Sizes) -> u64 {
    PAGE_TOKENS as u64 * sizes.kv_token()
}

/// Which rows of experts the GPU has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum RowsOfExperts {
    None,
    /// Those that it computes.
    Own,
    /// And what the host's give.
    Divided,
}

/// Activations of `rows` rows and `logits` rows of logits on the GPU: the buffers of its workspace, with those of experts if it computes
/// some.
fn device_rows(sizes: &Sizes, rows: u64, logits: u64, experts: RowsOfExperts) -> u64 {
    let spec = &sizes.spec;
    let mut shape = Shape::of(spec, Half::BF16, Half::BF16);
    if experts == RowsOfExperts::Divided {
        shape.experts = shape.experts.map(ExpertShape::divided);
    }
    let experts = match experts {
        RowsOfExperts::None => 0,
        _ => ExpertRows::bytes(&shape, rows as usize) as u64,
    };
    let (d, q, kv, ff) = (spec.d_model as u64, spec.q_dim() as u64, spec.kv_dim() as u64, spec.d_ff as u64);
    let gate_up = if spec.gated() && !ff.is_multiple_of(8) { 8 * ff } else { 0 };
    let of_rows = [4 * d, 4 * d, 2 * d, 4 * (q + 2 * kv), 2 * q, 2 * q, gate_up, 2 * ff];
    let of_logits = [2 * d, 4 * spec.vocab as u64, 4, TOP_BYTES as u64];
    let buffers =
        of_rows.iter().map(|b| rounded(rows * b)).chain(of_logits.iter().map(|b| rounded(logits * b)));
    buffers.sum::<u64>() + experts
}

/// Activations of `rows` rows and `logits` rows of logits on the host: f32, and the widest input prepared.
fn host_rows(sizes: &Sizes, rows: u64, logits: u64) -> u64 {
    let spec = &sizes.spec;
    let (d, q, kv) = (spec.d_model as u64, spec.q_dim() as u64, spec.kv_dim() as u64);
    let ff = if spec.has_dense_ffn() { spec.d_ff as u64 } else { 0 };
    // Of experts: activations, outputs and sorted inputs of each choice, and the logits.
    let experts = spec.experts.as_ref().map_or(0, |e| {
        let (used, width, shared) = (e.used as u64, e.d_ff as u64, e.shared.unwrap_or(0) as u64);
        4 * (used * (2 * width + d) + 2 * shared + e.count as u64) + 6 * used * d.max(width)
    });
    let widest = (2 * ff).max(q + 2 * kv) + 3 * d + q;
    rows * (4 * widest + 6 * ff.max(d).max(q) + experts) + logits * 4 * spec.vocab as u64
}

/// Bytes of one of a layer's experts on the GPU; 0 for a layer without.
fn one_expert(sizes: &Sizes, layer: usize) -> u64 {
    let [up, down] = sizes.blocks[layer].experts;
    sizes.spec.experts_of(layer).map_or(0, |e| (up.device + down.device).div_ceil(e.count as u64))
}

/// Split attention: partial sums of spans.
fn attention_scratch(sizes: &Sizes, load: &Load) -> u64 {
    let spans = load.context.div_ceil(SPLIT.0);
    let rows = load.rows().min(load.sequences * SPLIT.1);
    rows * spans * sizes.spec.n_heads as u64 * (sizes.spec.head_dim as u64 + 2) * 4
}

/// Bytes of a block's weights on (GPU, host) by where they are.
fn weights(sizes: &Sizes, layer: usize, at: &LayerPlacement) -> (u64, u64) {
    let bytes = sizes.placed(layer, at);
    match at.weights {
        Residence::Device => (rounded(bytes.device), 0),
        Residence::Host => (0, bytes.host),
        Residence::Both => (rounded(bytes.device), bytes.host),
        Residence::StreamedExperts => {
            let twice = at.computes_on_host() && !sizes.one_layout;
            (rounded(bytes.device), sizes.staged(layer, at) + if twice { bytes.host } else { 0 })
        }
        Residence::Streamed => {
            let twice = at.computes_on_host() && !sizes.one_layout;
            (0, bytes.device + if twice { bytes.host } else { 0 })
        }
    }
}

/// Whether attention runs on another side than the block's keys and values are on.
fn kv_crosses(at: &LayerPlacement, policy: Policy) -> bool {
    [Sublayer::Scores, Sublayer::Values].iter().any(|&s| policy.side(s) == Side::Device)
        && at.kv == Side::Host
}

/// The dry run; pages that have left the GPU are attended in either way.
pub fn memory(sizes: &Sizes, placement: &Placement, load: &Load, available: Available) -> Memory {
    memory_with(sizes, placement, load, available, None)
}

/// The dry run with pages that have left the GPU attended as `far` says: two staging areas for those of a block unless they are
/// attended in place.
pub(super) fn memory_with(
    sizes: &Sizes,
    placement: &Placement,
    load: &Load,
    available: Available,
    far: Option<Far>,
) -> Memory {
    let spec = &sizes.spec;
    let mut m = Memory::default();
    (m.gpu.available, m.host.available) = (available.gpu, available.host);
    let (pages, page) = (load.pages(), page_bytes(sizes));
    let spilled = pages.saturating_sub(placement.device_pages as u64);
    let mut staged_kv = 0;
    let mut largest = None;
    for (i, layer) in placement.layers.iter().enumerate() {
        let (gpu, host) = weights(sizes, i, layer);
        m.gpu.weights += gpu;
        m.host.weights += host;
        if layer.weights.is_staged() {
            largest = largest.max(Some(sizes.staged(i, layer)));
        }
        match layer.kv {
            Side::Host => m.host.kv += pages * page,
            Side::Device => {
                m.gpu.kv += rounded((pages - spilled) * page);
                m.host.kv += spilled * page;
            }
        }
        // A decode step attends all sequences, a prefill step those of its prompts.
        if kv_crosses(layer, layer.decode) {
            staged_kv = pages * page;
        } else if kv_crosses(layer, layer.prefill) {
            staged_kv = staged_kv.max(load.mini_batch_pages() * page);
        } else if layer.kv == Side::Device && far != Some(Far::Attend) {
            staged_kv = staged_kv.max(spilled * page);
        }
    }
    if let Some(bytes) = largest {
        m.gpu.staging += placement.staging.buffers() as u64 * rounded(bytes);
    }
    m.gpu.staging += 2 * rounded(staged_kv);
    let divided = placement.layers.iter().enumerate().filter(|(_, at)| at.is_divided());
    let under_way = divided.map(|(layer, _)| one_expert(sizes, layer)).max().unwrap_or(0);
    m.gpu.staging += rounded(EXPERTS_UNDER_WAY as u64 * under_way);
    m.host.pinned += EXPERTS_UNDER_WAY as u64 * under_way;

    // Embedding and head: one matrix where they are one tensor and on one side.
    for side in [Side::Host, Side::Device] {
        let (embeds, heads) = (placement.embedding == side, placement.head == side);
        let mut bytes = if embeds { sizes.embedding.on(side) } else { 0 };
        bytes += if heads { sizes.head.on(side) } else { 0 };
        bytes -= if embeds && heads { sizes.shared_table.on(side) } else { 0 };
        match side {
            Side::Host => m.host.weights += bytes,
            Side::Device => m.gpu.weights += rounded(bytes),
        }
    }

    let (rows, logits) = (load.rows(), load.sequences);
    let layers = || placement.layers.iter();
    let on_device = placement.uses(Side::Device);
    let on_host = placement.uses(Side::Host);
    if on_device {
        let blocks = placement.layers.iter().zip(&sizes.blocks);
        let experts = blocks.map(|(at, b)| match b.has_experts() && at.computes_ffn_on(Side::Device) {
            true if at.is_divided() => RowsOfExperts::Divided,
            true => RowsOfExperts::Own,
            false => RowsOfExperts::None,
        });
        let experts = experts.max().unwrap_or(RowsOfExperts::None);
        let logits_there = if placement.head == Side::Device { logits } else { 0 };
        m.gpu.activations = device_rows(sizes, rows, logits_there, experts);
        m.gpu.workspace = PRODUCT_SCRATCH
            + rounded(attention_scratch(sizes, load))
            + rounded(8 * 8 * rows)
            + rounded(4 * pages * 2);
        m.gpu.modules = MODULES;
        if let crate::model::Position::Rope(rope) = &spec.position {
            m.gpu.weights +=
                rounded(4 * rope.dim as u64 * load.context) * if rope.local_theta.is_some() { 2 } else { 1 };
        }
        m.host.pinned += 4 * spec.vocab as u64 * logits;
    }
    let computes_on_host = placement.embedding == Side::Host
        || placement.head == Side::Host
        || layers().any(|l| l.uses(Side::Host));
    if computes_on_host {
        m.host.activations = host_rows(sizes, rows, if placement.head == Side::Host { logits } else { 0 });
    }
    if on_device && on_host {
        m.host.pinned += pinned_rows(sizes, placement, rows, false);
    }
    if spilled > 0 && layers().any(|l| l.kv == Side::Device) {
        m.host.pinned +=
            pinned_rows(sizes, placement, rows, true) - pinned_rows(sizes, placement, rows, false);
    }
    m.gpu.total =
        m.gpu.weights + m.gpu.kv + m.gpu.staging + m.gpu.activations + m.gpu.workspace + m.gpu.modules;
    m.host.total = m.host.weights + m.host.kv + m.host.activations + m.host.pinned;
    m.with_weights_on(available.nodes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Limits, Workspace};
    use crate::model::synth;

    const GB: u64 = 1_000_000_000;

    fn sizes(name: &str) -> Sizes {
        Sizes::of_spec(&synth::parse(name).unwrap().spec)
    }

    fn load() -> Load {
        Load { sequences: 1, context: 640, chunk: 512, prompt: 512 }
    }

    #[test]
    fn activations_are_the_buffers_of_the_workspace() {
        for name in ["qwen3-8b", "opt-6.7b", "tiny-gemma3", "qwen3-30b-a3b", "tiny-qwen2-moe"] {
            let s = sizes(name);
            let spec = &s.spec;
            let shape = Shape::of(spec, Half::BF16, Half::BF16);
            let limits = Limits { rows: 512, logit_rows: 3, sequences: 3, pages_per_sequence: 20 };
            let want: usize = Workspace::sizes(&shape, &limits, false, false, 0)
                .iter()
                .map(|b| b.next_multiple_of(256))
                .sum();
            let experts = if spec.experts.is_some() { RowsOfExperts::Own } else { RowsOfExperts::None };
            assert_eq!(device_rows(&s, 512, 3, experts), want as u64, "{name}");
            assert_eq!(page_bytes(&s), shape.page_bytes() as u64);
        }
    }

    #[test]
    fn all_on_one_side_takes_nothing_of_the_other() {
        let s = sizes("qwen3-8b");
        let room = Available { gpu: 24 * GB, host: 64 * GB, nodes: None };
        let cpu = memory(&s, &Placement::all(Side::Host, 36, 20), &load(), room);
        assert_eq!(cpu.gpu, GpuMemory { available: 24 * GB, ..GpuMemory::default() });
        assert_eq!(cpu.host.weights, s.model().host);
        assert_eq!(cpu.host.kv, 640 * 147_456);
        assert_eq!(cpu.host.pinned, 0);
        let gpu = memory(&s, &Placement::all(Side::Device, 36, 20), &load(), room);
        assert_eq!((gpu.host.weights, gpu.host.kv, gpu.host.activations), (0, 0, 0));
        assert_eq!(gpu.gpu.kv, cpu.host.kv);
        assert_eq!(gpu.gpu.staging, 0);
        assert!(gpu.gpu.weights >= s.model().device);
    }

    #[test]
    fn a_tied_matrix_counts_once_where_both_uses_are_on_one_side() {
        let s = sizes("qwen3-4b");
        let room = Available { gpu: 24 * GB, host: 64 * GB, nodes: None };
        let table = (s.spec.vocab * s.spec.d_model * 2) as u64;
        let all = memory(&s, &Placement::all(Side::Host, 36, 20), &load(), room).host.weights;
        assert_eq!(all, s.model().host - table);
        let split = memory(&s, &Placement::boundary(37, 36, 0, 20), &load(), room);
        assert_eq!(split.host.weights, all - s.spec.d_model as u64 * 2);
        assert!(split.gpu.weights >= table);
    }

    #[test]
    fn streaming_needs_two_blocks_and_a_second_layout_only_where_layouts_differ() {
        let mut s = sizes("qwen3-8b");
        let room = Available { gpu: 24 * GB, host: 64 * GB, nodes: None };
        let mut placement = Placement::all(Side::Host, 36, 20);
        for l in &mut placement.layers {
            (l.weights, l.prefill) = (Residence::Streamed, Policy::all(Side::Device));
        }
        let one = memory(&s, &placement, &load(), room);
        assert_eq!(one.host.weights, s.model().host);
        assert!(one.gpu.staging >= 2 * s.blocks[0].total().device);
        s.one_layout = false;
        let two = memory(&s, &placement, &load(), room);
        assert_eq!(two.host.weights - one.host.weights, 36 * s.blocks[0].total().host);
    }
}
