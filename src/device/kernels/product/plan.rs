//! The launch plan of a decode kernel.

use super::args::COUNTER_BYTES;

/// One launch, as decided by shapes and device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodePlan {
    /// The kernel's name. On one device, plans with equal names give a token's result the same bits.
    pub kernel: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// Warps of a block that share a row, as a power of two (`gemv.cu`).
    pub k_warps_log2: u32,
    /// Columns of a block's split, or of a warp's slice (`gemv.cu`).
    pub k_split: usize,
    /// Splits of k by blocks.
    pub splits: usize,
    /// Stages of the ring, for kernels that have one.
    pub stages: usize,
    /// Bytes of partial sums.
    pub partial_bytes: usize,
}

impl DecodePlan {
    /// How many parts k is summed in: by warps of a block and by blocks.
    pub fn k_parts(&self) -> (usize, usize) {
        (1 << self.k_warps_log2, self.splits)
    }

    /// Bytes of scratch that the launch needs.
    pub fn scratch_bytes(&self) -> usize {
        COUNTER_BYTES + self.partial_bytes
    }
}
