//! Names of sequences.

use crate::program::RequestId;

/// A sequence of an [`Engine`](super::Engine). Once the sequence is removed it names nothing, even when its slot is used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId(RequestId);

impl SeqId {
    /// The sequence's slot and generation: what groups of an iteration name.
    pub fn request(self) -> RequestId {
        self.0
    }

    pub(super) fn named(id: RequestId) -> SeqId {
        SeqId(id)
    }

    #[cfg(test)]
    pub(super) fn of(slot: u32) -> SeqId {
        SeqId(RequestId { slot, generation: 0 })
    }
}
