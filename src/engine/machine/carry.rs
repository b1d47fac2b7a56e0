//! Rows across the link, through pinned memory: an area for each kind of cargo and direction.
//!
//! Host to device: the host's rows are written to the area (rounded where the device keeps 16 bits), then copied on the
//! host-to-device lane. Device to host: copied to the area on the device-to-host lane; the first operation of the host that
//! waits for the copy takes the rows from there.

use std::collections::HashMap;
use std::sync::Arc;

use half::{bf16, f16};

use crate::device::accelerator::{Half, RowSpan};
use crate::device::runtime::{Event, Lane, Pinned, Runtime};
use crate::program::{Cargo, Side};
use crate::{Error, Result};

/// A kind of cargo, without what it says of the sublayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum What {
    Hidden,
    Delta,
    Qkv,
    Attn,
    Act,
}

impl What {
    pub fn of(cargo: Cargo) -> What {
        match cargo {
            Cargo::Hidden { .. } => What::Hidden,
            Cargo::Delta { .. } => What::Delta,
            Cargo::Qkv => What::Qkv,
            Cargo::Attn => What::Attn,
            Cargo::Act => What::Act,
        }
    }
}

struct Area {
    memory: Arc<dyn Pinned>,
    /// The last copy from it.
    busy: Option<Event>,
}

/// The areas that a placement's programs use.
pub(super) struct Areas {
    runtime: Arc<dyn Runtime>,
    areas: HashMap<(What, Side), Area>,
}

impl Areas {
    /// Areas of these sizes in bytes.
    ///
    /// # Errors
    /// Host memory that cannot be pinned.
    pub fn new(runtime: &Arc<dyn Runtime>, sizes: &HashMap<(What, Side), usize>) -> Result<Areas> {
        let area = |(&key, &bytes): (&(What, Side), &usize)| {
            Ok((key, Area { memory: runtime.pinned(bytes.max(1))?, busy: None }))
        };
        let areas = sizes.iter().map(area).collect::<Result<_>>()?;
        Ok(Areas { runtime: runtime.clone(), areas })
    }

    fn get(&mut self, what: What, to: Side) -> Result<&mut Area> {
        let missing =
            || Error::usage(format!("rows of {what:?} cross to the {to:?} side, which was not planned"));
        self.areas.get_mut(&(what, to)).ok_or_else(missing)
    }

    /// Enqueues a copy of rows to the device: `fill` writes them to the area.
    ///
    /// # Errors
    /// A cargo that was not planned, or larger; a device that failed.
    pub fn send(&mut self, what: What, rows: RowSpan, at: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        let runtime = self.runtime.clone();
        let area = self.get(what, Side::Device)?;
        fits(area, at, rows.bytes)?;
        if let Some(busy) = area.busy.take() {
            runtime.synchronize(&busy)?;
        }
        // SAFETY: inside the area (checked), which no copy reads any more; the borrow of `self` excludes others.
        fill(unsafe { std::slice::from_raw_parts_mut(area.memory.host().add(at), rows.bytes) });
        let lane = Lane::HostToDevice;
        runtime.upload_pinned(lane, rows.ptr, &area.memory, at..at + rows.bytes)?;
        area.busy = Some(runtime.record(lane)?);
        Ok(())
    }

    /// Enqueues a copy of rows to the host.
    ///
    /// # Errors
    /// As [`Areas::send`].
    pub fn fetch(&mut self, what: What, rows: RowSpan, at: usize) -> Result<()> {
        let runtime = self.runtime.clone();
        let area = self.get(what, Side::Host)?;
        fits(area, at, rows.bytes)?;
        runtime.download_pinned(Lane::DeviceToHost, rows.ptr, &area.memory, at, rows.bytes)
    }

    /// Bytes that have arrived at the host. The caller has waited for the copy.
    ///
    /// # Errors
    /// A cargo that was not planned, or larger.
    pub fn arrived(&mut self, what: What, at: usize, bytes: usize) -> Result<&[u8]> {
        let area = self.get(what, Side::Host)?;
        fits(area, at, bytes)?;
        // SAFETY: inside the area (checked), initialised (pinned memory is zeroed), and its copy is done.
        Ok(unsafe { std::slice::from_raw_parts(area.memory.host().add(at), bytes) })
    }
}

fn fits(area: &Area, at: usize, bytes: usize) -> Result<()> {
    if at + bytes <= area.memory.len() {
        return Ok(());
    }
    Err(Error::Capacity(format!(
        "rows up to byte {} in an area of {} for the link",
        at + bytes,
        area.memory.len()
    )))
}

/// Writes f32 as they are.
pub(super) fn put_f32(from: &[f32], to: &mut [u8]) {
    for (to, x) in to.chunks_exact_mut(4).zip(from) {
        to.copy_from_slice(&x.to_le_bytes());
    }
}

/// Reads f32 as they are.
pub(super) fn take_f32(from: &[u8], to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(from.chunks_exact(4)) {
        *to = f32::from_le_bytes([x[0], x[1], x[2], x[3]]);
    }
}

/// Writes f32 rounded to 16 bits.
pub(super) fn put_half(kind: Half, from: &[f32], to: &mut [u8]) {
    for (to, &x) in to.chunks_exact_mut(2).zip(from) {
        to.copy_from_slice(&match kind {
            Half::F16 => f16::from_f32(x).to_le_bytes(),
            Half::BF16 => bf16::from_f32(x).to_le_bytes(),
        });
    }
}

/// Reads 16-bit floats.
pub(super) fn take_half(kind: Half, from: &[u8], to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(from.chunks_exact(2)) {
        let x = [x[0], x[1]];
        *to = match kind {
            Half::F16 => f16::from_le_bytes(x).to_f32(),
            Half::BF16 => bf16::from_le_bytes(x).to_f32(),
        };
    }
}
