//! Translates operations on the device's lanes into calls of the accelerator.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::mode::Mode;
use super::pack::{Packed, is_packed};
use super::parts::PartMail;
use crate::Result;
use crate::cache::{self, PAGE_TOKENS};
use crate::device::{
    Accelerator, AttnTables, Buffer, DevPtr, EmbedWeight, Lane, LayerPages, LayerWeights, Limits,
    LinearWeight, Mailbox, NormWeight, PageMove, PartialRows, Pinned, Publish, Published, Residual, RowBytes,
    RowOp, Runtime, Shape, Step, StepContext, Workspace,
};
use crate::engine::weights::{LayerImage, LayerLayout, LayerStream};
use crate::program::{Kind, Op, Part, Sublayer, Unit};

/// A layer's weights on the device.
pub(super) enum Weights {
    /// Not on the device. Attention over its pages still needs the layer's layout and tables.
    Absent(Box<LayerLayout>, AttnTables),
    /// In the device's memory.
    Resident(LayerWeights),
    /// In pinned host memory, fetched to a staging buffer; with the parts that stay on the device.
    Streamed(LayerImage, Staying),
    /// In the device's memory but for the experts, which are fetched to a staging buffer.
    StreamedExperts(Box<LayerWeights>, LayerImage),
}

impl Weights {
    /// What is fetched to a staging buffer.
    pub fn image(&self) -> Option<&LayerImage> {
        match self {
            Weights::Streamed(image, _) | Weights::StreamedExperts(_, image) => Some(image),
            Weights::Absent(..) | Weights::Resident(_) => None,
        }
    }
}

/// The parts of a streamed layer that are always on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Staying {
    /// Tables of its attention.
    pub tables: AttnTables,
    /// Norms of the outputs of attention and feed-forward (NULL without). The next layer applies the latter, when this
    /// layer's staging buffer may already hold another layer.
    pub post: [DevPtr; 2],
}

impl Staying {
    fn with(self, weights: LayerWeights) -> LayerWeights {
        LayerWeights { post_attn: self.post[0], post_ffn: self.post[1], ..weights }
    }
}

/// The device's memory, and everything in it.
pub(super) struct DeviceHalf {
    pub accel: Arc<dyn Accelerator>,
    pub runtime: Arc<dyn Runtime>,
    pub shape: Shape,
    /// Limits of each sub-batch.
    pub limits: Limits,
    pub parts: Vec<DevicePart>,
    pub layers: Vec<Weights>,
    /// How each layer's attention is computed.
    pub modes: Vec<Mode>,
    pub stream: Option<LayerStream>,
    /// Layers in the staging buffers, the oldest first.
    pub fetched: VecDeque<usize>,
    pub embed: Option<EmbedWeight>,
    pub head: Option<(NormWeight, LinearWeight)>,
    /// Pages of the layers that keep them on the device.
    pub kv: Vec<Option<DevPtr>>,
    /// Staging pages of one layer each, for keys and values that are kept on the host but attended on the device.
    pub staged: Option<[DevPtr; 2]>,
    /// Staging pages for layers that keep keys and values on the device, for pages that have left it.
    pub staged_far: Option<[DevPtr; 2]>,
    /// The host's pages if pages are staged, and the bytes of a layer.
    pub host_pages: Option<(Arc<dyn Pinned>, usize)>,
    /// Pages away from the device, and the bytes of a layer.
    pub far_pages: Option<(Arc<dyn Pinned>, usize)>,
    pub bytes_per_step: u64,
    pub _buffers: Vec<Buffer>,
}

/// The device's memory of a sub-batch.
pub(super) struct DevicePart {
    pub ws: Workspace,
    /// Memory of the step's lists, for each way of attending.
    pub lists: Vec<(Mode, DevPtr)>,
    /// For rows attended on the host.
    pub mailbox: Option<Mailbox>,
    /// For rows attended on both sides.
    pub parts: Option<PartMail>,
    /// For pages that are streamed.
    pub far_stream: Option<FarStream>,
}

/// Additional memory for attention over streamed pages: its own step lists and partial results.
#[derive(Clone)]
pub(super) struct FarStream {
    /// For layers without a window, and with one.
    pub lists: Vec<(Option<usize>, DevPtr)>,
    pub partial: PartialRows,
}

impl DevicePart {
    fn mailbox(&self) -> &Mailbox {
        self.mailbox.as_ref().expect("a mailbox was planned")
    }
}

/// The lane of a unit.
pub(super) fn lane(unit: Unit) -> Lane {
    match unit {
        Unit::Gpu | Unit::Host => Lane::Compute,
        Unit::H2d => Lane::HostToDevice,
        Unit::D2h => Lane::DeviceToHost,
    }
}

pub(super) fn rows_of(op: &Op) -> Range<usize> {
    op.rows.start as usize..op.rows.end as usize
}

/// The rows of an operation as the accelerator computes them: if these are all rows of a step, with the padding.
pub(super) fn launched(op: &Op, step: &Step) -> Range<usize> {
    let rows = rows_of(op);
    if rows == (0..step.lists.taken()) { 0..step.rows } else { rows }
}

impl DeviceHalf {
    pub fn describe(&self) -> String {
        let info = self.runtime.info();
        format!("{}, sm_{}, {} activations", info.name, info.sm, self.shape.act_name())
    }

    /// The weights of a layer, for work enqueued on the compute lane from now on. Streamed experts are with [`Self::feed_forward`] only.
    fn weights(&mut self, layer: usize) -> Result<LayerWeights> {
        match &self.layers[layer] {
            Weights::Resident(w) => Ok(w.clone()),
            Weights::StreamedExperts(w, _) => Ok(LayerWeights::clone(w)),
            // No operation reads weights of such a layer on the device.
            Weights::Absent(layout, tables) => Ok(layout.at(DevPtr::NULL, *tables)),
            Weights::Streamed(image, staying) if self.fetched.contains(&layer) => {
                let stream = self.stream.as_mut().expect("staging buffers for streamed layers");
                Ok(staying.with(stream.acquire(&image.layout, staying.tables)?))
            }
            // Only attention uses this layer.
            Weights::Streamed(image, staying) => Ok(image.layout.at(DevPtr::NULL, staying.tables)),
        }
    }

    /// The same for its feed-forward.
    fn feed_forward(&mut self, layer: usize) -> Result<LayerWeights> {
        match &self.layers[layer] {
            Weights::StreamedExperts(w, image) => {
                let stream = self.stream.as_mut().expect("staging buffers for streamed layers");
                let staged = stream.acquire(&image.layout, w.tables)?;
                Ok(LayerWeights { ffn: staged.ffn, ..LayerWeights::clone(w) })
            }
            _ => self.weights(layer),
        }
    }

    /// Enqueues the copy of a streamed layer, or its experts, over the oldest layer in the staging buffers.
    pub fn fetch(&mut self, layer: usize) -> Result<()> {
        let image = self.layers[layer].image().expect("the layer is streamed");
        let stream = self.stream.as_mut().expect("staging buffers for streamed layers");
        if self.fetched.len() == 2
            && let Some(oldest) = self.fetched.pop_front()
        {
            stream.release(oldest)?;
        }
        stream.fetch(image)?;
        self.fetched.push_back(layer);
        Ok(())
    }

    /// Called when the step has been issued or given up: frees the staging buffers after the enqueued work.
    pub fn release_all(&mut self) -> Result<()> {
        let mut first = Ok(());
        while let Some(layer) = self.fetched.pop_front() {
            if let Some(stream) = &mut self.stream {
                first = first.and(stream.release(layer));
            }
        }
        first
    }

    /// The residual that a sublayer of `layer` has left on the device, wherever it was computed: a sublayer's output
    /// crosses the link alone only to the side that has the rest of the residual stream, which also computed with the
    /// layer.
    pub fn residual(&self, layer: Option<usize>, of: Sublayer) -> Residual {
        let Some(layer) = layer else { return Residual::None };
        match (&self.layers[layer], of) {
            (Weights::Resident(w), Sublayer::Out) => Residual::after(w.post_attn),
            (Weights::Resident(w), _) => Residual::after(w.post_ffn),
            (Weights::StreamedExperts(w, _), Sublayer::Out) => Residual::after(w.post_attn),
            (Weights::StreamedExperts(w, _), _) => Residual::after(w.post_ffn),
            (Weights::Streamed(_, staying), Sublayer::Out) => Residual::after(staying.post[0]),
            (Weights::Streamed(_, staying), _) => Residual::after(staying.post[1]),
            // Computed on the host, and already normed.
            (Weights::Absent(..), _) => Residual::Delta,
        }
    }

    /// Enqueues an operation on its lane. `step` has the lists for the way its layer is attended, and `far`
    /// those of tokens whose pages are streamed. If rows are `packed`, the operation that first needs them so moves them.
    pub fn compute(
        &mut self,
        op: &Op,
        step: &Step,
        far: Option<&Step>,
        packed: Option<&Packed>,
        epoch: u32,
    ) -> Result<()> {
        let (accel, shape) = (self.accel.clone(), self.shape.clone());
        let b = op.sub_batch as usize;
        let ws = self.parts[b].ws;
        let rows = match packed.filter(|_| is_packed(op)) {
            Some(packed) => {
                if op.kind == Kind::OutProj {
                    self.pack(&ws, packed)?;
                }
                packed.rows()
            }
            None => launched(op, step),
        };
        let cx = StepContext { lane: lane(op.unit), shape: &shape, ws: &ws, step };
        let layer = op.layer.map(|l| l as usize);
        let l = layer.unwrap_or_default();
        let before = l.checked_sub(1);
        let added = |half: &DeviceHalf, add: bool, layer: Option<usize>, of| match add {
            true => half.residual(layer, of),
            false => Residual::None,
        };
        match op.kind {
            Kind::Embed => {
                accel.enqueue(&cx, RowOp::Embed(self.embed.as_ref().expect("an embedding here")), rows)
            }
            Kind::Project { add } => {
                let residual = added(self, add, before, Sublayer::Down);
                accel.enqueue(&cx, RowOp::Project { layer: &self.weights(l)?, residual }, rows)
            }
            Kind::Append { staged, .. } => {
                accel.enqueue(&cx, RowOp::Append { kv: self.pages(l, staged) }, rows)
            }
            Kind::Publish { queries_only } => {
                let what = if queries_only { Published::Queries } else { Published::Qkv };
                let mailbox = self.parts[b].mailbox();
                accel.enqueue(&cx, RowOp::Publish(Publish { mailbox, epoch_add: epoch, what }), rows)
            }
            Kind::Attend { part: Part::UpToBoundary, staged, .. } => {
                let partial = self.parts[b].far_stream.as_ref().expect("streamed pages were planned").partial;
                let (ws, step) = (Workspace { partial, ..ws }, far.expect("lists of streamed pages"));
                let pages = self.pages(l, staged);
                accel.enqueue(
                    &StepContext { ws: &ws, step, ..cx },
                    RowOp::Attend { layer: &self.weights(l)?, kv: pages },
                    rows,
                )
            }
            Kind::Attend { staged, .. } => {
                let pages = self.pages(l, staged);
                accel.enqueue(&cx, RowOp::Attend { layer: &self.weights(l)?, kv: pages }, rows)
            }
            Kind::Merge { mailbox } => {
                let part = &self.parts[b];
                let other = match mailbox {
                    true => part.parts.as_ref().map(|p| p.on_device(&shape)),
                    false => part.far_stream.as_ref().map(|f| f.partial),
                };
                let other = other.expect("memory for attention in parts was planned");
                accel.enqueue(&cx, RowOp::Merge { layer: &self.weights(l)?, other: &other }, rows)
            }
            Kind::Collect => accel.enqueue(&cx, RowOp::Collect(self.parts[b].mailbox()), rows),
            Kind::OutProj => accel.enqueue(&cx, RowOp::OutProj(&self.weights(l)?), rows),
            Kind::FfnUp { add } => {
                let residual = added(self, add, layer, Sublayer::Out);
                accel.enqueue(&cx, RowOp::FfnUp { layer: &self.feed_forward(l)?, residual }, rows)
            }
            Kind::FfnDown => accel.enqueue(&cx, RowOp::FfnDown(&self.feed_forward(l)?), rows),
            Kind::AddShare => accel.enqueue(&cx, RowOp::AddShare(&self.weights(l)?), rows),
            Kind::Head { add } => {
                let residual = added(self, add, self.layers.len().checked_sub(1), Sublayer::Down);
                let (norm, head) = self.head.as_ref().expect("a head here");
                accel.enqueue(&cx, RowOp::Logits { norm: *norm, head, residual }, rows)
            }
            Kind::Pick => accel.enqueue(&cx, RowOp::Argmax, rows),
            Kind::Carry { .. } | Kind::Stream { .. } | Kind::Join | Kind::Experts => {
                unreachable!("not of this lane")
            }
            Kind::PageOut { .. } | Kind::PageIn { .. } => unreachable!("not of this lane"),
        }
    }

    /// Moves rows of the residual stream, and of attention's outputs.
    fn pack(&self, ws: &Workspace, packed: &Packed) -> Result<()> {
        let row = RowBytes::new(&self.shape);
        for &(from, to) in packed.moves() {
            for (buffer, bytes) in [(ws.hidden, row.hidden), (ws.attn, row.attn)] {
                let (from, to) = (buffer.add(from * bytes), buffer.add(to * bytes));
                self.runtime.copy(Lane::Compute, to, from, bytes)?;
            }
        }
        Ok(())
    }

    /// Enqueues project, append and publish of the same rows as one pass over them.
    pub fn fused(
        &mut self,
        project: &Op,
        append: &Op,
        publish: Option<&Op>,
        step: &Step,
        epoch: u32,
    ) -> Result<()> {
        let (accel, shape) = (self.accel.clone(), self.shape.clone());
        let b = project.sub_batch as usize;
        let ws = self.parts[b].ws;
        let cx = StepContext { lane: Lane::Compute, shape: &shape, ws: &ws, step };
        let l = project.layer.unwrap_or_default() as usize;
        let residual = match project.kind {
            Kind::Project { add: true } => self.residual(l.checked_sub(1), Sublayer::Down),
            _ => Residual::None,
        };
        let staged = match append.kind {
            Kind::Append { staged, .. } => staged,
            _ => None,
        };
        let pages = self.pages(l, staged);
        let w = self.weights(l)?;
        let publish = publish.map(|op| Publish {
            mailbox: self.parts[b].mailbox(),
            epoch_add: epoch,
            what: match op.kind {
                Kind::Publish { queries_only: true } => Published::Queries,
                _ => Published::Qkv,
            },
        });
        accel.enqueue(&cx, RowOp::Qkv { layer: &w, kv: pages, residual, publish }, launched(project, step))
    }

    /// Adds the pending residual before rows leave for the host.
    pub fn fold(
        &mut self,
        sub_batch: usize,
        layer: usize,
        of: Sublayer,
        step: &Step,
        rows: Range<usize>,
    ) -> Result<()> {
        let residual = self.residual(Some(layer), of);
        if residual == Residual::None {
            return Ok(());
        }
        let cx = StepContext { lane: Lane::Compute, shape: &self.shape, ws: &self.parts[sub_batch].ws, step };
        self.accel.enqueue(&cx, RowOp::Fold(residual), rows)
    }

    pub fn pages(&self, layer: usize, staged: Option<u8>) -> DevPtr {
        match staged {
            Some(slot) => {
                let staged = if self.kv[layer].is_some() { &self.staged_far } else { &self.staged };
                staged.as_ref().expect("staging memory was planned")[slot as usize]
            }
            None => self.kv[layer].expect("pages on the device"),
        }
    }

    /// Moves pages of a sequence between staging memory and the host's pages of a layer, which is the `place`-th of its
    /// side on the host. `home` are the sequence's pages there, `staged` those in staging memory, `tokens` the number
    /// of stored tokens. Returns the bytes that cross the link.
    pub fn move_staged(
        &self,
        op: &Op,
        place: usize,
        (home, staged): (&[u32], &[u32]),
        tokens: usize,
    ) -> Result<usize> {
        let (Kind::PageOut { staged: slot } | Kind::PageIn { staged: slot }) = op.kind else {
            unreachable!("pages do not move by {}", op.kind.name())
        };
        let span = op.reads[0].span.clone();
        let moves: Vec<PageMove> = (span.start as usize..span.end as usize)
            .map(|p| PageMove {
                device: staged[p],
                host: home[p],
                tokens: tokens.saturating_sub(p * PAGE_TOKENS).min(PAGE_TOKENS) as u32,
            })
            .filter(|m| m.tokens > 0)
            .collect();
        let layer = op.layer.unwrap_or_default() as usize;
        let pinned = if self.kv[layer].is_some() { &self.far_pages } else { &self.host_pages };
        let (memory, layer_bytes) = pinned.as_ref().expect("pinned pages were planned");
        let host = memory.device().add(place * layer_bytes);
        self.copy(op, &[LayerPages { device: self.pages(layer, slot), host }], &moves)
    }

    /// Copies pages that change sides, in all layers that keep keys and values on the device. Returns the bytes that cross the link.
    pub fn change_sides(&self, op: &Op, copies: &[cache::PageCopy]) -> Result<usize> {
        let moves: Vec<PageMove> = copies
            .iter()
            .map(|m| PageMove { device: m.device, host: m.host, tokens: m.tokens as u32 })
            .collect();
        let (memory, layer_bytes) = self.far_pages.as_ref().expect("pinned pages were planned");
        let layers: Vec<LayerPages> = self
            .kv
            .iter()
            .flatten()
            .enumerate()
            .map(|(place, &device)| LayerPages { device, host: memory.device().add(place * layer_bytes) })
            .collect();
        self.copy(op, &layers, &moves)
    }

    fn copy(&self, op: &Op, layers: &[LayerPages], moves: &[PageMove]) -> Result<usize> {
        let lane = lane(op.unit);
        match op.kind {
            Kind::PageOut { .. } => self.accel.gather_pages(lane, &self.shape, layers, moves),
            _ => self.accel.scatter_pages(lane, &self.shape, layers, moves),
        }?;
        // Whole pages, however many of their tokens exist.
        Ok(layers.len() * moves.len() * self.shape.page_bytes())
    }
}
