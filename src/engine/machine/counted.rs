//! Memory of placements of loaded tensors, for the chooser of [`plan`](crate::plan).

use super::sizes::Sizes;
use crate::host::memory_available;
use crate::plan::{Bytes, FAR_WAYS, GpuMemory, HostMemory, Memory};
use crate::program::{Far, Placement};

/// A model's sizes on a device and a host, with what is free on both: what is counted is what will be allocated.
pub struct Counted<'a> {
    sizes: &'a Sizes,
    host_available: u64,
    /// If the way to attend tokens whose pages have left is fixed.
    way: Option<[Option<Far>; 1]>,
}

impl Sizes {
    /// Placements of these sizes in the memory that is free now.
    pub fn counted(&self) -> Counted<'_> {
        self.counted_beside(memory_available().unwrap_or(u64::MAX))
    }

    /// Placements of these sizes beside so many bytes of host memory.
    pub fn counted_beside(&self, host_available: u64) -> Counted<'_> {
        Counted { sizes: self, host_available, way: self.far.map(|far| [Some(far)]) }
    }
}

impl Bytes for Counted<'_> {
    /// These sizes are those of one length of chunks.
    fn memory(&self, placement: &Placement, _chunk: u64, far: Option<Far>) -> Memory {
        let (host, available) = (self.sizes.host_without_pinned(placement), self.host_available);
        let mut host = HostMemory {
            weights: host.weights,
            kv: host.kv,
            activations: host.activations,
            available,
            ..HostMemory::default()
        };
        let mut gpu = GpuMemory { available: self.sizes.free(), ..GpuMemory::default() };
        if !placement.is_host_alone() {
            let device = self.sizes.device_if(placement, far != Some(Far::Attend));
            gpu.weights = device.weights;
            gpu.kv = device.kv;
            gpu.staging = device.staging_weights + device.staging_kv;
            gpu.activations = device.activations;
            gpu.workspace = device.lists;
            gpu.total = gpu.weights + gpu.kv + gpu.staging + gpu.activations + gpu.workspace;
            host.pinned = self.sizes.pinned(placement);
        }
        host.total = host.weights + host.kv + host.activations + host.pinned;
        Memory { gpu, host, nodes: None }
    }

    fn computes_experts(&self) -> bool {
        self.sizes.computes_experts()
    }

    fn pages(&self) -> usize {
        self.sizes.pages
    }

    fn fixed_pages(&self) -> Option<usize> {
        self.sizes.kv_pages
    }

    fn fewest_pages(&self, _chunk: u64) -> usize {
        self.sizes.fewest_pages()
    }

    fn ways(&self) -> &[Option<Far>] {
        match &self.way {
            Some(way) => way,
            None => &FAR_WAYS,
        }
    }

    /// The context that these sizes are of.
    fn longest_context(&self, placement: &Placement, chunk: u64, far: Option<Far>) -> u64 {
        match self.memory(placement, chunk, far).fits() {
            true => self.sizes.context as u64,
            false => 0,
        }
    }

    fn pages_move(&self, placement: &Placement) -> bool {
        self.sizes.pages_move(placement)
    }
}
