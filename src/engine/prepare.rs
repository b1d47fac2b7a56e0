//! Prepares weights for the kernels: quantised ones are packed into one arena, floats stay in the file, but for routers.

mod bytes;
mod ffn;
mod routers;

use std::collections::HashMap;
use std::sync::Arc;

use crate::host::{NumaBinding, Pieces, Pool};
use crate::model::{self, Block, MatrixSpec, ModelSpec, Norm, Position, Weights};
use crate::reference::dequant::dequantise;
use crate::simd::Isa;
use crate::simd::linear::{GROUP, Linear, Packed, pack_group};
use crate::tensor::{Bytes, DType, Tensor};
use crate::{Error, Result};

pub(super) use bytes::WeightBytes;
pub(super) use ffn::{FeedForward, Mixture, Mlp, Shared};
use routers::Routers;

/// Weights of one norm.
pub(super) struct NormWeight {
    pub w: Vec<f32>,
    pub b: Option<Vec<f32>>,
}

/// Weights of one block.
pub struct Layer {
    pub(super) attn_norm: Option<NormWeight>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) q_norm: Option<Vec<f32>>,
    pub(super) k_norm: Option<Vec<f32>>,
    /// A logit for each head.
    pub(super) sinks: Option<Arc<[f32]>>,
    pub(super) o: Linear,
    pub(super) post_attn: Option<Vec<f32>>,
    pub(super) ffn_norm: Option<NormWeight>,
    pub(super) ffn: FeedForward,
    pub(super) post_ffn: Option<Vec<f32>>,
    pub(super) windowed: bool,
}

impl Layer {
    /// Whether a row sees only the tokens of a window.
    pub fn windowed(&self) -> bool {
        self.windowed
    }

    /// Its experts, if it has some.
    pub(super) fn mixture(&self) -> Option<&Mixture> {
        match &self.ffn {
            FeedForward::Experts(m) => Some(m),
            FeedForward::Dense(_) => None,
        }
    }

    /// Bytes of its matrices that a step of one row reads, as the kernels read them.
    pub fn bytes(&self) -> usize {
        let attention = [&self.q, &self.k, &self.v, &self.o].iter().map(|w| w.bytes()).sum::<usize>();
        attention + self.ffn.bytes_of_a_row()
    }
}

/// The units of a model to prepare: those that the CPU computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Units {
    /// Per block.
    pub layers: Vec<bool>,
    /// The last norm and the head.
    pub head: bool,
    /// Memory nodes for their matrices.
    pub node: Option<NumaBinding>,
}

impl Units {
    /// All of a model.
    pub fn all(spec: &ModelSpec) -> Units {
        Units { layers: vec![true; spec.n_layers], head: true, node: None }
    }
}

/// A model whose weights are ready for the kernels of one tier.
pub struct Prepared {
    pub(super) spec: ModelSpec,
    pub(super) isa: Isa,
    /// `[V, d]`, of which one row per token is read in place.
    pub(super) embed: Tensor,
    pub(super) positions: Option<Tensor>,
    layers: Vec<Option<Layer>>,
    /// The sinks of every layer, since the CPU attends for layers of a device, too.
    sinks: Vec<Option<Arc<[f32]>>>,
    pub(super) out_norm: NormWeight,
    head: Option<Linear>,
    /// Bytes of all of the model's tensors in their file's types, whichever units are prepared.
    weight_bytes: u64,
}

/// Alignment of each weight in the arena.
const ALIGN: usize = 64;

/// Bytes of the file that are released together once packed. Each release interrupts the other cores (their TLBs must
/// drop the pages), so it should be rare; but data that waits for release is in memory twice, so it should not be late.
const RELEASE_BYTES: usize = 4 << 20;

/// Rows per chunk of parallel packing, in groups of 16.
const PACK_GROUPS: usize = 8;

impl Prepared {
    /// Takes `weights` (checked against `spec`) and packs those that `isa` reads packed, on all threads of `pool`.
    /// `progress` is called with the bytes done, of [`Prepared::bytes_to_pack`].
    ///
    /// # Errors
    /// If a tensor is missing or misshapen, or there is no memory for the packed weights.
    pub fn new(
        spec: ModelSpec,
        weights: &Weights,
        isa: Isa,
        pool: &Pool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Prepared> {
        let units = Units::all(&spec);
        Prepared::part(spec, weights, isa, &units, pool, progress)
    }

    /// [`Prepared::new`] for `units` alone; the embedding and the norms are always included.
    ///
    /// # Errors
    /// As [`Prepared::new`].
    pub(super) fn part(
        spec: ModelSpec,
        weights: &Weights,
        isa: Isa,
        units: &Units,
        pool: &Pool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Prepared> {
        let mut arena = Arena::plan(&spec, weights, isa, units)?;
        if let Some(node) = &units.node {
            let in_rows = linear_names(&spec, units).filter_map(|name| weights.get(&name));
            let in_rows = in_rows.filter(|t| !Linear::wants_packing(t.dtype, isa)).map(|t| t.data.len());
            node.check((arena.total + in_rows.sum::<usize>()) as u64)?;
        }
        // Weights to pack are read once and released; floats are read from the file for every token.
        for t in linear_names(&spec, units).filter_map(|name| weights.get(&name)) {
            t.data.advise_large_pages(arena.slots.is_empty());
        }
        arena.fill(pool, isa, progress)?;
        let d = spec.d_model;
        let lin = |layer: usize, m: &MatrixSpec| -> Result<Linear> {
            let linear = arena.linear(weights, &m.tensor(layer, "weight"), m.rows, m.cols, isa)?;
            Ok(linear.with_bias(weights.floats(&m.tensor(layer, "bias"), m.rows)?))
        };
        let mlp = |layer: usize, of: &model::Mlp| -> Result<Mlp> {
            let gate = of.gate.as_ref().map(|gate| lin(layer, gate)).transpose()?;
            Ok(Mlp { gate, up: lin(layer, &of.up)?, down: lin(layer, &of.down)? })
        };
        // Small matrices that decide much stay in f32.
        let routers = Routers::copy(&spec, weights, units)?;
        let floats = |name: &str, rows: usize| -> Result<Linear> {
            let t = weights.get(name).ok_or_else(|| Error::format(name, "missing from the model"))?;
            let tensor = match routers.get(name, rows, d) {
                Some(copy) => copy,
                None => arena.placed(&Tensor { shape: vec![rows, d], ..in_f32(t)? })?,
            };
            let bias = weights.floats(&name.replace(".weight", ".bias"), rows)?;
            Ok(Linear::from_rows(tensor, isa).with_bias(bias))
        };
        let mixture = |layer: usize, of: &model::Mixture, used: usize| -> Result<Mixture> {
            let shared = of.shared.as_ref().map(|(shared, gate)| -> Result<Shared> {
                let gate = floats(&model::tensor_name(layer, gate.name, "weight"), 1)?;
                Ok(Shared { mlp: mlp(layer, shared)?, gate })
            });
            Ok(Mixture {
                router: floats(&of.router.tensor(layer, "weight"), of.router.rows)?,
                experts: of.experts.iter().map(|e| mlp(layer, e)).collect::<Result<_>>()?,
                used,
                shared: shared.transpose()?,
            })
        };
        let norm = |name: &str| -> Result<NormWeight> {
            let w = weights
                .floats(&format!("{name}.weight"), d)?
                .ok_or_else(|| Error::format(format!("{name}.weight"), "missing from the model"))?;
            let b = weights.floats(&format!("{name}.bias"), d)?;
            if b.is_none() && matches!(spec.norm, Norm::Layer { .. }) {
                return Err(Error::format(format!("{name}.bias"), "missing from the model"));
            }
            Ok(NormWeight { w, b })
        };
        let [q_norm, k_norm] = spec.qk_norm_widths().map_or([None; 2], |widths| widths.map(Some));
        let post_norm = spec.post_norms.then_some(d);
        let sinks = (0..spec.n_layers)
            .map(|i| {
                let Some(sinks) = Block::of(&spec, i).sinks else { return Ok(None) };
                let name = model::tensor_name(i, sinks.name, "weight");
                let found = weights.floats(&name, sinks.width)?;
                let found = found.ok_or_else(|| Error::format(name, "missing from the model"))?;
                Ok(Some(Arc::from(found)))
            })
            .collect::<Result<Vec<_>>>()?;
        let layers = (0..spec.n_layers)
            .map(|i| {
                let name = |s: &str| format!("blk.{i}.{s}");
                let vector = |s: &str, width: Option<usize>| -> Result<Option<Vec<f32>>> {
                    let (name, Some(n)) = (name(s), width) else { return Ok(None) };
                    match weights.floats(&name, n)? {
                        None => Err(Error::format(name, "missing from the model")),
                        found => Ok(found),
                    }
                };
                if !units.layers[i] {
                    return Ok(None);
                }
                let block = Block::of(&spec, i);
                let ffn = match &block.ffn {
                    model::FeedForward::Dense(of) => FeedForward::Dense(Box::new(mlp(i, of)?)),
                    model::FeedForward::Experts(of) => {
                        let used = spec.experts.as_ref().map_or(0, |e| e.used);
                        FeedForward::Experts(Box::new(mixture(i, of, used)?))
                    }
                };
                // Fine activations for q, k and v: rounding their inputs to int8 changes logits the most
                // (docs/decisions/0006), and they are a sixth of the multiplications.
                Ok(Some(Layer {
                    attn_norm: spec.pre_norms.then(|| norm(&name("attn_norm"))).transpose()?,
                    q: lin(i, &block.q)?.with_fine_activations(),
                    k: lin(i, &block.k)?.with_fine_activations(),
                    v: lin(i, &block.v)?.with_fine_activations(),
                    q_norm: vector("attn_q_norm.weight", q_norm)?,
                    k_norm: vector("attn_k_norm.weight", k_norm)?,
                    sinks: sinks[i].clone(),
                    o: lin(i, &block.o)?,
                    post_attn: vector("post_attention_norm.weight", post_norm)?,
                    ffn_norm: spec.pre_norms.then(|| norm(&name("ffn_norm"))).transpose()?,
                    ffn,
                    post_ffn: vector("post_ffw_norm.weight", post_norm)?,
                    windowed: spec.window_of(i).is_some(),
                }))
            })
            .collect::<Result<Vec<_>>>()?;
        let embed = weights.require("token_embd.weight", &[spec.vocab, d])?.clone();
        let positions = match spec.position {
            Position::Learned { .. } => Some(
                weights
                    .get("position_embd.weight")
                    .filter(|t| t.cols() == d)
                    .ok_or_else(|| Error::format("position_embd.weight", "missing or misshapen"))?
                    .clone(),
            ),
            Position::Rope(_) => None,
        };
        let head_name = if spec.tied_head { "token_embd.weight" } else { "output.weight" };
        let head = units.head.then(|| arena.linear(weights, head_name, spec.vocab, d, isa)).transpose()?;
        let mut out_norm = norm("output_norm")?;
        // The head is linear, so the last norm's weights can carry the factor of the logits.
        out_norm.w.iter_mut().chain(out_norm.b.iter_mut().flatten()).for_each(|x| *x *= spec.logit_scale);
        let weight_bytes = weights.bytes();
        Ok(Prepared { spec, isa, embed, positions, layers, sinks, out_norm, head, weight_bytes })
    }

    /// Bytes of source weights that loading will pack (what `progress` counts up to).
    pub fn bytes_to_pack(spec: &ModelSpec, weights: &Weights, isa: Isa) -> u64 {
        linear_names(spec, &Units::all(spec))
            .filter_map(|n| weights.get(&n))
            .filter(|t| Linear::wants_packing(t.dtype, isa))
            .map(|t| t.data.len() as u64)
            .sum()
    }

    /// The model's sizes.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The weights of block `i`.
    ///
    /// # Panics
    /// If there is none, or it was not prepared.
    pub fn layer(&self, i: usize) -> &Layer {
        self.layers[i].as_ref().expect("a block that was prepared")
    }

    /// The weights of block `i`, if it was prepared.
    pub(super) fn layer_if(&self, i: usize) -> Option<&Layer> {
        self.layers[i].as_ref()
    }

    /// The sinks of block `i`, whether it was prepared or not.
    pub(super) fn sinks(&self, i: usize) -> Option<&[f32]> {
        self.sinks[i].as_deref()
    }

    /// The head.
    ///
    /// # Panics
    /// If it was not prepared.
    pub(super) fn head(&self) -> &Linear {
        self.head.as_ref().expect("a head that was prepared")
    }

    /// The head, if it was prepared.
    pub(super) fn head_if(&self) -> Option<&Linear> {
        self.head.as_ref()
    }

    /// The tier its weights are laid out for.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes of all of the model's tensors in their file's types, whichever units are prepared.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Bytes of weights that one decode step reads.
    pub fn bytes_per_step(&self) -> u64 {
        let head = self.head.as_ref().map_or(0, Linear::bytes);
        (self.layers.iter().flatten().map(Layer::bytes).sum::<usize>() + head) as u64
    }
}

/// Names of the weights that are multiplied as the file has them or packed, each once: all but routers.
fn linear_names<'a>(spec: &'a ModelSpec, units: &'a Units) -> impl Iterator<Item = String> + 'a {
    let layers = (0..spec.n_layers).filter(|&i| units.layers[i]).flat_map(move |i| {
        let block = Block::of(spec, i);
        let all = block.matrices().into_iter().filter(|m| !is_router(&block, m));
        all.map(|m| m.tensor(i, "weight")).collect::<Vec<_>>()
    });
    let head = if spec.tied_head { "token_embd.weight" } else { "output.weight" };
    layers.chain(units.head.then(|| head.to_string()))
}

/// Names of the routers, with their layers.
fn router_names(spec: &ModelSpec) -> impl Iterator<Item = (usize, String)> {
    (0..spec.n_layers).filter_map(|i| match Block::of(spec, i).ffn {
        model::FeedForward::Experts(mixture) => Some((i, mixture.router.tensor(i, "weight"))),
        model::FeedForward::Dense(_) => None,
    })
}

fn is_router(block: &Block, m: &MatrixSpec) -> bool {
    matches!(&block.ffn, model::FeedForward::Experts(mixture) if mixture.router == *m)
}

/// The tensor in f32.
fn in_f32(t: &Tensor) -> Result<Tensor> {
    if t.dtype == DType::F32 {
        return Ok(t.clone());
    }
    let bytes: Vec<u8> = dequantise(t).iter().flat_map(|x| x.to_le_bytes()).collect();
    Tensor::new(DType::F32, t.shape.clone(), Bytes::copy_of(&bytes))
}

/// Memory for weights: on huge pages if the system provides them, on a node if one is asked for.
fn memory(
    len: usize,
    node: Option<&NumaBinding>,
    no_room: &dyn Fn(std::io::Error) -> Error,
) -> Result<memmap2::MmapMut> {
    let mut map = memmap2::MmapMut::map_anon(len).map_err(no_room)?;
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage); // only speed depends on it
    if let Some(node) = node {
        node.bind(map.as_mut_ptr(), map.len())?;
    }
    Ok(map)
}

/// The packed weights of a model in one anonymous mapping.
struct Arena<'a> {
    slots: Vec<(&'a Tensor, usize)>,
    /// Which slot is whose.
    places: HashMap<String, usize>,
    total: usize,
    bytes: Option<Bytes>,
    /// Memory node of all matrices, including those that are not packed.
    node: Option<NumaBinding>,
}

impl<'a> Arena<'a> {
    fn plan(spec: &ModelSpec, weights: &'a Weights, isa: Isa, units: &Units) -> Result<Arena<'a>> {
        let mut arena = Arena {
            slots: Vec::new(),
            places: HashMap::new(),
            total: 0,
            bytes: None,
            node: units.node.clone(),
        };
        for name in linear_names(spec, units) {
            let Some(t) = weights.get(&name) else { continue };
            if !Linear::wants_packing(t.dtype, isa) {
                continue;
            }
            let size = Packed::size(t.dtype, t.rows(), t.cols()).expect("quantised");
            arena.places.insert(name, arena.slots.len());
            arena.slots.push((t, arena.total));
            arena.total = arena
                .total
                .checked_add(size.next_multiple_of(ALIGN))
                .ok_or_else(|| Error::Capacity("the packed weights' size overflows".into()))?;
        }
        Ok(arena)
    }

    fn fill(&mut self, pool: &Pool, isa: Isa, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        debug_assert!(isa > Isa::Reference || self.total == 0);
        if self.total == 0 {
            return Ok(());
        }
        let no_room = |e: std::io::Error| {
            let gb = self.total as f64 / 1e9;
            Error::Capacity(format!("no memory for {gb:.1} GB of packed weights: {e}"))
        };
        let mut map = memory(self.total, self.node.as_ref(), &no_room)?;
        let mut packed = Vec::new();
        for (tensor, offset) in &self.slots {
            let (groups, row_bytes) = (tensor.rows().div_ceil(GROUP), tensor.row_bytes());
            let group_bytes =
                Packed::size(tensor.dtype, tensor.rows(), tensor.cols()).expect("quantised") / groups;
            let slab = (RELEASE_BYTES / (GROUP * row_bytes)).max(1).next_multiple_of(PACK_GROUPS);
            for start in (0..groups).step_by(slab) {
                let end = (start + slab).min(groups);
                let first_row = |group: usize| (group * GROUP).min(tensor.rows());
                let to = &mut map[offset + start * group_bytes..offset + end * group_bytes];
                pool.rows(true, 1, Pieces::new(to, PACK_GROUPS * group_bytes), |c, piece| {
                    let first = start + c * PACK_GROUPS;
                    let last = (first + PACK_GROUPS).min(end);
                    for (g, out) in (first..).zip(piece.chunks_exact_mut(group_bytes)) {
                        pack_group(tensor, g, out);
                    }
                    progress(((first_row(last) - first_row(first)) * row_bytes) as u64);
                });
                let bytes = (first_row(end) - first_row(start)) * row_bytes;
                packed.extend(tensor.data.slice(first_row(start) * row_bytes, bytes));
                if packed.iter().map(|b| b.len()).sum::<usize>() >= RELEASE_BYTES {
                    packed.drain(..).for_each(|b| b.release_pages());
                }
            }
        }
        packed.drain(..).for_each(|b| b.release_pages());
        let map = map.make_read_only().map_err(no_room)?;
        self.bytes = Some(Bytes::from_anonymous(map));
        Ok(())
    }

    /// A tensor in its file, or a copy on the requested node, since the system decides where a file's pages are cached.
    fn placed(&self, tensor: &Tensor) -> Result<Tensor> {
        if self.node.is_none() || tensor.data.is_empty() {
            return Ok(tensor.clone());
        }
        let no_room = |e: std::io::Error| Error::Capacity(format!("no memory for weights on a node: {e}"));
        let mut map = memory(tensor.data.len(), self.node.as_ref(), &no_room)?;
        map.copy_from_slice(&tensor.data);
        tensor.data.release_pages();
        let data = Bytes::from_anonymous(map.make_read_only().map_err(no_room)?);
        Ok(Tensor { data, ..tensor.clone() })
    }

    fn linear(&self, weights: &Weights, name: &str, n: usize, k: usize, isa: Isa) -> Result<Linear> {
        let tensor = weights.require(name, &[n, k])?;
        if !Linear::wants_packing(tensor.dtype, isa) {
            return Ok(Linear::from_rows(self.placed(tensor)?, isa));
        }
        let (t, offset) = &self.slots[*self.places.get(name).expect("planned from the same names")];
        let size = Packed::size(t.dtype, n, k).expect("quantised");
        let bytes = self.bytes.as_ref().and_then(|b| b.slice(*offset, size)).expect("filled as planned");
        Ok(Linear::from_packed(Packed::new(t.dtype, n, k, bytes), isa))
    }
}
