//! The dry run: bytes of a model's parts on both sides, from which those of any placement follow before anything is allocated.

use super::graphs::GRAPH_ROWS;
use crate::cache::{KvDType, KvGeometry};
use crate::device::accelerator::{Accelerator, Half, Limits, LinearWeight, Shape, Workspace};
use crate::engine::memory::Memory;
use crate::engine::options::Options;
use crate::engine::prepare::{Prepared, Units};
use crate::engine::weights::{
    LayerLayout, activation_type, embedding_bytes, head_bytes, linear_shapes, post_norm_bytes, rope_bytes,
    separate_gate_up,
};
use crate::model::{ModelSpec, Weights};
use crate::program::{LayerPlacement, Phase, Placement, Residence, Side, Sublayer};
use crate::{Error, Result};

/// Rows of logits that a step makes room for on the device, beyond one per sequence.
const LOGIT_ROWS: usize = 64;

/// What an allocation takes.
pub(super) fn rounded(bytes: usize) -> u64 {
    bytes.next_multiple_of(256) as u64
}

/// See the [module](self).
pub struct Sizes {
    pub(super) shape: Shape,
    pub(super) limits: Limits,
    /// Pages of all sequences.
    pub(super) pages: usize,
    pub(super) sub_batches: usize,
    pub(super) linears: Vec<LinearWeight>,
    pub(super) layouts: Vec<LayerLayout>,
    pub(super) gate_up: bool,
    head: u64,
    /// Without and with a head beside it.
    embedding: [u64; 2],
    rope: u64,
    /// Of a streamed layer, what stays on the device.
    post_norms: u64,
    activations: u64,
    lists: u64,
    /// Weights: only what is always there.
    host: Memory,
    host_layers: Vec<u64>,
    host_head: u64,
    free: u64,
    device: String,
}

impl Sizes {
    /// Of a model that is to run with `options` on `accel` and the CPU.
    ///
    /// # Errors
    /// A missing tensor, or one that the accelerator cannot multiply; a device that failed.
    pub fn new(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        accel: &dyn Accelerator,
    ) -> Result<Sizes> {
        let pages = options.check(spec)?;
        let act = activation_type(accel, spec, weights)?;
        let kv = match options.kv_dtype {
            KvDType::BF16 => Half::BF16,
            KvDType::F16 => Half::F16,
        };
        let shape = Shape::of(spec, act, kv);
        accel.check(&shape)?;
        // Decode steps are padded to a bucket, so that few graphs serve all batches.
        let padded = |n: usize| n.max(accel.row_bucket(n.min(GRAPH_ROWS)));
        let (rows, sequences) = (padded(options.rows()), padded(options.sequences));
        let logit_rows = options.logit_rows().max(sequences).max(LOGIT_ROWS.min(rows));
        let pages_per_sequence = KvGeometry::pages_for(options.context);
        let limits = Limits { rows, logit_rows, sequences, pages_per_sequence };
        let linears = linear_shapes(spec, weights)?;
        let gate_up = separate_gate_up(spec, weights)?;
        let layouts = (0..spec.n_layers)
            .map(|l| LayerLayout::new(accel, spec, weights, l, act))
            .collect::<Result<Vec<_>>>()?;
        let scratch = accel.scratch_bytes(&shape, &limits, &linears);
        let workspace = Workspace::sizes(&shape, &limits, gate_up, false, scratch);
        let none = Units { layers: vec![false; spec.n_layers], head: false, node: None };
        let rest = Prepared::bytes(spec, weights, options.isa, &none)?;
        let unit = |units: &Units| -> Result<u64> {
            Ok(Prepared::bytes(spec, weights, options.isa, units)?.saturating_sub(rest))
        };
        let block = |l: usize| {
            let mut only = none.clone();
            only.layers[l] = true;
            unit(&only)
        };
        let threads = options.threads.unwrap_or_else(crate::host::cpu::allowed).max(1);
        let runtime = accel.runtime();
        Ok(Sizes {
            pages,
            sub_batches: options.sub_batches,
            head: head_bytes(accel, spec, weights, act)?,
            embedding: [
                embedding_bytes(accel, spec, weights, act, false)?,
                embedding_bytes(accel, spec, weights, act, true)?,
            ],
            rope: rope_bytes(spec, options.context),
            post_norms: post_norm_bytes(spec),
            activations: workspace.iter().map(|&b| rounded(b)).sum(),
            lists: rounded(accel.step_bytes(&shape, &limits)),
            host: Memory { weights: rest, ..Memory::plan(spec, weights, options, threads)? },
            host_layers: (0..spec.n_layers).map(block).collect::<Result<_>>()?,
            host_head: unit(&Units { head: true, ..none.clone() })?,
            free: runtime.memory_free()?,
            device: runtime.info().name.clone(),
            shape,
            limits,
            linears,
            layouts,
            gate_up,
        })
    }

    /// Blocks of the model.
    pub fn layers(&self) -> usize {
        self.layouts.len()
    }

    /// Bytes of all pages of one layer.
    pub(super) fn layer_pages(&self) -> u64 {
        (self.pages * self.shape.page_bytes()) as u64
    }

    /// Bytes on the device.
    pub fn device(&self, placement: &Placement) -> Memory {
        let mut weights = self.rope;
        let (embeds, heads) = (placement.embedding == Side::Device, placement.head == Side::Device);
        if embeds {
            weights += self.embedding[usize::from(heads)];
        }
        if heads {
            weights += self.head;
        }
        let mut largest = 0;
        let mut kv = 0;
        for (layer, layout) in placement.layers.iter().zip(&self.layouts) {
            match layer.weights {
                Residence::Device | Residence::Both => weights += layout.bytes as u64,
                Residence::Streamed => {
                    largest = largest.max(rounded(layout.bytes));
                    weights += self.post_norms;
                }
                Residence::Host => {}
            }
            kv += if layer.kv == Side::Device { self.layer_pages() } else { 0 };
        }
        let staged = if placement.layers.iter().any(stages_pages) { 2 * self.layer_pages() } else { 0 };
        Memory {
            weights: weights + 2 * largest,
            kv: kv + staged,
            activations: (self.activations + self.lists * modes(placement).len().max(1) as u64)
                * self.sub_batches as u64,
        }
    }

    /// Bytes on the host.
    pub fn host(&self, placement: &Placement) -> Memory {
        let mut memory = self.host;
        memory.kv = 0;
        for ((layer, layout), bytes) in placement.layers.iter().zip(&self.layouts).zip(&self.host_layers) {
            if computes_on_host(layer) {
                memory.weights += bytes;
            }
            if layer.weights == Residence::Streamed {
                memory.weights += layout.bytes as u64;
            }
            memory.kv += if layer.kv == Side::Host { self.layer_pages() } else { 0 };
        }
        memory.weights += if placement.head == Side::Host { self.host_head } else { 0 };
        memory
    }

    /// Whether a placement fits the device.
    pub fn fits(&self, placement: &Placement) -> bool {
        self.device(placement).total() <= self.free
    }

    /// Bytes free on the device.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Refuses a placement that does not fit either side.
    ///
    /// # Errors
    /// [`Error::Capacity`], with the numbers.
    pub fn check(&self, placement: &Placement) -> Result<()> {
        self.device(placement).check_device(self.free, &self.device)?;
        if wholly_on_device(placement) { Ok(()) } else { self.host(placement).check() }
    }

    /// The first of `candidates` that fits.
    ///
    /// # Errors
    /// None does: [`Error::Capacity`], with the numbers of the last.
    pub fn first_fit(&self, candidates: impl IntoIterator<Item = Placement>) -> Result<Placement> {
        let mut last = None;
        for placement in candidates {
            match self.check(&placement) {
                Ok(()) => return Ok(placement),
                Err(e) => last = Some(e),
            }
        }
        Err(last.unwrap_or_else(|| Error::usage("no placement to choose from")))
    }
}

/// Whether the host has no part in a placement, not even as a place for weights.
pub(super) fn wholly_on_device(placement: &Placement) -> bool {
    let resident = |l: &LayerPlacement| matches!(l.weights, Residence::Device | Residence::Both);
    !placement.uses(Side::Host) && placement.layers.iter().all(resident)
}

/// Whether the host multiplies with a layer's weights.
pub(super) fn computes_on_host(layer: &LayerPlacement) -> bool {
    [layer.prefill, layer.decode].iter().any(|p| {
        [Sublayer::Qkv, Sublayer::Out, Sublayer::Up, Sublayer::Down].iter().any(|&s| p.side(s) == Side::Host)
    })
}

/// Whether the device attends over a layer's keys and values that are kept on the host.
pub(super) fn stages_pages(layer: &LayerPlacement) -> bool {
    layer.kv == Side::Host
        && [layer.prefill, layer.decode].iter().any(|p| p.attention() == Some(Side::Device))
}

/// Where a layer's attention happens, in prefill and in decode: steps are prepared once for each.
pub(super) type Mode = [Side; 2];

/// The mode of a layer.
pub(super) fn mode(layer: &LayerPlacement) -> Mode {
    [Phase::Prefill, Phase::Decode].map(|p| layer.policy(p).attention().unwrap_or(Side::Device))
}

/// The modes of all layers, each once.
pub(super) fn modes(placement: &Placement) -> Vec<Mode> {
    let mut modes: Vec<Mode> = Vec::new();
    for mode in placement.layers.iter().map(mode) {
        if !modes.contains(&mode) {
            modes.push(mode);
        }
    }
    modes
}
