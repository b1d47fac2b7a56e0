//! Where weights, sublayers, keys and values live: made once, when a model is loaded.
//!
//! Every static way of running a model is a value of [`Placement`]: CPU-only, GPU-only, greedy fill (llama.cpp), copies that are waited for (Accelerate), a
//! boundary k (HELM §3), policy vectors with pinned layers (LIA §5), full streaming (FlexGen, ZeRO-Inference).

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// The two sides of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The CPU and its memory.
    Host,
    /// The accelerator and its memory.
    Device,
}

/// Where the weights of a unit (embedding, block, head) are while steps run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Residence {
    /// In host memory, in the layout of the CPU's kernels.
    Host,
    /// In device memory, in the layout of the device's kernels.
    Device,
    /// Resident on both sides.
    Both,
    /// In host memory in the device's layout, copied to a staging buffer whenever the device computes with them. With a
    /// sublayer on the host as well, host memory holds both layouts, unless they agree.
    Streamed,
    /// Of a block with experts: these as if [`Residence::Streamed`], and everything else of it as if [`Residence::Both`].
    StreamedExperts,
}

impl Residence {
    /// Whether something of the block is copied to a staging buffer before the device computes with it.
    pub fn is_staged(self) -> bool {
        matches!(self, Residence::Streamed | Residence::StreamedExperts)
    }

    /// Whether the device has the weights of a sublayer once they are loaded.
    pub fn stays_on_device(self, sublayer: Sublayer) -> bool {
        match self {
            Residence::Host | Residence::Streamed => false,
            Residence::Device | Residence::Both => true,
            Residence::StreamedExperts => !matches!(sublayer, Sublayer::Up | Sublayer::Down),
        }
    }
}

/// The six sublayers of a block, in LIA's order (LIA §3, Table 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sublayer {
    /// Norm, projection of queries, keys and values, RoPE.
    Qkv,
    /// Q·Kᵀ and the softmax.
    Scores,
    /// S·V.
    Values,
    /// Output projection.
    Out,
    /// Norm, first matrices of the feed-forward and the activation.
    Up,
    /// Second matrix of the feed-forward.
    Down,
}

impl Sublayer {
    /// All of them, in order.
    pub const ALL: [Sublayer; 6] =
        [Sublayer::Qkv, Sublayer::Scores, Sublayer::Values, Sublayer::Out, Sublayer::Up, Sublayer::Down];

    /// Those with weights, in order.
    pub const PRODUCTS: [Sublayer; 4] = [Sublayer::Qkv, Sublayer::Out, Sublayer::Up, Sublayer::Down];
}

/// How the weights of [`Residence::Streamed`] blocks come to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Staging {
    /// From pinned memory into two buffers by turns: the next block's copy runs under this block's compute (LIA §5.3, FlexGen).
    #[default]
    Ahead,
    /// From pageable memory into one buffer, waited for: a block's copy begins when the block before it is done, as with
    /// Accelerate's hooks, which load a module right before its forward.
    Waited,
}

impl Staging {
    /// Buffers of a block each.
    pub fn buffers(self) -> usize {
        match self {
            Staging::Ahead => 2,
            Staging::Waited => 1,
        }
    }
}

/// Which side computes each sublayer of a block: LIA's p, where 1 is [`Side::Host`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Policy(pub [Side; 6]);

impl Policy {
    /// All sublayers on one side.
    pub const fn all(side: Side) -> Policy {
        Policy([side; 6])
    }

    /// Attention on the host, all products on the device: LIA's (0,1,1,0,0,0).
    pub const ATTENTION_ON_HOST: Policy = {
        use Side::{Device, Host};
        Policy([Device, Host, Host, Device, Device, Device])
    };

    /// The policy of LIA's vector: `true` is the CPU.
    pub fn from_bits(bits: [bool; 6]) -> Policy {
        Policy(bits.map(|cpu| if cpu { Side::Host } else { Side::Device }))
    }

    /// LIA's vector: 1 is the CPU.
    pub fn bits(self) -> [u8; 6] {
        self.0.map(|side| u8::from(side == Side::Host))
    }

    /// The side of a sublayer.
    pub fn side(self, sublayer: Sublayer) -> Side {
        self.0[sublayer as usize]
    }

    /// The side of attention, if its two halves are on one side: an engine cannot run others (scores and values
    /// share one pass over the keys and values), a cost model can price them.
    pub fn attention(self) -> Option<Side> {
        let (scores, values) = (self.side(Sublayer::Scores), self.side(Sublayer::Values));
        (scores == values).then_some(scores)
    }
}

/// Whether rows are prompts or single tokens that continue a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Rows of prompts.
    Prefill,
    /// One row a sequence.
    Decode,
}

/// A block: where its weights are, which side computes it, where its keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerPlacement {
    /// Where its weights are.
    pub weights: Residence,
    /// The side that computes it for rows of prompts.
    pub prefill: Policy,
    /// The side that computes it for decode rows.
    pub decode: Policy,
    /// Where its pages of keys and values are kept. Of a block with [`Side::Device`], a sequence's oldest pages may
    /// be moved to the host.
    pub kv: Side,
    /// Of a block whose experts are divided, how many the device has: the most used ones. It routes, and the host computes the others.
    /// 0: both parts of the feed-forward are where the policies say.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub device_experts: u16,
}

fn is_zero<T: Default + PartialEq>(n: &T) -> bool {
    *n == T::default()
}

impl LayerPlacement {
    /// All of it on one side.
    pub const fn all(side: Side) -> LayerPlacement {
        LayerPlacement {
            weights: match side {
                Side::Host => Residence::Host,
                Side::Device => Residence::Device,
            },
            prefill: Policy::all(side),
            decode: Policy::all(side),
            kv: side,
            device_experts: 0,
        }
    }

    /// Whether both sides compute experts of it.
    pub fn is_divided(&self) -> bool {
        self.device_experts > 0
    }

    /// Whether an image of it for the device has experts, if the block has some: where the device computes them, unless they are streamed
    /// by themselves, and in a block that is streamed as a whole.
    pub fn images_experts(&self) -> bool {
        match self.weights {
            Residence::Streamed => true,
            Residence::StreamedExperts => false,
            Residence::Host | Residence::Device | Residence::Both => self.computes_ffn_on(Side::Device),
        }
    }

    /// Whether the host multiplies with its weights.
    pub fn computes_on_host(&self) -> bool {
        let products = |p: &Policy| Sublayer::PRODUCTS.iter().any(|&s| p.side(s) == Side::Host);
        self.is_divided() || [self.prefill, self.decode].iter().any(products)
    }

    /// Whether `side` computes something of it in some phase.
    pub fn uses(&self, side: Side) -> bool {
        self.is_divided() || self.prefill.0.contains(&side) || self.decode.0.contains(&side)
    }

    /// Whether one side computes some part of its feed-forward in some phase.
    pub fn computes_ffn_on(&self, side: Side) -> bool {
        [self.prefill, self.decode]
            .iter()
            .any(|p| [Sublayer::Up, Sublayer::Down].iter().any(|&s| p.side(s) == side))
    }

    /// The side that computes it in `phase`.
    pub fn policy(&self, phase: Phase) -> Policy {
        match phase {
            Phase::Prefill => self.prefill,
            Phase::Decode => self.decode,
        }
    }
}

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The side of the embedding (its lookup and its table).
    pub embedding: Side,
    /// The blocks, first to last.
    pub layers: Vec<LayerPlacement>,
    /// The side of the last norm and the head.
    pub head: Side,
    /// Pages of every layer with [`LayerPlacement::kv`] on the device.
    pub device_pages: usize,
    /// Pages of every layer with keys and values on the host, and for pages moved away from the device.
    pub host_pages: usize,
    /// For each block, how many tokens its rows see, their own included; empty if all blocks see all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Option<u32>>,
    /// How streamed blocks come to the device.
    #[serde(default, skip_serializing_if = "is_ahead")]
    pub staging: Staging,
    /// From how many rows of an iteration on, of those that the host attends, they cross on the copy lanes: [`COPY_LANE_ROWS`], if there
    /// is no reason for another number.
    #[serde(default = "copy_lane_rows", skip_serializing_if = "is_usual")]
    pub copy_lane_rows: u32,
    /// From how many rows of prompts in an iteration on experts are streamed for them ([`Residence::StreamedExperts`]): reading them once
    /// from host memory takes less time than copying them for a few rows. Fewer rows go where decode rows go.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stream_rows: u32,
}

/// Rows for the host from which the copy lanes pay. A layer's publication and collection there take two events and two waits more, and a
/// launch where the publication would be a part of another kernel: some 7 us of the issuing thread. 16 rows of an 8B are 196 KB there
/// and 131 KB back: 27 us on a link of 12 GB/s (T4), 6 us at 55 GB/s (H100).
pub const COPY_LANE_ROWS: u32 = 16;

/// Most experts of divided layers that are under way to the device at a time: there is memory for so many on both sides.
pub const EXPERTS_UNDER_WAY: usize = 4;

fn copy_lane_rows() -> u32 {
    COPY_LANE_ROWS
}

fn is_usual(rows: &u32) -> bool {
    *rows == COPY_LANE_ROWS
}

fn is_ahead(staging: &Staging) -> bool {
    *staging == Staging::Ahead
}

impl Placement {
    /// Everything on one side.
    pub fn all(side: Side, layers: usize, pages: usize) -> Placement {
        let (device_pages, host_pages) = match side {
            Side::Device => (pages, 0),
            Side::Host => (0, pages),
        };
        Placement {
            embedding: side,
            layers: vec![LayerPlacement::all(side); layers],
            head: side,
            device_pages,
            host_pages,
            windows: Vec::new(),
            staging: Staging::Ahead,
            copy_lane_rows: COPY_LANE_ROWS,
            stream_rows: 0,
        }
    }

    /// HELM's boundary (HELM §3.2): of the units embedding, blocks, head, the first `k` on the host, the rest on the
    /// device. `k` = 0: GPU-only; `k` = layers + 2: CPU-only.
    pub fn boundary(k: usize, layers: usize, device_pages: usize, host_pages: usize) -> Placement {
        let side = |unit: usize| if unit < k { Side::Host } else { Side::Device };
        Placement {
            embedding: side(0),
            layers: (0..layers).map(|i| LayerPlacement::all(side(1 + i))).collect(),
            head: side(1 + layers),
            device_pages: if k < layers + 1 { device_pages } else { 0 },
            host_pages: if k > 1 { host_pages } else { 0 },
            windows: Vec::new(),
            staging: Staging::Ahead,
            copy_lane_rows: COPY_LANE_ROWS,
            stream_rows: 0,
        }
    }

    /// The placement for a model whose blocks have these windows.
    pub fn with_windows(mut self, windows: impl IntoIterator<Item = Option<u32>>) -> Placement {
        self.windows = windows.into_iter().collect();
        if self.windows.iter().all(Option::is_none) {
            self.windows.clear();
        }
        self
    }

    /// Whether experts that are streamed are so for this many rows of prompts.
    pub fn streams_experts(&self, prompt_rows: u64) -> bool {
        prompt_rows >= u64::from(self.stream_rows)
    }

    /// The placement as it is for iterations of this many rows of prompts, without a threshold: see [`Placement::stream_rows`].
    pub fn at_rows(&self, prompt_rows: u64) -> Cow<'_, Placement> {
        if self.stream_rows == 0 || self.layers.iter().all(|l| l.weights != Residence::StreamedExperts) {
            return Cow::Borrowed(self);
        }
        let mut settled = Placement { stream_rows: 0, ..self.clone() };
        if !self.streams_experts(prompt_rows) {
            for l in settled.layers.iter_mut().filter(|l| l.weights == Residence::StreamedExperts) {
                for s in [Sublayer::Up, Sublayer::Down] {
                    l.prefill.0[s as usize] = l.decode.side(s);
                }
            }
        }
        Cow::Owned(settled)
    }

    /// How many tokens rows of a block see; `None`: all before them.
    pub fn window(&self, layer: usize) -> Option<u32> {
        self.windows.get(layer).copied().flatten()
    }

    /// The widest window: tokens that are behind it no block with a window sees.
    pub fn widest_window(&self) -> Option<u32> {
        self.windows.iter().flatten().max().copied()
    }

    /// Whether the host goes on behind its attention of a block's decode rows: their feed-forward is its own, too.
    pub fn ends_on_host(&self, layer: u32) -> bool {
        self.layers[layer as usize].decode.side(Sublayer::Out) == Side::Host
    }

    /// Where a cohort of an asynchronous iteration, parked at `at`, is parked next (APEX §4): at the next layer behind whose host part
    /// the device has to go on. `None` as `at`: it begins; as a result: it comes to its logits.
    ///
    /// ```text
    /// products on the device   parked in each layer, while the host attends
    /// products on the host     the host goes on by itself, to the last layer of the run
    /// ```
    pub fn next_stop(&self, at: Option<u32>) -> Option<u32> {
        let n = self.layers.len() as u32;
        let goes_on = |l: u32| {
            self.ends_on_host(l)
                && self
                    .layers
                    .get(l as usize + 1)
                    .is_some_and(|next| next.decode.side(Sublayer::Qkv) == Side::Host)
        };
        (at.map_or(0, |at| at + 1)..n).find(|&l| !goes_on(l))
    }

    /// The layer of the device's rows that a cohort parked at `at` joins behind: its own, or the one behind the host's.
    pub fn joins_behind(&self, at: u32) -> u32 {
        let last = self.layers.len() as u32 - 1;
        (at + u32::from(self.ends_on_host(at))).min(last)
    }

    /// Iterations that a cohort takes for a token, if it is never late.
    pub fn cohort_iterations(&self) -> u32 {
        let stops = std::iter::successors(self.next_stop(None), |&at| self.next_stop(Some(at)));
        1 + stops.count() as u32
    }

    /// Whether everything is in host memory and computed there, for which no device is needed.
    pub fn is_host_alone(&self) -> bool {
        !self.uses(Side::Device) && self.layers.iter().all(|l| l.weights == Residence::Host)
    }

    /// Whether any unit is on `side`.
    pub fn uses(&self, side: Side) -> bool {
        let layer = |l: &LayerPlacement| l.kv == side || l.uses(side);
        self.embedding == side || self.head == side || self.layers.iter().any(layer)
    }
}
