//! Memory by a model's sizes alone.

use super::bytes::{Bytes, FAR_WAYS};
use super::memory::{Available, Load, Memory, memory_with};
use super::search::most;
use super::sizes::Sizes;
use crate::cache::PAGE_TOKENS;
use crate::program::{Far, Placement};

/// The bytes of a model's sizes alone: 16-bit weights of a specification, or tensors of a file, without a device.
#[derive(Debug, Clone, Copy)]
pub struct Outline<'a> {
    /// The model.
    pub sizes: &'a Sizes,
    /// What it has to hold; the rows of a step are those that are asked for.
    pub load: Load,
    /// Memory of the machine.
    pub available: Available,
}

impl Bytes for Outline<'_> {
    fn memory(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> Memory {
        memory_with(self.sizes, placement, &Load { chunk, ..self.load }, self.available, far)
    }

    fn computes_experts(&self) -> bool {
        true
    }

    fn pages(&self) -> usize {
        self.load.pages() as usize
    }

    fn fewest_pages(&self, chunk: u64) -> usize {
        let Load { sequences, .. } = self.load;
        let rows = Load { chunk, ..self.load }.rows();
        (rows.div_ceil(PAGE_TOKENS as u64) + 2 * sequences).min(self.load.pages()) as usize
    }

    fn ways(&self) -> &[Option<Far>] {
        &FAR_WAYS
    }

    fn longest_context(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> u64 {
        let Outline { sizes, load, available } = *self;
        let spills = self.pages_move(placement);
        let fits = |context: u64| {
            let load = Load { context, chunk, ..load };
            let mut placement = placement.clone();
            if !spills {
                placement.device_pages = load.pages() as usize;
            }
            placement.host_pages = load.pages() as usize;
            memory_with(sizes, &placement, &load, available, far).fits()
        };
        // Beyond this its bytes leave 64 bits, and any machine.
        let token = (sizes.kv_token() * sizes.layers() as u64).max(sizes.spec.q_dim() as u64);
        let countable = (1u64 << 60) / token.saturating_mul(load.sequences).max(1);
        most((sizes.spec.max_context as u64).min(countable) as usize, |context| fits(context as u64)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth;
    use crate::plan::memory;
    use crate::program::Side;

    const GB: u64 = 1_000_000_000;

    #[test]
    fn the_longest_context_is_the_last_that_fits() {
        let s = Sizes::of_spec(&synth::parse("qwen3-8b").unwrap().spec);
        let room = Available { gpu: 20 * GB, host: 64 * GB, nodes: None };
        let load = Load { sequences: 1, context: 640, chunk: 512, prompt: 512 };
        let placement = Placement::all(Side::Device, 36, 20);
        let longest_in =
            |available| Outline { sizes: &s, load, available }.longest_context(&placement, 512, None);
        let longest = longest_in(room);
        let fits = |context: u64| {
            let load = Load { context, ..load };
            let p = Placement::all(Side::Device, 36, load.pages() as usize);
            memory(&s, &p, &load, room).fits()
        };
        assert!(longest > 1000 && fits(longest) && !fits(longest + 1), "{longest}");
        assert_eq!(longest_in(Available { gpu: GB, host: GB, nodes: None }), 0);
    }
}
