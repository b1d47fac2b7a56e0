//! Sequences that change sides on the scheduler's decision.

use super::pager::Moved;
use super::{KvPages, SequenceKv};
use crate::cache::PAGE_TOKENS;
use crate::engine::seq_id::SeqId;
use crate::program::Side;
use crate::{Error, Result};

/// Where a sequence's keys and values are to be, in layers that keep them on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// All on this side, new tokens as well.
    Whole(Side),
    /// The first pages (this many) on the host, the rest and new tokens on the device: both sides attend
    /// ([`Options::far`](crate::engine::Options::far)).
    Split(usize),
}

/// A sequence, and where its keys and values are to be before rows of it are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swap {
    /// Which.
    pub seq: SeqId,
    /// Where.
    pub to: Target,
}

impl SequenceKv {
    /// Changes sides in the table, at place `seq` among the sequences; the copies are still to be made. None if no page with
    /// tokens moves.
    ///
    /// # Errors
    /// Not enough free pages on the side they go to; a split behind the last full page. Then nothing has changed.
    pub fn swap(&mut self, pages: &mut KvPages, seq: usize, to: Target) -> Result<Option<Moved>> {
        let (generation, len) = (self.generation(), self.len());
        let Some(split) = self.split_mut() else {
            return match to {
                Target::Whole(Side::Host) => Ok(None),
                _ => Err(Error::usage("no layer keeps keys and values on the device")),
            };
        };
        let grew_on_host = split.grows_on_host();
        let far = split.host_pages().len().min(len.div_ceil(PAGE_TOKENS));
        let (device, host) = (&mut pages.device, &mut pages.far);
        let (to, copies) = match to {
            Target::Whole(Side::Host) if grew_on_host => return Ok(None),
            Target::Whole(Side::Host) => (Side::Host, split.swap_out(device, host)?),
            Target::Whole(Side::Device) => (Side::Device, split.swap_in(device, host)?),
            Target::Split(n) if n * PAGE_TOKENS > len => {
                return Err(Error::usage(format!(
                    "{n} pages of a sequence of {len} tokens to the host; they are not all full"
                )));
            }
            Target::Split(n) if n > far => (Side::Host, split.evict(device, host, n - far)?),
            Target::Split(n) => (Side::Device, split.recall(device, host, far - n)?),
        };
        let n = copies.len() as u32;
        let span = match to {
            Side::Host => far as u32..far as u32 + n,
            Side::Device => far as u32 - n..far as u32,
        };
        Ok((n > 0).then_some(Moved { seq, generation, to, span, copies, grew_on_host }))
    }
}
