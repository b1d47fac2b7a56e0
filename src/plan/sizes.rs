//! Bytes of a model's parts, from its sizes alone or from the tensors of a loaded model.
//!
//! ```text
//! W_attn = e·(d·h_a·d_h + 2·d·h_kv·d_h + h_a·d_h·d)      W_ffn = e·3·d·I (gated), e·2·d·I        (HELM §4.1, LIA §3)
//! W_experts = e·3·d·I_e each; B rows read D(B) = E·(1 − (1 − k/E)^B) of E, each expert as likely as any other, or by the router's
//! profile D(B) = Σ_e 1 − (1 − p_e)^B
//! keys and values per token and layer = 2·h_kv·d_h·e, in 8 bits 2·h_kv·(d_h + 4)      hidden row = d·e
//! ```

use std::sync::Arc;

use super::experts::SharesRead;
use crate::cache::KvType;
use crate::model::{self, Experts, FeedForward, Mlp, ModelSpec, Norm, Position, RouterProfile, Weights};
use crate::program::{LayerPlacement, Residence, Side, Sublayer};
use crate::simd::Isa;
use crate::simd::linear::{Linear, Packed};
use crate::tensor::Tensor;

/// Bytes of an element of activations, and of the weights of a model given by its sizes: bf16, f16.
pub const ELEMENT: u64 = 2;

/// Bytes that an allocation on the device is rounded up to.
const GRANULE: u64 = 256;

/// Tensors of the first part of attention's sublayer.
const QKV: [&str; 7] =
    ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_sinks"];

/// The same thing as the kernels of each side lay it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TwoSided {
    /// In host memory, for the CPU's kernels.
    pub host: u64,
    /// In device memory.
    pub device: u64,
}

impl TwoSided {
    fn same(bytes: u64) -> TwoSided {
        TwoSided { host: bytes, device: bytes }
    }

    /// The share `of` of it.
    fn share(self, of: f64) -> TwoSided {
        let part = |bytes: u64| (bytes as f64 * of).round() as u64;
        TwoSided { host: part(self.host), device: part(self.device) }
    }

    fn add(self, other: TwoSided) -> TwoSided {
        TwoSided { host: self.host + other.host, device: self.device + other.device }
    }

    /// Bytes on one side.
    pub fn on(&self, side: Side) -> u64 {
        match side {
            Side::Host => self.host,
            Side::Device => self.device,
        }
    }
}

/// Weights of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Queries, keys and values; their norm and biases.
    pub qkv: TwoSided,
    /// Output projection.
    pub out: TwoSided,
    /// First matrices of the feed-forward, and its norm.
    pub up: TwoSided,
    /// Second matrix of the feed-forward.
    pub down: TwoSided,
    /// What of `up` and of `down` belongs to experts of which a row uses some.
    pub experts: [TwoSided; 2],
    /// Tokens that a query sees, if not all.
    pub window: Option<u64>,
}

impl Block {
    /// Bytes of one sublayer; scores and values have no weights.
    pub fn of(&self, sublayer: Sublayer) -> TwoSided {
        match sublayer {
            Sublayer::Qkv => self.qkv,
            Sublayer::Scores | Sublayer::Values => TwoSided::default(),
            Sublayer::Out => self.out,
            Sublayer::Up => self.up,
            Sublayer::Down => self.down,
        }
    }

    /// Bytes of one sublayer that a row need not read, because it belongs to experts.
    fn of_experts(&self, sublayer: Sublayer) -> TwoSided {
        match sublayer {
            Sublayer::Up => self.experts[0],
            Sublayer::Down => self.experts[1],
            _ => TwoSided::default(),
        }
    }

    /// Whether its feed-forward is a mixture of experts.
    pub fn has_experts(&self) -> bool {
        self.experts != [TwoSided::default(); 2]
    }

    /// Bytes of all sublayers.
    pub fn total(&self) -> TwoSided {
        self.qkv.add(self.out).add(self.up).add(self.down)
    }

    /// Bytes of its feed-forward.
    pub fn feed_forward(&self) -> TwoSided {
        self.up.add(self.down)
    }

    /// Bytes of a block that is placed so, of whose experts there are `experts`: the device has none that the host computes, unless the
    /// block is streamed, which brings all of it.
    pub fn placed(&self, at: &LayerPlacement, experts: usize) -> TwoSided {
        let all = self.total();
        if at.is_divided() && self.has_experts() {
            let of_experts =
                self.experts[0].add(self.experts[1]).share(1.0 - share_of(at.device_experts, experts));
            return TwoSided { device: all.device - of_experts.device + 4 * experts as u64, ..all };
        }
        match self.has_experts() && !at.images_experts() {
            true => TwoSided { device: self.qkv.add(self.out).device, ..all },
            false => all,
        }
    }
}

/// The share of `count` experts that `n` of them are.
fn share_of(n: u16, count: usize) -> f64 {
    f64::from(n) / count.max(1) as f64
}

/// For each layer with experts, choices of a row that fall on its 0, 1, 2... most used ones.
fn most_used(router: &RouterProfile) -> Arc<[Vec<f64>]> {
    let of = |l: usize| {
        let mut sum = 0.0;
        let each = router.by_use(l).into_iter().map(|e| {
            sum += router.probability(l, e);
            sum
        });
        [0.0].into_iter().chain(each).collect()
    };
    (0..router.layers.len()).filter(|&l| router.experts(l) > 0).map(of).collect()
}

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct Sizes {
    /// The model.
    pub spec: ModelSpec,
    /// Its blocks.
    pub blocks: Vec<Block>,
    /// The embedding's table, and that of positions.
    pub embedding: TwoSided,
    /// The head's matrix and the last norm; counted also where it is the embedding's.
    pub head: TwoSided,
    /// Whether embedding and head are one allocation where both are on one side.
    pub shared_table: TwoSided,
    /// Whether both sides read a block in one layout, so that one copy in host memory serves both.
    pub one_layout: bool,
    /// How keys and values are stored.
    kv: KvType,
    /// Which experts rows read; `None`: each is as likely as any other.
    router: Option<Arc<SharesRead>>,
    /// For each layer with experts, choices of a row that fall on its 0, 1, 2... most used ones; `None`: each is as likely as any other.
    most_used: Option<Arc<[Vec<f64>]>>,
}

impl Sizes {
    /// The same where rows choose experts as `router` says, which was [checked](RouterProfile::check) against the model.
    ///
    /// # Panics
    /// If it is of another number of layers.
    pub fn with_router(self, router: RouterProfile) -> Sizes {
        assert_eq!(router.layers.len(), self.layers(), "layers of a router's profile");
        let sizes = self.with_most_used(&router);
        Sizes { router: Some(Arc::new(SharesRead::of(router))), ..sizes }
    }

    /// The same where divided layers have the experts on the GPU that `router` says are most used. Of whole layers rows read as many
    /// experts as without it.
    pub fn with_most_used(self, router: &RouterProfile) -> Sizes {
        Sizes { most_used: Some(most_used(router)), ..self }
    }

    /// Whether a router's profile says which experts are read.
    pub fn has_router(&self) -> bool {
        self.router.is_some()
    }

    /// Bytes of the weights of a sublayer that `rows` rows read: all but those of experts that none of them is expected to use.
    pub fn read(&self, layer: usize, sublayer: Sublayer, rows: u64) -> TwoSided {
        let (block, all) = (&self.blocks[layer], self.blocks[layer].of(sublayer));
        let Some(e) = self.spec.experts_of(layer) else { return all };
        let read = match &self.router {
            None => e.distinct(rows) / e.count as f64,
            Some(router) => router.of_layer(layer, rows),
        };
        // The sum over all experts may exceed their number by a rounding.
        let unused = block.of_experts(sublayer).share((1.0 - read).max(0.0));
        TwoSided { host: all.host - unused.host, device: all.device - unused.device }
    }

    /// Bytes of a block that is placed so.
    pub fn placed(&self, layer: usize, at: &LayerPlacement) -> TwoSided {
        let experts = self.spec.experts_of(layer).map_or(0, |e| e.count);
        self.blocks[layer].placed(at, experts)
    }

    /// Seconds of `rows` rows' products with the experts of a layer that `side` has, where the device has `device_experts` of them and
    /// the host the others; `all`: seconds of so many rows' products with all of them. 0 `device_experts`: the layer is not divided.
    ///
    /// Reading takes no longer than for one row times the experts that are read, and no longer than its share of all that is read for these
    /// rows; multiplying, the share of the choices. In the mean over the layers, so that planners need not tell them apart.
    pub fn seconds_of_experts(
        &self,
        layer: usize,
        side: Side,
        device_experts: u16,
        rows: u64,
        all: impl Fn(u64) -> f64,
    ) -> f64 {
        let Some(e) = self.spec.experts_of(layer).filter(|_| device_experts > 0 && rows > 0) else {
            return all(rows);
        };
        let (here, used) = (usize::from(device_experts).min(e.count), e.used as f64);
        let count = if side == Side::Device { here } else { e.count - here };
        let every = match &self.router {
            None => e.distinct(rows),
            Some(router) => e.count as f64 * router.of_layer(layer, rows),
        };
        let (of_one, of_all) = (all(1), all(rows));
        // A layer's, by the choices of a row that fall on the device's experts; those of a side as likely as each other.
        let seconds = |of_device: f64| {
            let uses = if side == Side::Device { of_device } else { used - of_device };
            let read = model::distinct(count, uses, rows);
            (of_one * read / used).min(of_all * read / every).max(of_all * uses / used)
        };
        match &self.most_used {
            None => seconds(used * share_of(device_experts, e.count)),
            Some(layers) => layers.iter().map(|uses| seconds(uses[here])).sum::<f64>() / layers.len() as f64,
        }
    }

    /// The mean over the blocks of what `of` gives for a block's window. It is asked once for each window that there is.
    pub fn mean_by_window(&self, of: impl Fn(Option<u64>) -> u64) -> u64 {
        let mut windows: Vec<(Option<u64>, u64)> = Vec::with_capacity(2);
        for block in &self.blocks {
            match windows.iter_mut().find(|w| w.0 == block.window) {
                Some(w) => w.1 += 1,
                None => windows.push((block.window, 1)),
            }
        }
        let sum: u64 = windows.into_iter().map(|(window, blocks)| blocks * of(window)).sum();
        sum / (self.blocks.len() as u64).max(1)
    }
}

/// Elements of the attention's matrices.
pub fn attention_elements(spec: &ModelSpec) -> u64 {
    let (d, q, kv) = (spec.d_model as u64, spec.q_dim() as u64, spec.kv_dim() as u64);
    d * q + 2 * d * kv + q * d
}

/// What a row multiplies in one part of a feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowWork {
    /// Elements of the matrices.
    pub elements: u64,
    /// Elements of its input.
    pub inputs: u64,
}

/// What a row multiplies in the first and in the second part of a layer's feed-forward: of experts, the router and the chosen
/// ones.
pub fn ffn_of_row(spec: &ModelSpec, layer: usize) -> [RowWork; 2] {
    let d = spec.d_model as u64;
    let ups = if spec.gated() { 2 } else { 1 };
    let of = |router: u64, width: u64| {
        let up = RowWork { elements: router * d + ups * d * width, inputs: d };
        [up, RowWork { elements: width * d, inputs: width }]
    };
    match spec.experts_of(layer) {
        None => of(0, spec.d_ff as u64),
        Some(e) => {
            let gate = u64::from(e.shared.is_some());
            of(e.count as u64 + gate, (e.used * e.d_ff + e.shared.unwrap_or(0)) as u64)
        }
    }
}

/// Elements of the matrices of a dense feed-forward.
pub fn ffn_elements(spec: &ModelSpec) -> u64 {
    let matrices = if spec.gated() { 3 } else { 2 };
    matrices * spec.d_model as u64 * spec.d_ff as u64
}

/// Elements of the two norms of a block, biases included.
pub fn norm_elements(spec: &ModelSpec) -> u64 {
    2 * norm_width(spec)
}

fn norm_width(spec: &ModelSpec) -> u64 {
    let parts = if matches!(spec.norm, Norm::Layer { .. }) { 2 } else { 1 };
    parts * spec.d_model as u64
}

impl Sizes {
    /// Sizes of a model of 16-bit weights.
    pub fn of_spec(spec: &ModelSpec) -> Sizes {
        let (d, q, kv) = (spec.d_model as u64, spec.q_dim() as u64, spec.kv_dim() as u64);
        let ff = spec.d_ff as u64;
        let shared = |e: &Experts| e.shared.unwrap_or(0) as u64;
        let biased = matches!(spec.norm, Norm::Layer { .. });
        let bias = |n: u64, has: bool| if has { n } else { 0 };
        let bytes = |elements: u64| TwoSided::same(ELEMENT * elements);
        // What is kept in f32.
        let floats = |elements: usize| TwoSided::same(4 * elements as u64);
        let qk_norms = spec.qk_norm_widths().map_or(0, |[q, k]| (q + k) as u64);
        let pre = if spec.pre_norms { norm_width(spec) } else { 0 };
        let post = if spec.post_norms { d } else { 0 };
        let qkv_bias = bias(q + 2 * kv, spec.qkv_bias);
        let ups = if spec.gated() { 2 } else { 1 };
        let of_experts = |e: &Experts| {
            let biases = if e.biases { [ups as usize * e.d_ff, spec.d_model] } else { [0; 2] };
            let part = |matrices: u64, bias: usize| {
                bytes(matrices * d * (e.count * e.d_ff) as u64).add(floats(e.count * bias))
            };
            [part(ups, biases[0]), part(1, biases[1])]
        };
        let block = |layer: usize| Block {
            qkv: bytes(d * (q + 2 * kv) + qkv_bias + qk_norms + pre).add(floats(if spec.sinks {
                spec.n_heads
            } else {
                0
            })),
            out: bytes(q * d + bias(d, spec.o_bias) + post),
            up: match spec.experts_of(layer) {
                None => bytes(ups * d * ff + bias(ups * ff, biased) + pre),
                Some(e) => bytes(ups * d * shared(e) + pre).add(router_of(spec, layer)).add(of_experts(e)[0]),
            },
            down: match spec.experts_of(layer) {
                None => bytes(ff * d + bias(d, biased) + post),
                Some(e) => bytes(d * shared(e) + post).add(of_experts(e)[1]),
            },
            experts: spec.experts_of(layer).map_or([TwoSided::default(); 2], of_experts),
            window: spec.window_of(layer).map(|w| w as u64),
        };
        let positions = match spec.position {
            Position::Learned { offset } => (spec.max_context + offset) as u64 * d,
            Position::Rope(_) => 0,
        };
        let table = spec.vocab as u64 * d;
        Sizes {
            spec: spec.clone(),
            blocks: (0..spec.n_layers).map(block).collect(),
            embedding: bytes(table + positions),
            head: bytes(table + norm_width(spec)),
            shared_table: if spec.tied_head { bytes(table) } else { TwoSided::default() },
            one_layout: true,
            kv: KvType::BF16,
            router: None,
            most_used: None,
        }
    }

    /// Sizes of the tensors of a loaded model (checked against its spec), for the kernels of `isa`.
    pub fn of_weights(spec: &ModelSpec, weights: &Weights, isa: Isa) -> Sizes {
        let mut one_layout = true;
        let mut named = |name: String| {
            weights.get(&name).map_or(TwoSided::default(), |t| {
                let bytes = tensor_bytes(t, isa);
                one_layout &= t.shape.len() < 2
                    || !Linear::wants_packing(t.dtype, isa)
                        && !t.dtype.is_quantised()
                        && bytes.host == bytes.device;
                bytes
            })
        };
        let mut sum = |layer: usize, parts: &[&str]| {
            let each =
                parts.iter().flat_map(|p| ["weight", "bias"].map(|kind| format!("blk.{layer}.{p}.{kind}")));
            each.map(&mut named).fold(TwoSided::default(), TwoSided::add)
        };
        let blocks = (0..spec.n_layers)
            .map(|i| {
                let experts = experts_of(spec, weights, isa, i);
                let router = router_of(spec, i);
                let [up, down] = experts;
                let ups = [
                    "ffn_norm",
                    "ffn_gate",
                    "ffn_up",
                    "ffn_gate_inp_shexp",
                    "ffn_gate_shexp",
                    "ffn_up_shexp",
                ];
                Block {
                    qkv: sum(i, &QKV),
                    out: sum(i, &["attn_output", "post_attention_norm"]),
                    up: sum(i, &ups).add(up).add(router),
                    down: sum(i, &["ffn_down", "ffn_down_shexp", "post_ffw_norm"]).add(down),
                    experts,
                    window: spec.window_of(i).map(|w| w as u64),
                }
            })
            .collect();
        one_layout &= spec.experts.is_none();
        let of = |name: &str| weights.get(name).map_or(TwoSided::default(), |t| tensor_bytes(t, isa));
        // Rows of the embedding are looked up in the file's own format.
        let raw = |name: &str| {
            weights.get(name).map_or(TwoSided::default(), |t| TwoSided::same(t.data.len() as u64))
        };
        let table = raw("token_embd.weight");
        let matrix = if spec.tied_head { of("token_embd.weight") } else { of("output.weight") };
        let norm = ["output_norm.weight", "output_norm.bias"]
            .map(of)
            .into_iter()
            .fold(TwoSided::default(), TwoSided::add);
        let packed = |t: &Tensor| t.dtype.is_quantised() || Linear::wants_packing(t.dtype, isa);
        let packed = weights.get("token_embd.weight").is_some_and(packed);
        Sizes {
            spec: spec.clone(),
            blocks,
            embedding: table.add(raw("position_embd.weight")),
            head: matrix.add(norm),
            shared_table: match (spec.tied_head, packed) {
                (false, _) => TwoSided::default(),
                (true, false) => table,
                // The CPU packs the head and keeps the table; the device looks rows up in the packed head.
                (true, true) => TwoSided { host: 0, device: table.device },
            },
            one_layout,
            kv: KvType::BF16,
            router: None,
            most_used: None,
        }
    }

    /// Blocks.
    pub fn layers(&self) -> usize {
        self.blocks.len()
    }

    /// Embedding, blocks and head.
    pub fn units(&self) -> usize {
        self.layers() + 2
    }

    /// Bytes of a unit: 0 is the embedding, the last one the head. Norms are rounded with their matrices.
    pub fn unit(&self, unit: usize) -> TwoSided {
        match unit {
            0 => self.embedding,
            u if u == self.layers() + 1 => self.head,
            u => self.blocks[u - 1].total(),
        }
    }

    /// All of it on one side.
    pub fn model(&self) -> TwoSided {
        (0..self.units()).map(|u| self.unit(u)).fold(TwoSided::default(), TwoSided::add)
    }

    /// The largest block on the device.
    pub fn largest_block(&self) -> u64 {
        self.blocks.iter().map(|b| b.total().device).max().unwrap_or(0)
    }

    /// Bytes of a block that cross the link when the device computes with it.
    pub fn staged(&self, layer: usize, at: &LayerPlacement) -> u64 {
        let block = &self.blocks[layer];
        match at.weights {
            Residence::Streamed => block.total().device,
            Residence::StreamedExperts => block.feed_forward().device,
            Residence::Host | Residence::Device | Residence::Both => 0,
        }
    }

    /// The same with keys and values stored so; without it they have 16 bits.
    pub fn with_kv(self, kv: KvType) -> Sizes {
        Sizes { kv, ..self }
    }

    /// How keys and values are stored.
    pub fn kv(&self) -> KvType {
        self.kv
    }

    /// Bytes of the keys and values of a token in one layer.
    pub fn kv_token(&self) -> u64 {
        (2 * self.spec.n_kv_heads * self.kv.head_bytes(self.spec.head_dim)) as u64
    }

    /// Bytes of `rows` rows of the residual stream as they cross the link.
    pub fn hidden(&self, rows: u64) -> u64 {
        rows * self.spec.d_model as u64 * ELEMENT
    }
}

/// Bytes of the first and of the second matrices of a layer's experts, with their biases.
fn experts_of(spec: &ModelSpec, weights: &Weights, isa: Isa, layer: usize) -> [TwoSided; 2] {
    let mut all = [TwoSided::default(); 2];
    let FeedForward::Experts(mixture) = model::Block::of(spec, layer).ffn else { return all };
    for Mlp { gate, up, down } in &mixture.experts {
        let of = |m: &model::MatrixSpec| {
            let tensors = ["weight", "bias"].map(|kind| weights.get(&m.tensor(layer, kind)));
            tensors
                .into_iter()
                .flatten()
                .map(|t| tensor_bytes(t, isa))
                .fold(TwoSided::default(), TwoSided::add)
        };
        all[0] = gate.iter().chain([up]).map(of).fold(all[0], TwoSided::add);
        all[1] = all[1].add(of(down));
    }
    all
}

/// Bytes of a layer's router, which is kept in f32.
fn router_of(spec: &ModelSpec, layer: usize) -> TwoSided {
    let elements = spec.experts_of(layer).map_or(0, |e| e.count * (spec.d_model + usize::from(e.biases)));
    TwoSided::same(4 * elements as u64)
}

fn tensor_bytes(t: &Tensor, isa: Isa) -> TwoSided {
    let raw = t.data.len() as u64;
    if t.shape.len() < 2 {
        let n = 4 * t.shape.iter().product::<usize>() as u64;
        return TwoSided { host: n, device: n.next_multiple_of(GRANULE) };
    }
    let packed =
        if Linear::wants_packing(t.dtype, isa) { Packed::size(t.dtype, t.rows(), t.cols()) } else { None };
    TwoSided { host: packed.map_or(raw, |n| n as u64), device: device_bytes(t).unwrap_or(raw) }
}

/// Bytes of a matrix in the layout of the GPU's kernels: 16-bit rows, or tiles of codes.
fn device_bytes(t: &Tensor) -> Option<u64> {
    if !t.dtype.is_quantised() {
        return Some((t.rows() * t.cols()) as u64 * ELEMENT);
    }
    #[cfg(tandem_kernels)]
    return crate::device::kernels::quant::PackedLayout::new(t.dtype, t.rows(), t.cols())
        .map(|l| l.bytes() as u64);
    #[cfg(not(tandem_kernels))]
    return None;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth;

    fn sizes(name: &str) -> Sizes {
        Sizes::of_spec(&synth::parse(name).unwrap().spec)
    }

    /// A model of random bf16 weights has the sizes that its spec says, but for norms, which are f32.
    #[test]
    fn a_spec_and_its_tensors_agree() {
        for name in [
            "tiny-llama",
            "tiny-qwen3",
            "tiny-opt",
            "tiny-gemma2",
            "tiny-gemma3",
            "tiny-qwen2",
            "tiny-olmo2",
            "tiny-qwen3-moe",
            "tiny-qwen2-moe",
            "tiny-mixtral",
            "tiny-gpt-oss",
        ] {
            let model = synth::outline(name).unwrap();
            let (a, b) = (sizes(name), Sizes::of_weights(&model.spec, &model.weights, Isa::Reference));
            assert_eq!(b.one_layout, model.spec.experts.is_none());
            for unit in 0..a.units() {
                let (want, got) = (a.unit(unit).host, b.unit(unit).host);
                let vectors = 64 * 1024;
                assert!(got >= want && got <= want + vectors, "{name} unit {unit}: {got} for {want}");
            }
            assert_eq!(a.shared_table, b.shared_table, "{name}");
            for layer in 0..a.layers() {
                assert_eq!(a.blocks[layer].experts, b.blocks[layer].experts, "{name}");
            }
        }
    }

    /// What is read per token, by hand: 3·48·4 experts of 3·2048·768 elements, and the rest.
    #[test]
    fn few_rows_read_some_experts() {
        let s = sizes("qwen3-30b-a3b");
        let expert = 2 * 3 * 2048 * 768u64;
        let router = 4 * 128 * 2048;
        let norms = 2 * 2048;
        let ffn = |rows| [Sublayer::Up, Sublayer::Down].map(|p| s.read(0, p, rows).host).iter().sum::<u64>();
        assert_eq!(ffn(1), 8 * expert + router + norms);
        assert_eq!(ffn(1_000_000), 128 * expert + router + norms);
        assert_eq!(s.blocks[0].total().host - s.blocks[0].qkv.host - s.blocks[0].out.host, ffn(1_000_000));
        let two = (ffn(2) - router - norms) as f64 / expert as f64;
        assert!((two - 15.5).abs() < 1e-6, "{two}");
        assert_eq!(s.read(0, Sublayer::Qkv, 1), s.blocks[0].qkv);
        let [up, down] = ffn_of_row(&s.spec, 0);
        assert_eq!((up.elements, up.inputs), (128 * 2048 + 8 * 2 * 2048 * 768, 2048));
        assert_eq!((down.elements, down.inputs), (8 * 2048 * 768, 8 * 768));
        // 30.5 billion parameters, 3.3 of them active.
        let elements = s.model().host as f64 / 2.0;
        assert!((30.4e9..30.7e9).contains(&elements), "{elements}");
    }

    /// A router that uses few experts reads less than one that uses all alike, and a step of one row reads k of them by either.
    #[test]
    fn a_routers_profile_says_what_is_read() {
        let plain = sizes("qwen3-30b-a3b");
        let mut router = RouterProfile::uniform(plain.spec.experts.as_ref().unwrap());
        let uniform = plain.clone().with_router(router.clone());
        // Layer 0 chooses among its first 16 experts.
        router.tokens = 1 << 20;
        for (e, n) in router.layers[0].counts.iter_mut().enumerate() {
            *n = if e < 16 { 1 << 19 } else { 0 };
        }
        router.check("r", &plain.spec).unwrap();
        let skewed = plain.clone().with_router(router);
        assert!(skewed.has_router() && !plain.has_router());
        let close = |a: u64, b: u64| a.abs_diff(b) <= 2;
        for rows in [0, 1, 2, 8, 64, 512] {
            for sublayer in Sublayer::ALL {
                let [want, same, less] = [&plain, &uniform, &skewed].map(|s| s.read(0, sublayer, rows).host);
                assert!(close(want, same), "{sublayer:?} of {rows} rows: {same} for {want}");
                let fewer = rows > 1 && matches!(sublayer, Sublayer::Up | Sublayer::Down);
                assert!(if fewer { less < want } else { close(want, less) }, "{sublayer:?} of {rows} rows");
                assert!(close(skewed.read(1, sublayer, rows).host, plain.read(1, sublayer, rows).host));
            }
        }
        // 16 of 128, and the hundred others hardly ever.
        let expert = 3 * 2 * 2048 * 768;
        let read = |part| skewed.read(0, part, 512).host;
        let of_16 = read(Sublayer::Up) + read(Sublayer::Down) - 4 * 128 * 2048 - 2 * 2048;
        assert!((16 * expert..17 * expert).contains(&of_16), "{} experts", of_16 as f64 / expert as f64);
    }

    /// Both sides' experts are all of them: used alike they take their share each, and the more unequally they are used the less takes the
    /// side without the most used ones.
    #[test]
    fn divided_experts_take_their_share() {
        let plain = sizes("qwen3-30b-a3b");
        let all = |rows: u64| 1e-3 + 1e-5 * rows as f64;
        let seconds = |s: &Sizes, side, n, rows| s.seconds_of_experts(0, side, n, rows, all);
        for rows in [1, 4, 64, 512] {
            assert_eq!(seconds(&plain, Side::Host, 0, rows), all(rows));
            for n in [1, 32, 100, 127] {
                let of_device = seconds(&plain, Side::Device, n, rows);
                assert!(
                    (of_device / all(rows) * 128.0 / f64::from(n) - 1.0).abs() < 1e-9,
                    "{n} of {rows} rows"
                );
            }
            let mut router = RouterProfile::uniform(plain.spec.experts.as_ref().unwrap());
            router.tokens = 1 << 20;
            for layer in &mut router.layers {
                layer.counts.fill((1 << 16) - (1 << 14));
                layer.counts[..32].fill((1 << 16) + 3 * (1 << 14));
            }
            router.check("r", &plain.spec).unwrap();
            let skewed = plain.clone().with_most_used(&router);
            let [plain, skewed] = [&plain, &skewed].map(|s| seconds(s, Side::Host, 32, rows));
            assert!(skewed < plain, "{rows} rows: {skewed} of {plain}");
        }
    }

    /// gpt-oss-20b by hand: 24 layers of 64 sinks, 32 biases of a router, and 32 experts with biases of two matrices of 2880 rows, and of one.
    #[test]
    fn sinks_and_biases_are_counted() {
        let with = sizes("gpt-oss-20b");
        let mut spec = with.spec.clone();
        spec.sinks = false;
        spec.experts.as_mut().unwrap().biases = false;
        let without = Sizes::of_spec(&spec);
        let (a, b) = (with.model(), without.model());
        let biases = 24 * 32 * 3 * 2880 * 4;
        assert_eq!(a.device - b.device, biases + 24 * 4 * (64 + 32));
        assert_eq!(a.host - b.host, biases + 24 * 4 * (64 + 32));
        // Those of experts that are not read are not read either.
        let read =
            |s: &Sizes| [Sublayer::Up, Sublayer::Down].map(|p| s.read(0, p, 1).host).iter().sum::<u64>();
        assert_eq!(read(&with) - read(&without), 4 * 3 * 2880 * 4 + 4 * 32);
    }

    #[test]
    fn quantised_weights_have_two_layouts() {
        let model = synth::outline("tiny-llama,dtype=q4_0").unwrap();
        let quant = Sizes::of_weights(&model.spec, &model.weights, Isa::Avx2);
        assert!(!quant.one_layout);
        assert!(quant.model().host < sizes("tiny-llama").model().host / 2);
    }
}
