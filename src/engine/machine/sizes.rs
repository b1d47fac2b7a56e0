//! The dry run: bytes of a model's parts on both sides, from which the bytes of any placement follow before anything is
//! allocated.

use super::carry::cargo;
use super::mode::{Mode, distinct};
use super::parts::PartMail;
use super::segments::GRAPH_ROWS;
use crate::cache::KvGeometry;
use crate::device::{
    Accelerator, ExpertShape, KernelNeeds, Limits, LinearWeight, Mailbox, RowBytes, Shape, Workspace,
    load_kernels,
};
use crate::engine::kv::{Pager, Sides};
use crate::engine::memory::Memory;
use crate::engine::options::{LOGIT_ROWS, Options};
use crate::engine::prepare::WeightBytes;
use crate::engine::weights::{
    LayerLayout, activation_type, embedding_bytes, head_bytes, linear_shapes, post_norm_bytes,
    separate_gate_up, table_bytes,
};
use crate::model::{ModelSpec, Weights};
use crate::program::{
    EXPERTS_UNDER_WAY, Far, LayerPlacement, Phase, Placement, Policy, Residence, Side, Sublayer,
};
use crate::simd::linear;
use crate::{Error, Result};

/// Bytes that an allocation occupies.
pub(super) fn rounded(bytes: usize) -> u64 {
    bytes.next_multiple_of(256) as u64
}

/// More than all kernels of a model take on a device, with their local memory and graphs.
const AMPLE: u64 = 1 << 30;

/// See the [module](self).
#[derive(Clone)]
pub struct Sizes {
    pub(super) shape: Shape,
    pub(super) limits: Limits,
    /// Most tokens of a sequence.
    pub(super) context: usize,
    /// Pages of all sequences.
    pub(super) pages: usize,
    pub(super) sub_batches: usize,
    /// Requested pages of a layer on the device.
    pub(super) kv_pages: Option<usize>,
    /// Pages for sequences that live on the host, if the caller decides which do.
    pub(super) far_pages: Option<usize>,
    /// How tokens whose pages have left are attended, if fixed.
    pub(super) far: Option<Far>,
    /// Whether their pages may be streamed.
    pub(super) streams: bool,
    /// Whether experts of divided layers follow the routers.
    follows: bool,
    pub(super) linears: Vec<LinearWeight>,
    layouts: Vec<LayerLayout>,
    /// The layouts of layers of experts without these; empty for a model without experts.
    bare: Vec<Option<LayerLayout>>,
    pub(super) gate_up: bool,
    head: u64,
    /// Bytes of the embedding, without and with a head on the same side.
    embedding: [u64; 2],
    /// Tables that attention reads beside the layers' images.
    tables: u64,
    /// Bytes of a streamed layer that stay on the device.
    post_norms: u64,
    /// Bytes of the activations: without rows of experts, with them, and with those of layers whose experts are divided.
    activations: [u64; 3],
    lists: u64,
    /// Memory on the host; its weights are only those that are always there.
    host: Memory,
    host_layers: Vec<u64>,
    host_head: u64,
    free: u64,
    /// Bytes of the pieces in which the device's memory is given out.
    granule: u64,
    device: String,
}

impl Sizes {
    /// The sizes of a model that is to run with `options` on `accel` and the CPU. Where the device's memory is short, the model's
    /// kernels are loaded first, so that no plan counts on what they take.
    ///
    /// # Errors
    /// If a tensor is missing, the accelerator cannot multiply one, or the device has failed.
    pub fn new(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        accel: &dyn Accelerator,
    ) -> Result<Sizes> {
        let pages = options.check(spec)?;
        let act = activation_type(accel, spec, weights)?;
        let exact = (options.mode == linear::Mode::Deterministic).then_some(options.isa);
        let shape = Shape { exact, ..Shape::of(spec, act, options.kv_dtype) };
        accel.check(&shape)?;
        let linears = linear_shapes(accel, spec, weights)?;
        let gate_up = separate_gate_up(accel, spec, weights)?;
        let layouts = (0..spec.n_layers)
            .map(|l| LayerLayout::new(accel, spec, weights, l, act))
            .collect::<Result<Vec<_>>>()?;
        let bare = match &spec.experts {
            None => Vec::new(),
            Some(experts) => {
                let of = |(l, &has): (usize, &bool)| {
                    has.then(|| LayerLayout::without_experts(accel, spec, weights, l, act)).transpose()
                };
                experts.layers.iter().enumerate().map(of).collect::<Result<_>>()?
            }
        };
        let runtime = accel.runtime();
        let host = WeightBytes::of(spec, weights, options.isa)?;
        let mut sizes = Sizes {
            context: options.context,
            pages,
            sub_batches: options.sub_batches,
            kv_pages: options.kv_pages,
            far_pages: options.far_pages,
            far: options.far,
            streams: options.far.map_or(options.times.is_some(), |far| far == Far::Stream),
            follows: options.follow.is_some(),
            head: head_bytes(accel, spec, weights, act)?,
            embedding: [
                embedding_bytes(accel, spec, weights, act, false)?,
                embedding_bytes(accel, spec, weights, act, true)?,
            ],
            tables: table_bytes(spec, options.context),
            post_norms: post_norm_bytes(spec),
            granule: runtime.granule(),
            activations: [0; 3],
            lists: 0,
            host: Memory { weights: host.always, kv: 0, activations: 0 },
            host_layers: host.blocks,
            host_head: host.head,
            free: runtime.memory_free()?,
            device: runtime.info().name.clone(),
            limits: limits_of(options, accel),
            shape,
            linears,
            layouts,
            bare,
            gate_up,
        };
        sizes.count_rows(spec, weights, options, accel)?;
        Ok(sizes)
    }

    /// The same with chunks of `options.chunk` rows, where all other options are as they were. What weights take is not counted again,
    /// which takes most of the time.
    ///
    /// # Errors
    /// As [`Sizes::new`].
    pub fn with_chunk(
        &self,
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        accel: &dyn Accelerator,
    ) -> Result<Sizes> {
        options.check(spec)?;
        let mut sizes = Sizes { limits: limits_of(options, accel), ..self.clone() };
        sizes.count_rows(spec, weights, options, accel)?;
        Ok(sizes)
    }

    /// Counts what depends on the rows of a step, and loads the model's kernels where memory is short.
    fn count_rows(
        &mut self,
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        accel: &dyn Accelerator,
    ) -> Result<()> {
        let (shape, limits, granule) = (&self.shape, &self.limits, self.granule);
        let scratch = accel.scratch_bytes(shape, limits, &self.linears);
        let activations = |shape: &Shape| {
            let workspace = Workspace::sizes(shape, limits, self.gate_up, false, scratch);
            workspace.iter().map(|&b| takes(granule, rounded(b))).sum()
        };
        self.activations = [
            &Shape { experts: None, ..shape.clone() },
            shape,
            &Shape { experts: shape.experts.map(ExpertShape::divided), ..shape.clone() },
        ]
        .map(activations);
        self.lists = takes(granule, rounded(accel.step_bytes(shape, limits)));
        let threads = options.threads.unwrap_or_else(crate::host::cores_beside_device).max(1);
        let rows = Memory::without_weights(spec, weights, options, threads)?;
        self.host = Memory { weights: self.host.weights, ..rows };
        if self.is_short() {
            let runtime = accel.runtime();
            load_kernels(&**runtime, &KernelNeeds::new(&self.shape, &self.linears))?;
            self.free = runtime.memory_free()?;
        }
        Ok(())
    }

    /// Whether loaded kernels may take memory that a plan would count on. Where all of the model fits with room to spare they are
    /// loaded beside its weights, which is faster.
    fn is_short(&self) -> bool {
        let all = Placement::all(Side::Device, self.layers(), 0);
        self.device(&all).total() + AMPLE > self.free
    }

    /// Blocks of the model.
    pub fn layers(&self) -> usize {
        self.layouts.len()
    }

    /// Each layer of a placement with its layout on the device: without experts that the host computes, unless the layer is
    /// streamed, which brings all of it.
    pub(super) fn layouts<'a>(
        &'a self,
        placement: &'a Placement,
    ) -> impl Iterator<Item = (&'a LayerPlacement, &'a LayerLayout)> {
        let of = |(l, at): (usize, &'a LayerPlacement)| {
            let bare = self.bare.get(l).and_then(Option::as_ref).filter(|_| !at.images_experts());
            (at, bare.unwrap_or(&self.layouts[l]))
        };
        placement.layers.iter().enumerate().map(of)
    }

    /// The layout of a layer's feed-forward alone.
    pub(super) fn feed_forward(&self, layer: usize) -> LayerLayout {
        self.layouts[layer].feed_forward()
    }

    /// Bytes of each image that takes its turn in a staging buffer.
    pub(super) fn staged(&self, placement: &Placement) -> impl Iterator<Item = usize> {
        placement.layers.iter().zip(&self.layouts).filter_map(|(at, layout)| match at.weights {
            Residence::Streamed => Some(layout.bytes),
            Residence::StreamedExperts => Some(layout.feed_forward_bytes()),
            Residence::Host | Residence::Device | Residence::Both => None,
        })
    }

    /// The shape of a placement's steps on the device: without experts if the host computes all of them.
    pub(super) fn shape(&self, placement: &Placement) -> Shape {
        let experts = match self.rows_of_experts(placement) {
            0 => None,
            1 => self.shape.experts,
            _ => self.shape.experts.map(ExpertShape::divided),
        };
        Shape { experts, ..self.shape.clone() }
    }

    /// Whether the device computes all feed-forwards.
    pub fn computes_experts(&self) -> bool {
        self.layouts.iter().all(|l| l.elsewhere().is_none())
    }

    /// Whether a layer's feed-forward is a mixture of experts.
    fn is_mixture(&self, layer: usize) -> bool {
        self.bare.get(layer).is_some_and(Option::is_some)
    }

    /// Which rows of experts the device has: none, those of its own, or also what the host's experts give.
    fn rows_of_experts(&self, placement: &Placement) -> usize {
        let of = |(l, at): (usize, &LayerPlacement)| match self.is_mixture(l)
            && at.computes_ffn_on(Side::Device)
        {
            true => 1 + usize::from(at.is_divided()),
            false => 0,
        };
        placement.layers.iter().enumerate().map(of).max().unwrap_or(0)
    }

    /// Pages of a placement's layers.
    pub(super) fn paging(&self, placement: &Placement) -> Paging {
        self.paging_if(placement, self.streams)
    }

    /// The same, if pages that have left may be streamed, or may not.
    fn paging_if(&self, placement: &Placement, streams: bool) -> Paging {
        let all = self.pages;
        let sides = Sides::of(placement);
        let device = match placement.device_pages {
            _ if !sides.device => 0,
            0 => self.kv_pages.unwrap_or(all).min(all),
            n => n.min(all),
        };
        let stays = Pager::new(device, false).device_pages_kept();
        let far = match self.far_pages {
            Some(n) if sides.device => n,
            // Pages that are not on a device at its settled fill level, plus an unfinished page of each sequence.
            None if sides.device && device < all => (all - stays + self.limits.sequences).min(all),
            _ => 0,
        };
        // One page of the host's layers for each page of the others.
        let host = match self.far_pages {
            _ if !sides.host => 0,
            Some(n) if sides.device => device + n,
            _ => all,
        };
        let staged = if placement.layers.iter().any(stages_pages) { host } else { 0 };
        let staged_far = match self.far_pages {
            Some(_) => self.staging_pages().min(far),
            None if streams => far,
            None => 0,
        };
        let streams_far = staged_far > 0 && streams;
        Paging { device, far, host, staged, staged_far, streams_far }
    }

    /// Pages of staging memory that the prompts of one step may use: one prompt of maximum length, or several with the
    /// rows of a step.
    fn staging_pages(&self) -> usize {
        self.limits.pages_per_sequence.max(KvGeometry::pages_for(self.limits.rows) + self.limits.sequences)
    }

    /// A placement with its numbers of pages; if pages move, also the numbers on the device and in total.
    pub fn with_pages(&self, placement: Placement) -> (Placement, Option<(usize, usize)>) {
        let paging = self.paging(&placement);
        let counts = (paging.far > 0).then_some((paging.device, self.pages));
        let host_pages = paging.host.max(paging.far);
        (Placement { device_pages: paging.device, host_pages, ..placement }, counts)
    }

    /// Whether a placement does not use the host at all, not even for weights or pages.
    pub(super) fn alone(&self, placement: &Placement) -> bool {
        let resident = |l: &LayerPlacement| matches!(l.weights, Residence::Device | Residence::Both);
        !placement.uses(Side::Host) && placement.layers.iter().all(resident) && !self.pages_move(placement)
    }

    /// Whether pages of keys and values leave the device.
    pub fn pages_move(&self, placement: &Placement) -> bool {
        self.paging(placement).far > 0
    }

    /// The fewest pages on the device with which a step of any rows can run.
    pub(super) fn fewest_pages(&self) -> usize {
        (KvGeometry::pages_for(self.limits.rows) + 2 * self.limits.sequences).min(self.pages)
    }

    /// The mode of every layer.
    pub(super) fn modes(&self, placement: &Placement) -> Vec<Mode> {
        let paged = self.pages_move(placement);
        let of = |(layer, layout): (&LayerPlacement, &LayerLayout)| {
            let side = |p| layer.policy(p).attention().unwrap_or(Side::Device);
            let moves = paged && layer.kv == Side::Device && layout.windowed();
            Mode {
                attend: [Phase::Prefill, Phase::Decode].map(side),
                kv: layer.kv,
                window: self.shape.window.filter(|_| moves),
            }
        };
        placement.layers.iter().zip(&self.layouts).map(of).collect()
    }

    /// The windows of layers whose pages may be streamed; their steps have separate lists.
    pub(super) fn far_windows(&self, placement: &Placement) -> Vec<Option<usize>> {
        let mut found: Vec<Option<usize>> = Vec::new();
        for mode in self.modes(placement).iter().filter(|m| m.kv == Side::Device) {
            if !found.contains(&mode.window) {
                found.push(mode.window);
            }
        }
        found
    }

    /// Bytes of `n` pages of one layer.
    pub(super) fn pages_bytes(&self, n: usize) -> u64 {
        (n * self.shape.page_bytes()) as u64
    }

    /// Bytes of one part of partial attention of a sub-batch's rows, on the device.
    pub(super) fn partial_bytes(&self) -> u64 {
        let row = RowBytes::new(&self.shape);
        let parts = [row.partial_ms, row.partial_ms, row.partial_o];
        parts.iter().map(|b| takes(self.granule, rounded(b * self.limits.rows))).sum()
    }

    /// Bytes of the experts that are under way between the sides.
    fn following(&self, placement: &Placement) -> u64 {
        let divided = self.layouts(placement).filter(|(layer, _)| self.follows && layer.is_divided());
        let largest = divided.map(|(_, layout)| layout.expert_bytes()).max().unwrap_or(0);
        (EXPERTS_UNDER_WAY * largest) as u64
    }

    /// Bytes on the device.
    pub fn device(&self, placement: &Placement) -> Memory {
        self.device_if(placement, self.streams).memory()
    }

    /// Bytes on the device with tokens whose pages have left attended as `far` says; `None`: either way.
    pub fn device_by(&self, placement: &Placement, far: Option<Far>) -> Memory {
        self.device_if(placement, far != Some(Far::Attend)).memory()
    }

    /// Bytes on the device, if pages that have left may be streamed, or may not.
    pub(super) fn device_if(&self, placement: &Placement, streams: bool) -> DeviceBytes {
        let takes = |bytes: u64| takes(self.granule, bytes);
        let mut weights = takes(self.tables);
        let (embeds, heads) = (placement.embedding == Side::Device, placement.head == Side::Device);
        if embeds {
            weights += takes(self.embedding[usize::from(heads)]);
        }
        if heads {
            weights += takes(self.head);
        }
        let largest = self.staged(placement).map(rounded).max().unwrap_or(0);
        let mut kv = 0;
        let paging = self.paging_if(placement, streams);
        for (layer, layout) in self.layouts(placement) {
            match layer.weights {
                Residence::Device | Residence::Both => {
                    weights += takes(layout.bytes_with(layer.device_experts) as u64);
                }
                Residence::StreamedExperts => weights += takes(layout.bytes as u64),
                Residence::Streamed => weights += self.post_norms,
                Residence::Host => {}
            }
            kv += if layer.kv == Side::Device { takes(self.pages_bytes(paging.device)) } else { 0 };
        }
        let staged =
            2 * (takes(self.pages_bytes(paging.staged)) + takes(self.pages_bytes(paging.staged_far)));
        let near = if paging.far > 0 { self.partial_bytes() } else { 0 };
        let far = match paging.streams_far {
            true => self.partial_bytes() + self.lists * self.far_windows(placement).len() as u64,
            false => 0,
        };
        let lists = self.lists * distinct(&self.modes(placement)).len().max(1) as u64;
        let times = self.sub_batches as u64;
        DeviceBytes {
            weights,
            kv,
            staging_weights: 2 * takes(largest) + takes(self.following(placement)),
            staging_kv: staged,
            activations: (self.activations[self.rows_of_experts(placement)] + near + far) * times,
            lists: lists * times,
        }
    }

    /// Bytes on the host.
    pub fn host(&self, placement: &Placement) -> Memory {
        let m = self.host_without_pinned(placement);
        Memory { activations: m.activations + self.pinned(placement), ..m }
    }

    /// Bytes on the host, but for [`Sizes::pinned`]. Where all is on the device, the host's half does not come to be.
    pub(super) fn host_without_pinned(&self, placement: &Placement) -> Memory {
        if self.alone(placement) {
            return Memory { weights: 0, kv: 0, activations: 0 };
        }
        let mut memory = self.host;
        memory.kv = 0;
        let paging = self.paging(placement);
        memory.weights += self.staged(placement).map(|bytes| bytes as u64).sum::<u64>();
        for (layer, bytes) in placement.layers.iter().zip(&self.host_layers) {
            if layer.computes_on_host() {
                memory.weights += bytes;
            }
            memory.kv += self.pages_bytes(if layer.kv == Side::Host { paging.host } else { paging.far });
        }
        memory.weights += if placement.head == Side::Host { self.host_head } else { 0 };
        memory
    }

    /// Bytes of pinned memory through which rows of all sub-batches cross the link: mailboxes, partial attention, and
    /// an area for each kind of cargo and direction.
    pub(super) fn pinned(&self, placement: &Placement) -> u64 {
        let (rows, paging) = (self.limits.rows, self.paging(placement));
        let hosts = self.modes(placement).iter().any(|m| m.attend.contains(&Side::Host));
        let mailbox = if hosts || paging.far > 0 { Mailbox::bytes(&self.shape, rows) } else { 0 };
        let parts = if paging.far > 0 { PartMail::bytes(&self.shape, rows) } else { 0 };
        // A placement that cannot be lowered cannot run.
        let cargo = cargo(placement, paging.far > 0).unwrap_or_default();
        let areas: usize = cargo.iter().map(|(what, _)| rows * what.row_bytes(&self.shape)).sum();
        (self.sub_batches * (mailbox + parts + areas)) as u64 + self.following(placement)
    }

    /// Whether a placement fits the device.
    pub fn fits(&self, placement: &Placement) -> bool {
        self.device(placement).total() <= self.free
    }

    /// Bytes free on the device.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Returns an error for a placement that does not fit on both sides.
    ///
    /// # Errors
    /// [`Error::Capacity`], with the numbers.
    pub fn check(&self, placement: &Placement) -> Result<()> {
        for (layer, layout) in self.layouts(placement) {
            let count = self.shape.experts.filter(|_| self.is_mixture(layout.layer)).map_or(0, |e| e.count);
            if layer.is_divided() && usize::from(layer.device_experts) >= count {
                return Err(Error::usage(format!(
                    "layer {}: {} of {count} experts on the device, and the others on the host",
                    layout.layer, layer.device_experts
                )));
            }
            let whole = &self.layouts[layout.layer];
            if let Some(why) = whole.elsewhere().filter(|_| layer.computes_ffn_on(Side::Device)) {
                return Err(Error::Unsupported(format!(
                    "layer {} on a device: {why}, which run on the CPU only for now; use `strategy` cpu-moe, which leaves them \
                     there, or `device` cpu",
                    layout.layer
                )));
            }
            if layer.weights == Residence::StreamedExperts
                && (!self.is_mixture(layout.layer) || layer.is_divided())
            {
                return Err(Error::usage(format!(
                    "layer {}: experts are streamed of a mixture that is not divided",
                    layout.layer
                )));
            }
            let split = |p: &Policy| p.side(Sublayer::Up) != p.side(Sublayer::Down);
            if self.is_mixture(layout.layer) && [layer.prefill, layer.decode].iter().any(split) {
                return Err(Error::Unsupported(format!(
                    "layer {}: both parts of a feed-forward of experts run on one side",
                    layout.layer
                )));
            }
        }
        let (paging, fewest) = (self.paging(placement), self.fewest_pages());
        if paging.far > 0 && self.far_pages.is_none() && paging.device < fewest {
            return Err(Error::usage(format!(
                "{} pages of keys and values on the device: steps of {} rows of {} sequences need {fewest}; use more, or \
                 smaller chunks",
                paging.device, self.limits.rows, self.limits.sequences
            )));
        }
        self.device(placement).check_device(self.free, &self.device)?;
        self.host(placement).check()
    }
}

/// Bytes on the device, by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeviceBytes {
    /// Weights that stay.
    pub weights: u64,
    /// Pages of keys and values.
    pub kv: u64,
    /// Two buffers for streamed layers.
    pub staging_weights: u64,
    /// Staging areas for pages.
    pub staging_kv: u64,
    /// Rows of a step.
    pub activations: u64,
    /// Lists of a step.
    pub lists: u64,
}

impl DeviceBytes {
    fn memory(self) -> Memory {
        Memory {
            weights: self.weights + self.staging_weights,
            kv: self.kv + self.staging_kv,
            activations: self.activations + self.lists,
        }
    }
}

/// Sizes of steps with `options`.
fn limits_of(options: &Options, accel: &dyn Accelerator) -> Limits {
    // Decode steps are padded to a bucket, so that few graphs serve all batches.
    let padded = |n: usize| n.max(accel.row_bucket(n.min(GRAPH_ROWS)));
    let (rows, sequences) = (padded(options.rows()), padded(options.sequences));
    let logit_rows = options.logit_rows().max(sequences).max(LOGIT_ROWS.min(rows));
    let pages_per_sequence = KvGeometry::pages_for(options.context);
    Limits { rows, logit_rows, sequences, pages_per_sequence }
}

/// Bytes that an allocation takes of memory in pieces: whole ones, but for those that share some.
fn takes(granule: u64, bytes: u64) -> u64 {
    if 2 * bytes > granule { bytes.next_multiple_of(granule) } else { bytes }
}

/// Pages of each layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Paging {
    /// Pages on the device, of layers with keys and values there.
    pub device: usize,
    /// Pages of these layers away from the device.
    pub far: usize,
    /// Pages of the other layers.
    pub host: usize,
    /// Pages in each of two staging areas on the device, for layers with keys and values on the host.
    pub staged: usize,
    /// Pages in each of two staging areas for pages that have left, and for prompts whose keys and values go to the
    /// host.
    pub staged_far: usize,
    /// Whether pages that have left are attended in staging memory.
    pub streams_far: bool,
}

/// Whether the device attends over a layer's keys and values that are kept on the host.
pub(super) fn stages_pages(layer: &LayerPlacement) -> bool {
    layer.kv == Side::Host
        && [layer.prefill, layer.decode].iter().any(|p| p.attention() == Some(Side::Device))
}
