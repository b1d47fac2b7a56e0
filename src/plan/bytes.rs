//! The bytes of a placement, as planners ask for them.

use crate::program::{Far, Placement, Side};

use super::memory::Memory;

/// Ways to attend tokens whose pages have left the device: in place, or in each step in the faster way.
pub const FAR_WAYS: [Option<Far>; 2] = [Some(Far::Attend), None];

/// Bytes of placements of one model for one load (sequences, their context), and what there is on each side. A model's sizes
/// alone answer ([`Outline`](super::Outline)), and so do loaded tensors with the device they are for
/// ([`engine::Sizes`](crate::engine::Sizes)): one chooser serves both.
pub trait Bytes {
    /// Bytes on each side with steps of `chunk` rows of prompts, and tokens whose pages have left the device attended as `far`
    /// says; `None`: either way, which needs memory for both.
    fn memory(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> Memory;

    /// Whether the device computes the model's experts; of a dense model it does.
    fn computes_experts(&self) -> bool;

    /// Pages of a block that all sequences need together.
    fn pages(&self) -> usize;

    /// How many of them a block on the device is to keep there, if that is fixed.
    fn fixed_pages(&self) -> Option<usize> {
        None
    }

    /// The longest chunk of prompts that a step can have, in rows.
    fn longest_chunk(&self) -> u64 {
        u64::MAX
    }

    /// The fewest pages of a block on the device with which any step of `chunk` rows of prompts can run.
    fn fewest_pages(&self, chunk: u64) -> usize;

    /// Ways to attend tokens whose pages have left the device, those first that need less memory; at least one.
    fn ways(&self) -> &[Option<Far>];

    /// The longest context of every sequence that fits with everything else as it is; 0: none.
    fn longest_context(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> u64;

    /// Whether pages of keys and values leave the device.
    fn pages_move(&self, placement: &Placement) -> bool {
        placement.layers.iter().any(|l| l.kv == Side::Device) && placement.device_pages < self.pages()
    }
}
