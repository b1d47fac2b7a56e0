//! Allocates and fills the device's half: weights, pages, activations and lists.

use std::sync::Arc;

use super::device::{DeviceHalf, DevicePart, FarStream, Staying, Weights as LayerOnDevice};
use super::mode::distinct;
use super::parts::PartMail;
use super::sizes::Sizes;
use crate::device::{Accelerator, Buffer, DevPtr, Lane, Mailbox, PartialRows, RowBytes, Shape, Workspace};
use crate::engine::divided::Divided;
use crate::engine::options::Options;
use crate::engine::weights::{LayerImage, LayerLayout, LayerStream, Upload, head_matrix_bytes};
use crate::host::Pool;
use crate::model::{ModelSpec, Weights};
use crate::program::{Placement, Residence, Side};
use crate::{Error, Result};

/// Loads the device's half of a placement that fits.
///
/// # Errors
/// If the device lacks memory, host memory cannot be pinned, or the device has failed.
pub(super) fn device(
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
    let tables = upload.tables(options.context)?;
    if let Some(node) = &options.weights_node {
        node.check(sizes.staged(placement).map(|bytes| bytes as u64).sum())?;
    }
    let mut layers = Vec::with_capacity(spec.n_layers);
    let mut bytes_per_step = 0;
    for (layer, layout) in sizes.layouts(placement) {
        let tables = tables[layout.layer];
        layers.push(match layer.weights {
            Residence::Host => LayerOnDevice::Absent(Box::new(layout.clone()), tables),
            Residence::Device | Residence::Both => {
                let divided = Divided::of(spec, placement, options.router.as_deref(), layout.layer);
                let some = divided
                    .map(|of| {
                        LayerLayout::divided(&**accel, spec, weights, layout.layer, sizes.shape.act, &of)
                    })
                    .transpose()?;
                let layout = some.as_ref().unwrap_or(layout);
                bytes_per_step += layout.matrix_bytes(spec);
                LayerOnDevice::Resident(layout.at(upload.layer(layout)?, tables))
            }
            Residence::Streamed => {
                let staying = Staying { tables, post: upload.post_norms(layout.layer)? };
                let image = LayerImage::on(layout.clone(), &upload.source(), options.weights_node.as_ref())?;
                LayerOnDevice::Streamed(image, staying)
            }
            Residence::StreamedExperts => {
                bytes_per_step += layout.matrix_bytes(spec);
                let experts = sizes.feed_forward(layout.layer);
                let image = LayerImage::on(experts, &upload.source(), options.weights_node.as_ref())?;
                LayerOnDevice::StreamedExperts(Box::new(layout.at(upload.layer(layout)?, tables)), image)
            }
        });
    }
    let head = if placement.head == Side::Device { Some(upload.head()?) } else { None };
    if head.is_some() {
        bytes_per_step += head_matrix_bytes(&**accel, spec, weights, sizes.shape.act)? as u64;
    }
    let embed = match placement.embedding {
        Side::Device => Some(upload.embedding(head.as_ref().map(|h| &h.1))?),
        Side::Host => None,
    };
    let mut buffers = upload.finish()?;
    let stream =
        sizes.staged(placement).max().map(|bytes| LayerStream::new(&runtime, 2, bytes)).transpose()?;
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
    let paging = sizes.paging(placement);
    let bytes = |pages: usize| sizes.pages_bytes(pages) as usize;
    let kv = placement
        .layers
        .iter()
        .map(|l| if l.kv == Side::Device { zeroed(bytes(paging.device)).map(Some) } else { Ok(None) })
        .collect::<Result<Vec<_>>>()?;
    let mut areas = |pages: usize| -> Result<Option<[DevPtr; 2]>> {
        match pages {
            0 => Ok(None),
            n => Ok(Some([zeroed(bytes(n))?, zeroed(bytes(n))?])),
        }
    };
    let (staged, staged_far) = (areas(paging.staged)?, areas(paging.staged_far)?);
    let shape = sizes.shape(placement);
    let scratch = accel.scratch_bytes(&sizes.shape, &sizes.limits, &sizes.linears);
    let step_bytes = accel.step_bytes(&sizes.shape, &sizes.limits);
    let layer_modes = sizes.modes(placement);
    let modes = distinct(&layer_modes);
    let mut sub_batches = Vec::with_capacity(sizes.sub_batches);
    for _ in 0..sizes.sub_batches {
        let mut parts = Vec::new();
        for bytes in Workspace::sizes(&shape, &sizes.limits, sizes.gate_up, paging.far > 0, scratch) {
            parts.push(zeroed(bytes)?);
        }
        let parts = parts.try_into().map_err(|_| Error::usage("a workspace of other buffers"))?;
        let lists = modes.iter().map(|&m| Ok((m, zeroed(step_bytes)?))).collect::<Result<Vec<_>>>()?;
        // Rows attended on the host pass through mapped memory.
        let mailbox = match paging.far > 0 || modes.iter().any(|m| m.attend.contains(&Side::Host)) {
            true => {
                let rows = sizes.limits.rows;
                Some(Mailbox { memory: runtime.pinned(Mailbox::bytes(&sizes.shape, rows))?, rows })
            }
            false => None,
        };
        let rows = sizes.limits.rows;
        let parts_mail = match paging.far {
            0 => None,
            _ => Some(PartMail { memory: runtime.pinned(PartMail::bytes(&sizes.shape, rows))?, rows }),
        };
        let far_stream = match paging.streams_far {
            false => None,
            true => {
                let row = RowBytes::new(&sizes.shape);
                let mut part = |bytes: usize| zeroed(bytes * rows);
                let partial = PartialRows {
                    m: part(row.partial_ms)?,
                    s: part(row.partial_ms)?,
                    o: part(row.partial_o)?,
                };
                let lists = sizes.far_windows(placement).into_iter();
                let lists = lists.map(|w| Ok((w, zeroed(step_bytes)?))).collect::<Result<_>>()?;
                Some(FarStream { lists, partial })
            }
        };
        let ws = Workspace::at(sizes.limits, parts);
        sub_batches.push(DevicePart { ws, lists, mailbox, parts: parts_mail, far_stream });
    }
    Ok(DeviceHalf {
        accel: accel.clone(),
        runtime: runtime.clone(),
        // The workspace's rows of experts are laid out by it.
        shape: Shape { experts: shape.experts.or(sizes.shape.experts), ..sizes.shape.clone() },
        parts: sub_batches,
        limits: sizes.limits,
        layers,
        modes: layer_modes,
        stream,
        fetched: Default::default(),
        embed,
        head,
        kv,
        staged,
        staged_far,
        host_pages: None,
        far_pages: None,
        bytes_per_step,
        _buffers: buffers,
    })
}
