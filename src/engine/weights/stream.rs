//! Streamed layers: each has an image in pinned host memory, and they take turns in staging buffers.
//!
//! ```text
//! to device  │ layer 0 │ layer 1 │         │ layer 2 │ layer 3 │
//! compute    │         │ ░ layer 0 ░░░░░░ │ ░ layer 1 ░░░░░░ │ …      two buffers: a copy runs under the layer before
//! ```
//!
//! refs   LIA §5 (optimisation 2); FlexGen; ZeRO-Inference

use std::sync::Arc;

use super::layer::{LayerLayout, LayerSource};
use crate::device::{AttnTables, Buffer, Event, Lane, LayerWeights, Pinned, Runtime};
use crate::host::NumaBinding;
use crate::{Error, Result};

/// A layer's weights in host memory, in huge pages and page-locked where the system has and allows it, in the device's layout.
pub struct LayerImage {
    /// The layout of the image.
    pub layout: LayerLayout,
    memory: Arc<dyn Pinned>,
}

impl LayerImage {
    /// Allocates and fills an image.
    ///
    /// # Errors
    /// If there is not enough host memory, or a tensor is misshapen.
    pub fn new(layout: LayerLayout, source: &LayerSource<'_>) -> Result<LayerImage> {
        LayerImage::on(layout, source, None)
    }

    /// [`LayerImage::new`] on memory nodes, if any.
    ///
    /// # Errors
    /// As [`LayerImage::new`], and if the system refuses to put memory there.
    pub fn on(
        layout: LayerLayout,
        source: &LayerSource<'_>,
        node: Option<&NumaBinding>,
    ) -> Result<LayerImage> {
        // Copies need neither mapped memory nor, if the system locks no more, locked memory: they are slower then.
        let runtime = source.accel.runtime();
        let slab = match node {
            None => runtime.slab(layout.bytes)?,
            Some(node) => {
                let slab = node.during(|| runtime.slab(layout.bytes))??;
                // Where nothing was locked, the memory gets its pages when it is first touched, by any thread.
                node.bind(slab.memory().host(), layout.bytes)?;
                slab
            }
        };
        let memory = slab.memory().clone();
        // SAFETY: fresh memory of that many bytes, to which neither the device nor another thread has a pointer.
        let image = unsafe { std::slice::from_raw_parts_mut(memory.host(), layout.bytes) };
        layout.fill(source, image)?;
        Ok(LayerImage { layout, memory })
    }
}

/// A staging buffer, and its state.
struct Slot {
    buffer: Buffer,
    /// The layer that it holds or that is being copied to it.
    layer: Option<usize>,
    arrived: Option<Event>,
    /// An event after its last use.
    free: Option<Event>,
}

/// Staging buffers for layers, filled in turns.
pub struct LayerStream {
    runtime: Arc<dyn Runtime>,
    slots: Vec<Slot>,
    next: usize,
}

impl LayerStream {
    /// Allocates `slots` buffers (two hide copies behind computation) of `bytes` bytes, the size of the largest layer.
    ///
    /// # Errors
    /// If the device lacks memory.
    pub fn new(runtime: &Arc<dyn Runtime>, slots: usize, bytes: usize) -> Result<LayerStream> {
        let slot = |_| {
            let buffer = Buffer::new(runtime, bytes)?;
            Ok(Slot { buffer, layer: None, arrived: None, free: None })
        };
        let slots = (0..slots.max(1)).map(slot).collect::<Result<Vec<_>>>()?;
        Ok(LayerStream { runtime: runtime.clone(), slots, next: 0 })
    }

    /// Enqueues the copy of a layer to the next buffer, after the last use of its contents.
    ///
    /// # Errors
    /// If the image is larger than the buffers, the buffer's layer was not [`LayerStream::release`]d, or the device has
    /// failed.
    pub fn fetch(&mut self, image: &LayerImage) -> Result<()> {
        let (layer, bytes) = (image.layout.layer, image.layout.bytes);
        let slot = &mut self.slots[self.next];
        if bytes > slot.buffer.len() {
            return Err(Error::Capacity(format!(
                "layer {layer} of {bytes} bytes in a staging buffer of {}",
                slot.buffer.len()
            )));
        }
        if let Some(there) = slot.layer {
            return Err(Error::usage(format!(
                "layer {layer} is fetched over layer {there}, which is in use"
            )));
        }
        if let Some(free) = slot.free.take() {
            self.runtime.wait(Lane::HostToDevice, &free)?;
        }
        self.runtime.upload_pinned(Lane::HostToDevice, slot.buffer.ptr(), &image.memory, 0..bytes)?;
        let late = self.runtime.clock().map_or(0.0, |clock| clock.rates().late_weights(bytes));
        if late > 0.0 {
            self.runtime.elapse(Lane::HostToDevice, late)?;
        }
        (slot.layer, slot.arrived) = (Some(layer), Some(self.runtime.record(Lane::HostToDevice)?));
        self.next = (self.next + 1) % self.slots.len();
        Ok(())
    }

    /// The weights of a fetched layer, for work enqueued on the compute lane from now on.
    ///
    /// # Errors
    /// If the layer was not fetched, or the device has failed.
    pub fn acquire(&mut self, layout: &LayerLayout, tables: AttnTables) -> Result<LayerWeights> {
        let slot = self.slot(layout.layer)?;
        let (base, arrived) = (self.slots[slot].buffer.ptr(), self.slots[slot].arrived.take());
        if let Some(arrived) = arrived {
            self.runtime.wait(Lane::Compute, &arrived)?;
        }
        Ok(layout.at(base, tables))
    }

    /// Frees a layer's buffer after the work enqueued so far. If a norm is applied before the layer's output is added,
    /// the next layer needs its weights, which must therefore lie elsewhere
    /// ([`Upload::post_norms`](super::Upload::post_norms)).
    ///
    /// # Errors
    /// If the layer was not fetched, or the device has failed.
    pub fn release(&mut self, layer: usize) -> Result<()> {
        let slot = self.slot(layer)?;
        let done = self.runtime.record(Lane::Compute)?;
        (self.slots[slot].layer, self.slots[slot].free) = (None, Some(done));
        Ok(())
    }

    fn slot(&self, layer: usize) -> Result<usize> {
        let found = self.slots.iter().position(|s| s.layer == Some(layer));
        found.ok_or_else(|| Error::usage(format!("layer {layer} was not fetched")))
    }
}
