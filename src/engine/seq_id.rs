//! Names of sequences.

use crate::program::RequestId;

/// A sequence of an [`Engine`](super::Engine). Once the sequence is removed the id is invalid, even if its slot is used
/// again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId(RequestId);

impl SeqId {
    /// The sequence's slot and generation, which groups of an iteration use.
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
