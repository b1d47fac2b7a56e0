//! Counts the bytes that cross the link in each direction: weights that are streamed, pages that move, rows that one side hands to the
//! other, and the tokens, likeliest tokens or logits that come from a head on the device.
//!
//! Counted when they are enqueued, as many as are copied, read or written in place: a step that fails counts what it had issued. Not
//! counted are the weights loaded at the start, and the lists of a step's rows and pages, some words for each.

use super::RealMachine;
use super::carry::What;
use super::device::{DeviceHalf, rows_of};
use super::parts::PartMail;
use crate::device::{Mailbox, Published};
use crate::program::{Kind, Op, Unit};

/// See the [module](self).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Crossed {
    to_device: u64,
    to_host: u64,
}

impl Crossed {
    /// Counts bytes to the device.
    pub fn add_to_device(&mut self, bytes: usize) {
        self.to_device += bytes as u64;
    }

    /// Counts bytes to the host.
    pub fn add_to_host(&mut self, bytes: usize) {
        self.to_host += bytes as u64;
    }
}

impl DeviceHalf {
    /// The bytes that an operation brings across, if it is not a move of pages, and whether they go to the host.
    fn brings(&self, op: &Op) -> Option<(usize, bool)> {
        let rows = rows_of(op).len();
        let (bytes, to_host) = match op.kind {
            Kind::Carry { cargo, .. } => {
                let row: usize = What::of(cargo).iter().map(|what| what.row_bytes(&self.shape)).sum();
                (rows * row, op.unit == Unit::D2h)
            }
            Kind::Publish { queries_only } => {
                let what = if queries_only { Published::Queries } else { Published::Qkv };
                (rows * Mailbox::published_bytes(&self.shape, what), true)
            }
            Kind::Collect => (rows * Mailbox::out_bytes(&self.shape), false),
            Kind::Merge { mailbox: true } => (PartMail::bytes(&self.shape, rows), false),
            Kind::Stream { .. } => (self.layers[op.layer? as usize].image()?.layout.bytes, false),
            _ => return None,
        };
        Some((bytes, to_host))
    }
}

impl RealMachine {
    /// Bytes that have crossed the link so far: to the device, and to the host.
    pub fn link_bytes(&self) -> [u64; 2] {
        [self.crossed.to_device, self.crossed.to_host]
    }

    /// Counts what operations bring across that have been issued.
    pub(super) fn count_crossed(&mut self, ops: &[Op]) {
        let Some(device) = &self.device else { return };
        for (bytes, to_host) in
            ops.iter().filter(|op| op.unit != Unit::Host).filter_map(|op| device.brings(op))
        {
            match to_host {
                true => self.crossed.add_to_host(bytes),
                false => self.crossed.add_to_device(bytes),
            }
        }
    }
}
