//! Products of 5 tokens and more with quantised weights: `linear_quant.cu`. Codes become halves in registers; each tile
//! of weights is multiplied with all rows of a tile of tokens; k is split over the device.

use super::super::quant::PackedLayout;
use super::args::COUNTER_BYTES;
use super::choose::{GEMV_ROWS, QUANT_TILES_ROWS};
use super::gemv::{self, WARPS};
use super::plan::DecodePlan;
use crate::device::runtime::DeviceInfo;
use crate::tensor::Half;

/// Rows of a tile.
const TILE_ROWS: usize = 16;
/// Columns of a step.
const STEP_COLS: usize = 128;

/// Token counts of the kernels, then the most tokens of a launch.
pub(super) const TOKENS: [usize; 6] = [GEMV_ROWS, 8, 16, 32, 64, QUANT_TILES_ROWS];

/// A kernel of `linear_quant.cu`, as in the table at the end of that file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    tokens: usize,
    /// Row tiles of a warp (R).
    row_tiles: usize,
    /// Blocks per multiprocessor that the kernel's registers allow.
    resident: usize,
}

impl Tile {
    /// The kernels for codes of `bits` bits, by tokens.
    fn all(bits: usize) -> [Tile; 4] {
        // With small codes a block takes many rows, which share x and fit in shared memory.
        let of = |tokens, row_tiles, resident| Tile { tokens, row_tiles, resident };
        match bits {
            4 | 5 => [of(8, 4, 2), of(16, 4, 2), of(32, 4, 1), of(64, 2, 1)],
            _ => [of(8, 2, 2), of(16, 2, 2), of(32, 2, 2), of(64, 2, 1)],
        }
    }

    /// The smallest kernel that holds `m` tokens, or else the largest that the device has shared memory for.
    fn of(info: &DeviceInfo, layout: &PackedLayout, m: usize) -> Tile {
        let fits = |t: &&Tile| t.shared(layout, 2) <= info.shared_per_block as usize;
        let tiles = Tile::all(layout.bits());
        let found = tiles.iter().filter(fits).find(|t| m <= t.tokens);
        *found.or_else(|| tiles.iter().rfind(fits)).expect("49 KiB of shared memory, as every GPU has")
    }

    /// Rows of a block: half of its warps share k.
    fn rows(self) -> usize {
        WARPS / 2 * self.row_tiles * TILE_ROWS
    }

    /// Bytes of shared memory, as `Ring` in the kernel counts them.
    fn shared(self, layout: &PackedLayout, stages: usize) -> usize {
        let tiles = WARPS * self.row_tiles;
        let stage = self.tokens * STEP_COLS * 2 + tiles * layout.shared_tile_bytes();
        let scales = if layout.has_super_blocks() { tiles * TILE_ROWS * 16 } else { 0 };
        // At the end, half of the warps pass their sums to the others through shared memory.
        (stages * stage + scales).max(self.rows() * self.tokens * 4)
    }

    /// Stages of the deepest ring with which as many blocks fit as registers allow, if that is at least three; else of
    /// the deepest that fits, or else of the shallowest. Results do not depend on it.
    fn stages(self, info: &DeviceInfo, layout: &PackedLayout) -> usize {
        let room = info.shared_per_block as usize;
        let fits = |stages: &usize| self.shared(layout, *stages) <= room;
        let shares = |stages: &usize| self.shared(layout, *stages) <= room / self.resident;
        [4, 3].into_iter().find(shares).or_else(|| [4, 3, 2].into_iter().find(fits)).unwrap_or(2)
    }

    /// Columns of a split. The estimated time is the steps of the busiest multiprocessor, plus three until its ring is
    /// full, plus the cost of combining splits: two steps, and one for every four splits, whose sums the last block
    /// adds.
    fn k_split(self, info: &DeviceInfo, layout: &PackedLayout) -> usize {
        let steps = layout.k().div_ceil(STEP_COLS);
        let blocks = layout.n().div_ceil(self.rows());
        let cost = |splits: usize| {
            let waves = (blocks * splits).div_ceil(info.multiprocessors as usize);
            let meet = if splits > 1 { 2 + splits / 4 } else { 0 };
            waves * steps.div_ceil(splits) + 3 + meet
        };
        let most = (steps / 4).clamp(1, 16);
        let splits = (1..=most).min_by_key(|&s| cost(s)).expect("at least one");
        steps.div_ceil(splits) * STEP_COLS
    }
}

/// Plans the product of `m` tokens.
pub(super) fn plan(info: &DeviceInfo, layout: &PackedLayout, act: Half, m: usize) -> DecodePlan {
    let tile = Tile::of(info, layout, m);
    tiled(info, layout, act, m, tile, tile.k_split(info, layout))
}

/// A plan with the kernel for `tokens` tokens (at most 4: GEMV; 8, 16, 32 or 64) and splits of `k_split` columns, a
/// multiple of 128. Tests use it to run plans that a device would choose only for other shapes.
pub fn forced(
    info: &DeviceInfo,
    layout: &PackedLayout,
    act: Half,
    m: usize,
    tokens: usize,
    k_split: usize,
) -> DecodePlan {
    if tokens <= GEMV_ROWS {
        return gemv::quantised(layout, act, k_split);
    }
    let tiles = Tile::all(layout.bits());
    let tile = tiles.into_iter().find(|t| t.tokens == tokens).expect("a kernel for so many tokens");
    tiled(info, layout, act, m, tile, k_split)
}

/// The product of groups of up to `tokens` tokens with matrices of this layout, each as a whole: a grid of one group. `None` if
/// there is no kernel for it.
pub(super) fn grouped(
    info: &DeviceInfo,
    layout: &PackedLayout,
    act: Half,
    tokens: usize,
) -> Option<DecodePlan> {
    let fits = |t: &Tile| t.shared(layout, 2) <= info.shared_per_block as usize;
    let tile = Tile::all(layout.bits()).into_iter().find(|t| t.tokens == tokens && fits(t))?;
    let k_split = layout.k().next_multiple_of(STEP_COLS);
    let plan = tiled(info, layout, act, tokens, tile, k_split);
    Some(DecodePlan { kernel: format!("experts_{}", plan.kernel), grid: [plan.grid[1], 1, 1], ..plan })
}

fn tiled(
    info: &DeviceInfo,
    layout: &PackedLayout,
    act: Half,
    m: usize,
    tile: Tile,
    k_split: usize,
) -> DecodePlan {
    let splits = layout.k().div_ceil(k_split);
    let (tiles_m, tiles_n) = (m.div_ceil(tile.tokens), layout.n().div_ceil(tile.rows()));
    let stages = tile.stages(info, layout);
    let partial_bytes =
        if splits > 1 { tiles_m * tiles_n * splits * tile.rows() * tile.tokens * 4 } else { 0 };
    assert!(
        splits == 1 || tiles_m * tiles_n * 4 <= COUNTER_BYTES,
        "quantised linear of {m} tokens by {layout:?}: {tiles_m} x {tiles_n} tiles have no counters"
    );
    DecodePlan {
        kernel: format!("linear_{}_{}_t{}", layout.dtype(), act.name(), tile.tokens),
        grid: [tiles_m as u32, tiles_n as u32, splits as u32],
        shared: tile.shared(layout, stages) as u32,
        k_warps_log2: 0,
        k_split,
        splits,
        stages,
        partial_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::super::args::Matrix;
    use super::super::choose::{GEMV_ROWS, QUANT_TILES_ROWS};
    use super::super::decode::scratch_bytes;
    use super::*;

    const TOKENS: [usize; 14] = [1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256];

    /// T4, A10, L40S, A100, H200 and a consumer Blackwell.
    fn devices() -> [DeviceInfo; 6] {
        [(75, 40, 64), (86, 72, 99), (89, 142, 99), (80, 108, 163), (90, 132, 227), (120, 170, 99)].map(
            |(sm, multiprocessors, kib)| DeviceInfo {
                name: "test".into(),
                sm,
                multiprocessors,
                memory_total: 1 << 30,
                shared_per_block: kib << 10,
                l2_bytes: 0,
                memory_bw: 0,
                clock_khz: 0,
                driver: 0,
            },
        )
    }

    fn layouts() -> impl Iterator<Item = PackedLayout> {
        let shapes = [(1, 256), (576, 1536), (4096, 4096), (1024, 14336), (128256, 4096), (28672, 4096)];
        PackedLayout::dtypes().flat_map(move |d| shapes.map(|(n, k)| PackedLayout::new(d, n, k).unwrap()))
    }

    #[test]
    fn every_column_is_in_one_split_and_no_split_is_empty() {
        for info in devices() {
            for layout in layouts() {
                for m in TOKENS {
                    let plan = DecodePlan::new(&info, &Matrix::Quantised(layout), Half::F16, m);
                    assert!(
                        plan.k_split * plan.splits >= layout.k(),
                        "{plan:?} leaves columns of {layout:?}"
                    );
                    assert!(
                        plan.k_split * (plan.splits - 1) < layout.k(),
                        "{plan:?}: empty splits of {layout:?}"
                    );
                    assert!(plan.shared <= info.shared_per_block, "{plan:?} on {info:?}");
                    assert!(m <= GEMV_ROWS || (2..=4).contains(&plan.stages), "{plan:?}");
                    assert!(
                        plan.partial_bytes + COUNTER_BYTES
                            <= scratch_bytes(&info, &Matrix::Quantised(layout), m),
                        "{plan:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn splits_follow_from_shape_and_device_not_from_the_batch() {
        for info in devices() {
            for layout in layouts() {
                let mut seen = std::collections::HashMap::new();
                for m in 1..=QUANT_TILES_ROWS {
                    let plan = DecodePlan::new(&info, &Matrix::Quantised(layout), Half::F16, m);
                    let split = (plan.k_split, plan.splits);
                    assert_eq!(*seen.entry(plan.kernel).or_insert(split), split, "{m} tokens by {layout:?}");
                }
            }
        }
    }

    /// Checks the arithmetic in the kernels' headers: each multiprocessor keeps its share of bandwidth times latency in
    /// flight.
    #[test]
    fn large_weights_keep_enough_bytes_in_flight() {
        // GB/s of the devices above (a consumer Blackwell: 5090), 0.75 us.
        for (info, bandwidth) in devices().iter().zip([320, 600, 864, 1555, 4800, 1792]) {
            let need = bandwidth * 750 / info.multiprocessors as usize;
            for (n, k) in [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)] {
                for layout in PackedLayout::dtypes().map(|d| PackedLayout::new(d, n, k).unwrap()) {
                    for m in [1, 4, 5, 8, 16, 32, 64] {
                        let plan = DecodePlan::new(info, &Matrix::Quantised(layout), Half::F16, m);
                        let blocks = plan.grid.iter().product::<u32>() as usize;
                        let per_block = if m <= GEMV_ROWS {
                            // DEPTH tiles a warp.
                            let depth =
                                [4, 3, 3, 2][[4, 5, 6, 8].iter().position(|&b| b == layout.bits()).unwrap()];
                            WARPS * depth * layout.row_tile_bytes() / layout.tiles().1
                        } else {
                            // All stages but the one being read.
                            plan.shared as usize / plan.stages * (plan.stages - 1)
                        };
                        let flight = blocks * per_block / info.multiprocessors as usize;
                        assert!(flight >= need, "{m} by {layout:?} on {info:?}: {flight} of {need} bytes");
                    }
                }
            }
        }
    }
}
