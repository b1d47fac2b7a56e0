//! Sequences that change sides on the scheduler's decision.

use super::pager::Moved;
use super::{KvPages, SequenceKv};
use crate::cache::PAGE_TOKENS;
use crate::engine::seq_id::SeqId;
use crate::program::Side;
use crate::{Error, Result};

/// The target place of a sequence's keys and values, in layers that keep them on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// All on this side, including new tokens.
    Whole(Side),
    /// The first pages (this many) on the host, the rest and new tokens on the device: both sides attend
    /// ([`Options::far`](crate::engine::Options::far)).
    Split(usize),
}

/// A sequence, and the place where its keys and values must be before its rows are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swap {
    /// The sequence.
    pub seq: SeqId,
    /// The target place.
    pub to: Target,
}

impl SequenceKv {
    /// Changes sides in the table; `seq` is the index of the sequence. The copies are still to be made. `None` if no
    /// page with tokens moves.
    ///
    /// # Errors
    /// If there are not enough free pages on the target side, or the split lies after the last full page; nothing is
    /// changed then.
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
