//! Sequences that change sides on the scheduler's decision.

use super::pager::Moved;
use super::{KvPages, SequenceKv};
use crate::cache::{PAGE_TOKENS, PageCopy};
use crate::program::Side;
use crate::{Error, Result};

impl SequenceKv {
    /// Moves all its pages to `side`, and new tokens with them, in the table; `seq` is the index of the sequence. The
    /// copies are still to be made. `None` if no page with tokens moves.
    ///
    /// # Errors
    /// If there are not enough free pages on that side; nothing is changed then.
    pub fn swap(&mut self, pages: &mut KvPages, seq: usize, side: Side) -> Result<Option<Moved>> {
        let far = self.far_with_tokens();
        let (device, host) = (&mut pages.device, &mut pages.far);
        let grew_on_host = match (self.split_mut(), side) {
            (None, Side::Host) => return Ok(None),
            (None, Side::Device) => return Err(none_there()),
            (Some(split), _) => split.grows_on_host(),
        };
        let split = self.split_mut().expect("just seen");
        let copies = match side {
            Side::Host if grew_on_host => return Ok(None),
            Side::Host => split.swap_out(device, host)?,
            Side::Device => split.swap_in(device, host)?,
        };
        Ok(self.moved(seq, side, far, copies, grew_on_host))
    }

    /// Moves pages such that the first `n` are on the host and the others, and new tokens, on the device, in the table:
    /// see [`SequenceKv::swap`].
    ///
    /// # Errors
    /// If there are not enough free pages on the side that pages go to, or the `n` pages are not all full; nothing is
    /// changed then.
    pub fn split_at(&mut self, pages: &mut KvPages, seq: usize, n: usize) -> Result<Option<Moved>> {
        let (far, len) = (self.far_with_tokens(), self.len());
        let (device, host) = (&mut pages.device, &mut pages.far);
        let Some(split) = self.split_mut() else { return Err(none_there()) };
        let grew_on_host = split.grows_on_host();
        if n * PAGE_TOKENS > len {
            return Err(Error::usage(format!(
                "{n} pages of a sequence of {len} tokens to the host; they are not all full"
            )));
        }
        let (side, copies) = match n > far {
            true => (Side::Host, split.evict(device, host, n - far)?),
            false => (Side::Device, split.recall(device, host, far - n)?),
        };
        Ok(self.moved(seq, side, far, copies, grew_on_host))
    }

    /// Its pages away from the device that hold tokens.
    fn far_with_tokens(&self) -> usize {
        self.far_pages().len().min(self.len().div_ceil(PAGE_TOKENS))
    }

    fn moved(
        &self,
        seq: usize,
        to: Side,
        far: usize,
        copies: Vec<PageCopy>,
        grew_on_host: bool,
    ) -> Option<Moved> {
        let (far, n) = (far as u32, copies.len() as u32);
        let span = match to {
            Side::Host => far..far + n,
            Side::Device => far - n..far,
        };
        (n > 0).then_some(Moved { seq, generation: self.generation(), to, span, copies, grew_on_host })
    }
}

fn none_there() -> Error {
    Error::usage("no layer keeps keys and values on the device")
}
