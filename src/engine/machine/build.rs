//! Allocates and loads a placement, once the dry run has said that it fits.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use super::carry::{Areas, What};
use super::device::{DeviceHalf, DevicePart, Staying, Weights as LayerOnDevice};
use super::host::{HostHalf, HostPart};
use super::lane::Started;
use super::lowered::Programs;
use super::sizes::{Sizes, computes_on_host, modes, stages_pages};
use super::work::HostWork;
use super::{HostSide, RealMachine};
use crate::cache::{KvGeometry, PageList, PagePool};
use crate::device::accelerator::{Accelerator, Mailbox, RowBytes, Workspace};
use crate::device::runtime::{Buffer, DevPtr, Lane};
use crate::engine::memory::{Memory, geometry};
use crate::engine::options::Options;
use crate::engine::prepare::{Prepared, Units};
use crate::engine::weights::{LayerImage, LayerStream, Upload};
use crate::host::Pool;
use crate::model::{ModelSpec, Weights};
use crate::program::{
    Cargo, Group, Iteration, Kind, Kv, Phase, Placement, RequestId, Residence, Side, Wants, lower,
};
use crate::{Error, Result};

impl RealMachine {
    /// Checks that the placement can run and fits, then allocates, packs and uploads.
    ///
    /// # Errors
    /// A policy that cannot run; memory that does not suffice on either side (with the numbers); weights that the device
    /// cannot multiply; a device that failed.
    pub fn new(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        accel: Arc<dyn Accelerator>,
        device_name: &str,
        strategy: &'static str,
        placement: Placement,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<RealMachine> {
        if placement.layers.len() != spec.n_layers {
            return Err(Error::usage(format!(
                "a placement of {} layers for a model of {}",
                placement.layers.len(),
                spec.n_layers
            )));
        }
        let sizes = Sizes::new(spec, weights, options, &*accel)?;
        let cargo = cargo(&placement)?;
        sizes.check(&placement)?;
        let threads = options.threads;
        let (lane, pool) = Started::new(move || Pool::pinned(threads))?;
        let units = Units {
            layers: placement.layers.iter().map(computes_on_host).collect(),
            head: placement.head == Side::Host,
            node: options.weights_node.clone(),
        };
        let runtime = accel.runtime().clone();
        let kv_geometry = geometry(spec, options.kv_dtype);
        let pages = PageList::new(kv_geometry, sizes.pages)?;
        let mut device = load_device(spec, weights, options, &accel, &placement, &sizes, &pool, progress)?;
        let model = Prepared::part(spec.clone(), weights, options.isa, &units, &pool, progress)?;

        // Keys and values on the host: pinned where the device reads or writes pages.
        let on_host: Vec<usize> =
            (0..spec.n_layers).filter(|&l| placement.layers[l].kv == Side::Host).collect();
        let mut places = vec![None; spec.n_layers];
        for (at, &l) in on_host.iter().enumerate() {
            places[l] = Some(at);
        }
        let host_geometry = KvGeometry { n_layers: on_host.len(), ..kv_geometry };
        let kv = if on_host.is_empty() {
            None
        } else if placement.layers.iter().any(stages_pages) {
            let bytes = on_host.len() * sizes.layer_pages() as usize;
            let memory = runtime.pinned(bytes)?;
            device.host_pages = Some(memory.clone());
            let base =
                NonNull::new(memory.host()).ok_or_else(|| Error::Capacity("no pinned memory".into()))?;
            // SAFETY: zeroed memory of that many bytes, kept by the pool; the device copies pages only between operations
            // of the host on the same sequences (the order of programs).
            Some(unsafe { PagePool::over(host_geometry, sizes.pages, base, bytes, Box::new(memory))? })
        } else {
            Some(PagePool::new(host_geometry, sizes.pages)?)
        };
        let parts = device.parts.iter().map(|p| HostPart::new(spec, p.mailbox.clone())).collect();
        let shape = Some(sizes.shape.clone());
        let work = HostWork::new(spec, &model);
        let host = HostHalf::new(spec, options, model, pool, kv, places.clone(), parts, shape)?;

        let row = RowBytes::new(&sizes.shape);
        let bytes = |what| match what {
            What::Hidden => row.hidden,
            What::Delta => row.delta,
            What::Qkv => row.qkv,
            What::Attn => row.attn,
            What::Act => row.act,
        };
        let sub_batches = 0..sizes.sub_batches as u8;
        let areas: HashMap<_, _> = sub_batches
            .flat_map(|b| cargo.iter().map(move |&(what, to)| (b, what, to)))
            .map(|key| (key, bytes(key.1) * sizes.limits.rows))
            .collect();
        let areas = Areas::new(&runtime, &areas)?;
        runtime.synchronize_all()?;
        let (on_device, on_host) = (sizes.device(&placement), sizes.host(&placement));
        let memory = Memory {
            weights: on_device.weights + on_host.weights,
            kv: on_device.kv + on_host.kv,
            activations: on_device.activations + on_host.activations,
        };
        Ok(RealMachine {
            spec: spec.clone(),
            placement,
            strategy,
            device_name: device_name.to_string(),
            programs: Programs::default(),
            sub_batches: sizes.sub_batches,
            pages,
            places,
            host: Some(HostSide::Lane(lane.serve(host, runtime))),
            device: Some(device),
            areas: Some(areas),
            work,
            memory,
            logits: Vec::new(),
            argmax: Vec::new(),
            bytes: Vec::new(),
            trace: None,
        })
    }
}

/// What crosses the link in any program of a placement.
fn cargo(placement: &Placement) -> Result<Vec<(What, Side)>> {
    let mut found = Vec::new();
    for phase in [Phase::Prefill, Phase::Decode] {
        let group = Group {
            request: RequestId { slot: 0, generation: 0 },
            phase,
            first: 1,
            tokens: 1,
            kv: Kv::Device,
            wants: Wants::All,
        };
        for op in lower(placement, &Iteration::serial(vec![group], true))?.ops {
            if let Kind::Carry { cargo, to } = op.kind {
                let key = (What::of(cargo), to);
                // What is still to be added comes along.
                if !found.contains(&key) {
                    found.push(key);
                }
                debug_assert!(!matches!(cargo, Cargo::Qkv) || to == Side::Device);
            }
        }
    }
    Ok(found)
}

fn load_device(
    spec: &ModelSpec,
    weights: &Weights,
    options: &Options,
    accel: &Arc<dyn Accelerator>,
    placement: &Placement,
    sizes: &Sizes,
    pool: &Pool,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<DeviceHalf> {
    let runtime = accel.runtime().clone();
    let mut upload = Upload::new(accel, spec, weights, sizes.shape.act, pool, progress);
    let rope = upload.rope(options.context)?;
    if let Some(node) = &options.weights_node {
        let streamed = placement.layers.iter().zip(&sizes.layouts);
        let streamed = streamed.filter(|(l, _)| l.weights == Residence::Streamed);
        node.check(streamed.map(|(_, layout)| layout.bytes as u64).sum())?;
    }
    let mut layers = Vec::with_capacity(spec.n_layers);
    let mut bytes_per_step = 0;
    for (layer, layout) in placement.layers.iter().zip(&sizes.layouts) {
        let rope = rope[usize::from(layout.windowed())];
        layers.push(match layer.weights {
            Residence::Host => LayerOnDevice::Absent(Box::new(layout.clone()), rope),
            Residence::Device | Residence::Both => {
                bytes_per_step += layout.matrix_bytes();
                LayerOnDevice::Resident(layout.at(upload.layer(layout)?, rope))
            }
            Residence::Streamed => {
                let staying = Staying { rope, post: upload.post_norms(layout.layer)? };
                let image = LayerImage::on(layout.clone(), &upload.source(), options.weights_node.as_ref())?;
                LayerOnDevice::Streamed(image, staying)
            }
        });
    }
    let head = if placement.head == Side::Device { Some(upload.head()?) } else { None };
    let embed = match placement.embedding {
        Side::Device => Some(upload.embedding(head.as_ref().map(|h| &h.1))?),
        Side::Host => None,
    };
    let mut buffers = upload.finish()?;
    let largest = placement
        .layers
        .iter()
        .zip(&sizes.layouts)
        .filter(|(l, _)| l.weights == Residence::Streamed)
        .map(|(_, layout)| layout.bytes)
        .max();
    let stream = largest.map(|bytes| LayerStream::new(&runtime, 2, bytes)).transpose()?;
    let mut zeroed = |bytes: usize| -> Result<DevPtr> {
        if bytes == 0 {
            return Ok(DevPtr::NULL);
        }
        let buffer = Buffer::new(&runtime, bytes)?;
        runtime.fill(Lane::Compute, buffer.ptr(), 0, buffer.len())?;
        let ptr = buffer.ptr();
        buffers.push(buffer);
        Ok(ptr)
    };
    let layer_pages = sizes.layer_pages() as usize;
    let kv = placement
        .layers
        .iter()
        .map(|l| if l.kv == Side::Device { zeroed(layer_pages).map(Some) } else { Ok(None) })
        .collect::<Result<Vec<_>>>()?;
    let staged = match placement.layers.iter().any(stages_pages) {
        true => Some([zeroed(layer_pages)?, zeroed(layer_pages)?]),
        false => None,
    };
    let scratch = accel.scratch_bytes(&sizes.shape, &sizes.limits, &sizes.linears);
    let step_bytes = accel.step_bytes(&sizes.shape, &sizes.limits);
    let modes = modes(placement);
    let mut sub_batches = Vec::with_capacity(sizes.sub_batches);
    for _ in 0..sizes.sub_batches {
        let mut parts = Vec::new();
        for bytes in Workspace::sizes(&sizes.shape, &sizes.limits, sizes.gate_up, false, scratch) {
            parts.push(zeroed(bytes)?);
        }
        let parts = parts.try_into().map_err(|_| Error::usage("a workspace of other buffers"))?;
        let lists = modes.iter().map(|&m| Ok((m, zeroed(step_bytes)?))).collect::<Result<Vec<_>>>()?;
        // Rows attended on the host pass through mapped memory.
        let mailbox = match modes.iter().flatten().any(|&side| side == Side::Host) {
            true => {
                let rows = sizes.limits.rows;
                Some(Mailbox { memory: runtime.pinned(Mailbox::bytes(&sizes.shape, rows))?, rows })
            }
            false => None,
        };
        sub_batches.push(DevicePart { ws: Workspace::at(sizes.limits, parts), lists, mailbox });
    }
    Ok(DeviceHalf {
        accel: accel.clone(),
        runtime: runtime.clone(),
        shape: sizes.shape.clone(),
        parts: sub_batches,
        limits: sizes.limits,
        layers,
        stream,
        fetched: Default::default(),
        embed,
        head,
        kv,
        staged,
        host_pages: None,
        bytes_per_step,
        _buffers: buffers,
    })
}
