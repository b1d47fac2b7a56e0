//! Products of one to four tokens: `gemv.cu` and `gemv_quant.cu`. Weights stream through registers once.

use super::super::quant::PackedLayout;
use super::plan::DecodePlan;
use crate::device::runtime::DeviceInfo;
use crate::tensor::Half;

/// Warps of a block, and columns of `gemv.cu` per step and per batch of loads.
pub(super) const WARPS: usize = 8;
const STEP: usize = 256;
/// Columns of a tile of packed codes.
const TILE_COLS: usize = 64;

/// The plan for a dense matrix. Warps share rows until there are 16 warps for every multiprocessor (or slices get
/// shorter than two steps): the eight 16-byte loads of each lane then keep 64 KiB in flight.
pub(super) fn dense(info: &DeviceInfo, act: Half, m: usize, n: usize, k: usize) -> DecodePlan {
    let pairs = n.div_ceil(2);
    let want = 16 * info.multiprocessors as usize;
    let mut log2 = 0;
    while (1 << log2) < WARPS && pairs << log2 < want && k >> (log2 + 1) >= 2 * STEP {
        log2 += 1;
    }
    DecodePlan {
        kernel: format!("gemv_{}_m{m}", act.name()),
        grid: [pairs.div_ceil(WARPS >> log2) as u32, 1, 1],
        shared: (WARPS * 2 * m * 4) as u32,
        k_warps_log2: log2,
        k_split: k.div_ceil(STEP).div_ceil(1 << log2) * STEP,
        splits: 1,
        stages: 0,
        partial_bytes: 0,
    }
}

/// The plan for a quantised matrix, split after `k_split` columns.
pub(super) fn quantised(layout: &PackedLayout, act: Half, k_split: usize) -> DecodePlan {
    let row_tiles = layout.tiles().0;
    let splits = layout.k().div_ceil(k_split);
    DecodePlan {
        kernel: format!("gemv_{}_{}", layout.dtype(), act.name()),
        grid: [row_tiles as u32, splits as u32, 1],
        shared: (WARPS * 32 * 16) as u32,
        k_warps_log2: 0,
        k_split,
        splits,
        stages: 0,
        partial_bytes: if splits > 1 { row_tiles * splits * 32 * 16 } else { 0 },
    }
}

/// Columns of a split of a quantised matrix. A block takes a row tile; k is split only until there are two blocks for
/// every multiprocessor, and only while each warp still has four tiles to stream.
pub(super) fn k_split(info: &DeviceInfo, layout: &PackedLayout) -> usize {
    let (row_tiles, k_tiles) = layout.tiles();
    let want = 2 * info.multiprocessors as usize / row_tiles;
    let splits = want.clamp(1, (k_tiles / (4 * WARPS)).clamp(1, 16));
    k_tiles.div_ceil(splits) * TILE_COLS
}
