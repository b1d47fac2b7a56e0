//! What an operation on the device's lanes is for the accelerator.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::sizes::Mode;
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{
    Accelerator, Context, EmbedWeight, LayerWeights, Limits, LinearWeight, Mailbox, NormWeight, PageMove,
    Publish, Published, Residual, Shape, Step, Workspace,
};
use crate::device::runtime::{Buffer, DevPtr, Lane, Pinned, Runtime};
use crate::engine::weights::{LayerImage, LayerLayout, LayerStream};
use crate::program::{Kind, Op, Sublayer, Unit};

/// A layer's weights on the device.
pub(super) enum Weights {
    /// Elsewhere. Attention over its pages needs the rest of what a layer is, with tables of RoPE.
    Absent(Box<LayerLayout>, [DevPtr; 2]),
    /// In the device's memory.
    Resident(LayerWeights),
    /// In pinned host memory, fetched to a staging buffer; with what stays on the device.
    Streamed(LayerImage, Staying),
}

/// What is on the device of a streamed layer at all times.
#[derive(Debug, Clone, Copy)]
pub(super) struct Staying {
    /// Tables of RoPE.
    pub rope: [DevPtr; 2],
    /// Norms of the outputs of attention and feed-forward (NULL without): the layer behind applies the latter, when this
    /// one's staging buffer may have been filled anew.
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
    /// Of each sub-batch.
    pub limits: Limits,
    pub parts: Vec<DevicePart>,
    pub layers: Vec<Weights>,
    pub stream: Option<LayerStream>,
    /// Layers in the staging buffers, the oldest first.
    pub fetched: VecDeque<usize>,
    pub embed: Option<EmbedWeight>,
    pub head: Option<(NormWeight, LinearWeight)>,
    /// Pages of the layers that keep them here.
    pub kv: Vec<Option<DevPtr>>,
    /// Pages of one layer each, for keys and values that are kept on the host and attended here.
    pub staged: Option<[DevPtr; 2]>,
    /// The host's pages, where pages are staged.
    pub host_pages: Option<Arc<dyn Pinned>>,
    pub bytes_per_step: u64,
    pub _buffers: Vec<Buffer>,
}

/// What the device has of a sub-batch.
pub(super) struct DevicePart {
    pub ws: Workspace,
    /// Memory of the step's lists, for each way of attending.
    pub lists: Vec<(Mode, DevPtr)>,
    /// For rows attended on the host.
    pub mailbox: Option<Mailbox>,
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

/// The rows of an operation as the accelerator computes them: with all of a step, those that pad it.
fn launched(op: &Op, step: &Step) -> Range<usize> {
    let rows = rows_of(op);
    if rows == (0..step.lists.taken()) { 0..step.rows } else { rows }
}

impl DeviceHalf {
    pub fn describe(&self) -> String {
        let info = self.runtime.info();
        format!("{}, sm_{}, {} activations", info.name, info.sm, self.shape.act.name())
    }

    /// The weights of a layer, for work enqueued on the compute lane from now on.
    fn weights(&mut self, layer: usize) -> Result<LayerWeights> {
        match &self.layers[layer] {
            Weights::Resident(w) => Ok(w.clone()),
            // No operation reads weights of such a layer here.
            Weights::Absent(layout, rope) => Ok(layout.at(DevPtr::NULL, *rope)),
            Weights::Streamed(image, staying) if self.fetched.contains(&layer) => {
                let stream = self.stream.as_mut().expect("staging buffers for streamed layers");
                Ok(staying.with(stream.acquire(&image.layout, staying.rope)?))
            }
            // Attention alone.
            Weights::Streamed(image, staying) => Ok(image.layout.at(DevPtr::NULL, staying.rope)),
        }
    }

    /// Enqueues the copy of a streamed layer, over the oldest one there.
    pub fn fetch(&mut self, layer: usize) -> Result<()> {
        let Weights::Streamed(image, _) = &self.layers[layer] else {
            unreachable!("layer {layer} is not streamed")
        };
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

    /// The step is issued, or given up: the staging buffers are free after what was enqueued.
    pub fn release_all(&mut self) -> Result<()> {
        let mut first = Ok(());
        while let Some(layer) = self.fetched.pop_front() {
            if let Some(stream) = &mut self.stream {
                first = first.and(stream.release(layer));
            }
        }
        first
    }

    /// What a sublayer of `layer` has left to be added here, wherever it was computed: a sublayer's output crosses the
    /// link alone only to the side that has the rest of the residual stream, which computed with the layer, too.
    pub fn residual(&self, layer: Option<usize>, of: Sublayer) -> Residual {
        let Some(layer) = layer else { return Residual::None };
        match (&self.layers[layer], of) {
            (Weights::Resident(w), Sublayer::Out) => Residual::after(w.post_attn),
            (Weights::Resident(w), _) => Residual::after(w.post_ffn),
            (Weights::Streamed(_, staying), Sublayer::Out) => Residual::after(staying.post[0]),
            (Weights::Streamed(_, staying), _) => Residual::after(staying.post[1]),
            // Made on the host, and whole.
            (Weights::Absent(..), _) => Residual::Delta,
        }
    }

    /// Enqueues an operation of the compute lane; `step` has the lists for the way its layer is attended.
    pub fn compute(&mut self, op: &Op, step: &Step, epoch: u32) -> Result<()> {
        let (accel, shape) = (self.accel.clone(), self.shape.clone());
        let (b, rows) = (op.sub_batch as usize, launched(op, step));
        let ws = self.parts[b].ws;
        let cx = Context { lane: Lane::Compute, shape: &shape, ws: &ws, step };
        let layer = op.layer.map(|l| l as usize);
        let l = layer.unwrap_or_default();
        let before = l.checked_sub(1);
        let added = |half: &DeviceHalf, add: bool, layer: Option<usize>, of| match add {
            true => half.residual(layer, of),
            false => Residual::None,
        };
        match op.kind {
            Kind::Embed => accel.embed(&cx, self.embed.as_ref().expect("an embedding here"), rows),
            Kind::Project { add } => {
                let residual = added(self, add, before, Sublayer::Down);
                accel.project(&cx, &self.weights(l)?, residual, rows)
            }
            Kind::Append { staged, .. } => accel.append(&cx, self.pages(l, staged), rows),
            Kind::Publish { queries_only } => {
                let what = if queries_only { Published::Queries } else { Published::Qkv };
                let mailbox = self.parts[b].mailbox();
                accel.publish(&cx, Publish { mailbox, epoch_add: epoch, what }, rows)
            }
            Kind::Attend { staged, .. } => {
                let pages = self.pages(l, staged);
                accel.attend(&cx, &self.weights(l)?, pages, rows)
            }
            Kind::Collect => accel.collect(&cx, self.parts[b].mailbox(), rows),
            Kind::OutProj => accel.out_proj(&cx, &self.weights(l)?, rows),
            Kind::FfnUp { add } => {
                let residual = added(self, add, layer, Sublayer::Out);
                accel.ffn_up(&cx, &self.weights(l)?, residual, rows)
            }
            Kind::FfnDown => accel.ffn_down(&cx, &self.weights(l)?, rows),
            Kind::Head { add } => {
                let residual = added(self, add, self.layers.len().checked_sub(1), Sublayer::Down);
                let (norm, head) = self.head.as_ref().expect("a head here");
                accel.logits(&cx, *norm, head, residual, rows)
            }
            Kind::Pick => accel.argmax(&cx, rows),
            Kind::Merge { .. } | Kind::Carry { .. } | Kind::Stream { .. } => unreachable!("not of this lane"),
            Kind::PageOut { .. } | Kind::PageIn { .. } => unreachable!("not of this lane"),
        }
    }

    /// Project, append and publish of the same rows are one pass over them.
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
        let cx = Context { lane: Lane::Compute, shape: &shape, ws: &ws, step };
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
        accel.qkv(&cx, &w, pages, residual, publish, launched(project, step))
    }

    /// Adds what is pending before rows leave for the host.
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
        let cx = Context { lane: Lane::Compute, shape: &self.shape, ws: &self.parts[sub_batch].ws, step };
        self.accel.fold(&cx, residual, rows)
    }

    fn pages(&self, layer: usize, staged: Option<u8>) -> DevPtr {
        match staged {
            Some(slot) => self.staged.as_ref().expect("staging memory was planned")[slot as usize],
            None => self.kv[layer].expect("pages on the device"),
        }
    }

    /// Moves pages of a sequence between staging memory and the host's pages of the `place`-th layer there; `pages` is
    /// its block table, `tokens` how many are stored.
    pub fn move_staged(
        &self,
        op: &Op,
        place: usize,
        pages: &[u32],
        tokens: usize,
        layer_bytes: usize,
    ) -> Result<()> {
        let (slot, to_host) = match op.kind {
            Kind::PageOut { staged: Some(slot) } => (slot, true),
            Kind::PageIn { staged: Some(slot) } => (slot, false),
            _ => unreachable!("pages change sides for good only with pages on two sides"),
        };
        let span = op.reads[0].span.clone();
        let moves: Vec<PageMove> = (span.start as usize..span.end as usize)
            .map(|p| PageMove {
                device: pages[p],
                host: pages[p],
                tokens: tokens.saturating_sub(p * PAGE_TOKENS).min(PAGE_TOKENS) as u32,
            })
            .filter(|m| m.tokens > 0)
            .collect();
        let memory = self.host_pages.as_ref().expect("pinned pages were planned");
        let host = memory.device().add(place * layer_bytes);
        let staged = self.pages(0, Some(slot));
        let lane = lane(op.unit);
        match to_host {
            true => self.accel.gather_pages(lane, &self.shape, staged, &moves, host),
            false => self.accel.scatter_pages(lane, &self.shape, staged, &moves, host),
        }
    }
}
