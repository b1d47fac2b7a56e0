//! Carries rows across the link through pinned memory, with an area for each kind of cargo and direction.
//!
//! Host to device: a job of the host writes its rows to the area (rounded where the device keeps 16 bits), then they are copied
//! on the host-to-device lane. Device to host: copied to the area on the device-to-host lane, from which a job of the host that
//! waits for the copy takes them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};

use super::lane::Ticket;
use crate::device::{Event, Lane, Pinned, RowBytes, RowSpan, Runtime, Shape, Workspace};
use crate::engine::host::HostWorkspace;
use crate::program::{
    Cargo, Group, Iteration, Kind, Kv, LayerPlacement, Phase, Placement, RequestId, Side, Wants, lower,
};
use crate::tensor::Half;
use crate::{Error, Result};

/// A kind of cargo, regardless of the sublayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum What {
    Hidden,
    Delta,
    Qkv,
    Attn,
    Act,
    /// Normed rows.
    Normed,
    /// The chosen experts of rows.
    Ids,
    /// Their weights.
    Weights,
    /// What the host's experts give.
    Share,
}

impl What {
    /// What crosses as this cargo, a copy each.
    pub fn of(cargo: Cargo) -> &'static [What] {
        match cargo {
            Cargo::Hidden { .. } => &[What::Hidden],
            Cargo::Delta { .. } => &[What::Delta],
            Cargo::Qkv => &[What::Qkv],
            Cargo::Attn => &[What::Attn],
            Cargo::Act => &[What::Act],
            Cargo::Choices => &[What::Normed, What::Ids, What::Weights],
            Cargo::Share => &[What::Share],
        }
    }

    /// Bytes of one row of it on the link.
    pub fn row_bytes(self, shape: &Shape) -> usize {
        let row = RowBytes::new(shape);
        let choices = shape.experts.map_or(0, |e| 4 * e.used);
        match self {
            What::Hidden => row.hidden,
            What::Delta => row.delta,
            What::Qkv => row.qkv,
            What::Attn => row.attn,
            What::Act => row.act,
            What::Normed => row.x,
            What::Ids | What::Weights => choices,
            What::Share => shape.experts.map_or(0, |e| e.share_bytes(shape)),
        }
    }

    /// Where rows of this cargo lie on the device.
    pub fn span(self, ws: &Workspace, shape: &Shape, rows: &Range<usize>) -> RowSpan {
        match self {
            What::Hidden => ws.hidden_rows(shape, rows),
            What::Delta => ws.delta_rows(shape, rows),
            What::Qkv => ws.qkv_rows(shape, rows),
            What::Attn => ws.attn_rows(shape, rows),
            What::Act => ws.act_rows(shape, rows),
            What::Normed => ws.normed_rows(shape, rows),
            What::Ids | What::Weights | What::Share => {
                let of = ws.expert_rows(shape, rows.start).expect("rows of a model with experts");
                let ptr = match self {
                    What::Ids => of.ids,
                    What::Weights => of.weights,
                    _ => of.share,
                };
                RowSpan { ptr, bytes: rows.len() * self.row_bytes(shape) }
            }
        }
    }
}

/// The cargo that crosses the link in any program of a placement.
///
/// # Errors
/// If the placement cannot be lowered.
pub(super) fn cargo(placement: &Placement, pages_move: bool) -> Result<Vec<(What, Side)>> {
    // Two of several equal consecutive layers suffice to show every transfer between them.
    let mut layers: Vec<LayerPlacement> = Vec::new();
    for layer in &placement.layers {
        if !matches!(layers[..], [.., a, b] if a == b && b == *layer) {
            layers.push(*layer);
        }
    }
    let placement = Placement { layers, windows: Vec::new(), ..placement.clone() };
    // Few rows of prompts go another way than many, if experts are streamed.
    let mut sizes = vec![placement.clone()];
    if placement.stream_rows > 0 {
        sizes.push(Placement { stream_rows: 0, ..placement });
    }
    let mut found = Vec::new();
    let homes = [Kv::Device, Kv::Host].into_iter().take(1 + usize::from(pages_move));
    let ways = homes.flat_map(|kv| [Phase::Prefill, Phase::Decode].map(|phase| (kv, phase)));
    for (placement, (kv, phase)) in sizes.iter().flat_map(|p| ways.clone().map(move |way| (p, way))) {
        let group = Group {
            request: RequestId { slot: 0, generation: 0 },
            phase,
            first: 1,
            tokens: 1,
            kv,
            wants: Wants::All,
        };
        for op in lower(placement, &Iteration::serial(vec![group], true))?.ops {
            if let Kind::Carry { cargo, to } = op.kind {
                // The residual still to be added crosses, too.
                for key in What::of(cargo).iter().map(|&what| (what, to)) {
                    if !found.contains(&key) {
                        found.push(key);
                    }
                }
                debug_assert!(!matches!(cargo, Cargo::Qkv) || to == Side::Device);
            }
        }
    }
    Ok(found)
}

/// The purpose of an area: rows of a sub-batch, a kind of cargo, the side where it arrives.
pub(super) type AreaKey = (u8, What, Side);

/// Pinned memory for the rows of a sub-batch, and the copies and jobs still using it.
struct Area {
    memory: Arc<dyn Pinned>,
    /// The last copy from it.
    busy: Option<Event>,
    /// Bytes that arrived here, and the jobs that read them.
    landings: Vec<(Range<usize>, Ticket)>,
}

/// The areas that a placement's programs use.
pub(super) struct Areas {
    runtime: Arc<dyn Runtime>,
    areas: HashMap<AreaKey, Area>,
}

impl Areas {
    /// Areas of these sizes in bytes.
    ///
    /// # Errors
    /// If host memory cannot be pinned.
    pub fn new(runtime: &Arc<dyn Runtime>, sizes: &HashMap<AreaKey, usize>) -> Result<Areas> {
        let area = |(&key, &bytes): (&AreaKey, &usize)| {
            Ok((key, Area { memory: runtime.pinned(bytes.max(1))?, busy: None, landings: Vec::new() }))
        };
        let areas = sizes.iter().map(area).collect::<Result<_>>()?;
        Ok(Areas { runtime: runtime.clone(), areas })
    }

    /// Bytes of all areas.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.areas.values().map(|area| area.memory.len()).sum()
    }

    /// Begins a step: no job and no copy of an earlier one may be in flight.
    pub fn begin(&mut self) {
        for area in self.areas.values_mut() {
            area.busy = None;
            area.landings.clear();
        }
    }

    fn get(&mut self, key: AreaKey, bytes: &Range<usize>) -> Result<&mut Area> {
        let (_, what, to) = key;
        let area = self.areas.get_mut(&key).ok_or_else(|| {
            Error::usage(format!("rows of {what:?} cross to the {to:?} side, which was not planned"))
        })?;
        if bytes.end > area.memory.len() {
            return Err(Error::Capacity(format!(
                "bytes {bytes:?} of rows that cross the link, {} were planned for",
                area.memory.len()
            )));
        }
        Ok(area)
    }

    /// The place to write rows for the device to, after the returned event.
    ///
    /// # Errors
    /// A cargo that was not planned, or larger.
    pub fn place_to_fill(&mut self, key: AreaKey, bytes: Range<usize>) -> Result<(Place, Option<Event>)> {
        let area = self.get(key, &bytes)?;
        Ok((Place { memory: area.memory.clone(), bytes }, area.busy.take()))
    }

    /// Enqueues the copy of rows that have been written to their place.
    ///
    /// # Errors
    /// A cargo that was not planned, or larger; a device that failed.
    pub fn send(&mut self, key: AreaKey, bytes: Range<usize>, rows: RowSpan) -> Result<()> {
        let (runtime, lane) = (self.runtime.clone(), Lane::HostToDevice);
        let area = self.get(key, &bytes)?;
        runtime.upload_pinned(lane, rows.ptr, &area.memory, bytes)?;
        area.busy = Some(runtime.record(lane)?);
        Ok(())
    }

    /// The jobs that still read these bytes, which must be done before other rows are copied there.
    ///
    /// # Errors
    /// A cargo that was not planned, or larger.
    pub fn landings(&mut self, key: AreaKey, bytes: &Range<usize>) -> Result<Vec<Ticket>> {
        let area = self.get(key, bytes)?;
        let meets = |r: &Range<usize>| r.start < bytes.end && bytes.start < r.end;
        let found = area.landings.iter().filter(|(r, _)| meets(r)).map(|&(_, job)| job).collect();
        area.landings.retain(|(r, _)| !meets(r));
        Ok(found)
    }

    /// Enqueues the copy of rows to the host; returns where they arrive.
    ///
    /// # Errors
    /// As [`Areas::send`].
    pub fn fetch(&mut self, key: AreaKey, bytes: Range<usize>, rows: RowSpan) -> Result<Place> {
        let runtime = self.runtime.clone();
        let area = self.get(key, &bytes)?;
        runtime.download_pinned(Lane::DeviceToHost, rows.ptr, &area.memory, bytes.start, bytes.len())?;
        Ok(Place { memory: area.memory.clone(), bytes })
    }

    /// Registers the job that reads the rows that arrive there.
    ///
    /// # Errors
    /// A cargo that was not planned, or larger.
    pub fn lands(&mut self, key: AreaKey, bytes: Range<usize>, job: Ticket) -> Result<()> {
        self.get(key, &bytes)?.landings.push((bytes, job));
        Ok(())
    }
}

/// Bytes of an area, for one job.
pub(super) struct Place {
    memory: Arc<dyn Pinned>,
    /// A range inside the memory, checked on creation.
    bytes: Range<usize>,
}

impl Place {
    /// Copies the arrived rows into the rows of `ws`.
    ///
    /// # Safety
    /// The copy that brings the rows is done, and no other copy to these bytes has been enqueued.
    pub unsafe fn take(&self, ws: &mut HostWorkspace, what: What, shape: &Shape, rows: Range<usize>) {
        // SAFETY: inside the memory, initialised (pinned memory is zeroed), and nobody writes it: the caller's promise.
        let bytes =
            unsafe { std::slice::from_raw_parts(self.memory.host().add(self.bytes.start), self.bytes.len()) };
        match what {
            What::Hidden => take_f32(bytes, ws.hidden.rows_mut(rows)),
            What::Delta => take_f32(bytes, ws.delta.rows_mut(rows)),
            What::Attn => take_act(shape, bytes, ws.attn.rows_mut(rows)),
            What::Act => take_act(shape, bytes, ws.act.rows_mut(rows)),
            // The device has the residual stream, and what is added to it.
            What::Normed => take_act(shape, bytes, ws.delta.rows_mut(rows)),
            What::Ids => {
                let to = ws.choices_mut(rows).0;
                for (to, x) in to.iter_mut().zip(bytes.chunks_exact(4)) {
                    *to = u32::from_le_bytes([x[0], x[1], x[2], x[3]]);
                }
            }
            What::Weights => take_f32(bytes, ws.choices_mut(rows).1),
            What::Share => unreachable!("what the host's experts give goes to the device"),
            What::Qkv => unreachable!("queries, keys and values come to the host through the mailbox"),
        }
    }

    /// Writes f32 to the place, unchanged.
    ///
    /// # Safety
    /// As [`Place::fill`].
    pub unsafe fn put(&self, from: &[f32]) {
        // SAFETY: inside the memory, and nobody else touches it: the caller's promise.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(self.memory.host().add(self.bytes.start), self.bytes.len())
        };
        put_f32(from, bytes);
    }

    /// Writes the rows of `ws` to the place.
    ///
    /// # Safety
    /// No copy of these bytes is in flight, and no other job has them.
    pub unsafe fn fill(&self, ws: &HostWorkspace, what: What, shape: &Shape, rows: Range<usize>) {
        // SAFETY: inside the memory, and nobody else touches it: the caller's promise.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(self.memory.host().add(self.bytes.start), self.bytes.len())
        };
        match what {
            What::Hidden => put_f32(ws.hidden.rows(rows), bytes),
            What::Delta => put_f32(ws.delta.rows(rows), bytes),
            What::Attn => put_act(shape, ws.attn.rows(rows), bytes),
            What::Act => put_act(shape, ws.act.rows(rows), bytes),
            What::Normed | What::Ids | What::Weights => unreachable!("choices go to the host"),
            // Their sum: `HostContext::own_experts` leaves it there.
            What::Share => put_f32(ws.delta.rows(rows), bytes),
            What::Qkv => {
                let (qd, kvd) = (shape.q_dim(), shape.kv_dim());
                for (r, row) in rows.zip(bytes.chunks_exact_mut(4 * shape.qkv_dim())) {
                    put_f32(ws.q.rows(r..r + 1), &mut row[..4 * qd]);
                    put_f32(ws.k.rows(r..r + 1), &mut row[4 * qd..4 * (qd + kvd)]);
                    put_f32(ws.v.rows(r..r + 1), &mut row[4 * (qd + kvd)..]);
                }
            }
        }
    }
}

/// Writes f32 unchanged.
fn put_f32(from: &[f32], to: &mut [u8]) {
    for (to, x) in to.chunks_exact_mut(4).zip(from) {
        to.copy_from_slice(&x.to_le_bytes());
    }
}

/// Reads f32 unchanged.
fn take_f32(from: &[u8], to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(from.chunks_exact(4)) {
        *to = f32::from_le_bytes([x[0], x[1], x[2], x[3]]);
    }
}

/// Writes activations in the device's type: rounded to 16 bits, unless results are exact.
fn put_act(shape: &Shape, from: &[f32], to: &mut [u8]) {
    if shape.exact.is_some() {
        return put_f32(from, to);
    }
    for (to, &x) in to.chunks_exact_mut(2).zip(from) {
        to.copy_from_slice(&match shape.act {
            Half::F16 => f16::from_f32(x).to_le_bytes(),
            Half::BF16 => bf16::from_f32(x).to_le_bytes(),
        });
    }
}

/// Reads activations in the device's type.
fn take_act(shape: &Shape, from: &[u8], to: &mut [f32]) {
    if shape.exact.is_some() {
        return take_f32(from, to);
    }
    for (to, x) in to.iter_mut().zip(from.chunks_exact(2)) {
        let x = [x[0], x[1]];
        *to = match shape.act {
            Half::F16 => f16::from_le_bytes(x).to_f32(),
            Half::BF16 => bf16::from_le_bytes(x).to_f32(),
        };
    }
}
