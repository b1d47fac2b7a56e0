//! Products of 5 tokens and more with dense weights: `linear_dense.cu`. Each tile of weights is multiplied with all
//! rows of a tile of tokens; k is split over the device.

use super::args::COUNTER_BYTES;
use super::choose::GROUP_ROWS;
use super::plan::DecodePlan;
use crate::device::runtime::DeviceInfo;
use crate::tensor::Half;

/// Columns of a tile.
const TILE_K: usize = 64;

/// A tile of `linear_dense.cu`, as in the table at the end of that file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    /// Rows of the weight.
    bn: usize,
    /// Tokens.
    tm: usize,
    /// Stages of the ring: on devices without asynchronous copies (where stages hide no latency, but two save a
    /// barrier), with the 99 KiB of shared memory of an A10 and L40S, with the 227 KiB of an H200.
    stages: [usize; 3],
    /// Target number of blocks, in twentieths of the device's multiprocessors.
    blocks: usize,
    /// How much longer a block takes that has its multiprocessor for itself, in eighths: it computes nothing while it waits at its
    /// barrier.
    alone: usize,
}

/// The tiles, by tokens. Small tiles want two blocks per multiprocessor, so that one computes while the other waits at
/// its barrier; large ones keep enough bytes in flight with one, and pay for every split with m·n partial sums.
const TILES: [Tile; 5] = [
    Tile { bn: 64, tm: 8, stages: [2, 4, 6], blocks: 38, alone: 1 },
    Tile { bn: 64, tm: 16, stages: [2, 4, 6], blocks: 38, alone: 1 },
    Tile { bn: 128, tm: 32, stages: [2, 3, 4], blocks: 19, alone: 0 },
    Tile { bn: 128, tm: 64, stages: [2, 3, 4], blocks: 19, alone: 0 },
    Tile { bn: 128, tm: 128, stages: [2, 3, 4], blocks: 19, alone: 0 },
];

/// What it takes to add the sums of splits, in steps.
const MEET: usize = 6;

impl Tile {
    fn stages(self, info: &DeviceInfo) -> usize {
        self.stages[if info.sm < 80 { 0 } else { usize::from(info.shared_per_block >= 200 << 10) + 1 }]
    }

    fn shared(self, info: &DeviceInfo) -> usize {
        self.stages(info) * (self.bn + self.tm) * TILE_K * 2
    }

    /// The smallest tile that holds `m` tokens, or else the largest that the device has shared memory for.
    fn of(info: &DeviceInfo, m: usize) -> Tile {
        let fits = |t: &Tile| t.shared(info) <= info.shared_per_block as usize;
        let tile = TILES.iter().filter(|t| fits(t)).find(|t| m <= t.tm);
        *tile.or_else(|| TILES.iter().rfind(|t| fits(t))).expect("18 KiB of shared memory, as every GPU has")
    }

    /// The kernel for a group of `tokens` tokens, if the device has shared memory for it.
    fn grouped(info: &DeviceInfo, tokens: usize) -> Option<Tile> {
        let fits = |t: &&Tile| t.shared(info) <= info.shared_per_block as usize;
        TILES.iter().filter(fits).find(|t| t.tm == tokens && tokens <= GROUP_ROWS).copied()
    }

    /// Columns of a split: no more splits than reach the target number of blocks, each at least four steps long, and of those as many as make
    /// the busiest multiprocessor's steps fewest. (On an H200, 6144 x 4096 and 8, 16, 32, 64 rows, µs: 18.1, 19.2, 20.8, 28.8 with the three
    /// splits that reach the target, 16.7, 17.6, 20.5, 25.5 with two; 960 x 576 and 8 rows 5.0 with two and 4.3 without.
    /// `cargo bench --bench cuda -- --sweep`.)
    fn k_split(self, info: &DeviceInfo, n: usize, k: usize) -> usize {
        let steps = k.div_ceil(TILE_K).max(1);
        let multiprocessors = (info.multiprocessors as usize).max(1);
        let aim = multiprocessors * self.blocks / 20;
        let tiles = n.div_ceil(self.bn);
        let most = aim.div_ceil(tiles).clamp(1, (steps / 4).clamp(1, 16));
        let cost = |splits: usize| {
            let (busiest, own) = ((tiles * splits).div_ceil(multiprocessors), steps.div_ceil(splits));
            let alone = if busiest == 1 { own * self.alone / 8 } else { 0 };
            busiest * own + alone + if splits > 1 { MEET } else { 0 }
        };
        let splits = (1..=most).min_by_key(|&splits| cost(splits)).expect("at least one");
        steps.div_ceil(splits) * TILE_K
    }
}

/// Token counts of the tiles.
pub(super) const TOKENS: [usize; TILES.len()] = {
    let mut tokens = [0; TILES.len()];
    let mut i = 0;
    while i < TILES.len() {
        tokens[i] = TILES[i].tm;
        i += 1;
    }
    tokens
};

/// Plans the product of `m` tokens with an `n` x `k` weight.
pub(super) fn plan(info: &DeviceInfo, act: Half, m: usize, n: usize, k: usize) -> DecodePlan {
    let tile = Tile::of(info, m);
    let k_split = tile.k_split(info, n, k);
    let (tiles_m, tiles_n, splits) = (m.div_ceil(tile.tm), n.div_ceil(tile.bn), k.div_ceil(k_split));
    let partial_bytes = if splits > 1 { tiles_m * tiles_n * splits * tile.bn * tile.tm * 4 } else { 0 };
    assert!(
        splits == 1 || tiles_m * tiles_n * 4 <= COUNTER_BYTES,
        "linear of {m} tokens by a {n} x {k} weight: {tiles_m} x {tiles_n} tiles in {splits} splits have no counters"
    );
    DecodePlan {
        kernel: format!("linear_dense_{}_n{}", act.name(), tile.tm),
        grid: [tiles_m as u32, tiles_n as u32, splits as u32],
        shared: tile.shared(info) as u32,
        k_warps_log2: 0,
        k_split,
        splits,
        stages: tile.stages(info),
        partial_bytes,
    }
}

/// The product of groups of up to `tokens` tokens with matrices of `n` x `k`, each as a whole: a grid of one group. `None` if there
/// is no kernel for it.
pub(super) fn grouped(info: &DeviceInfo, act: Half, tokens: usize, n: usize, k: usize) -> Option<DecodePlan> {
    let tile = Tile::grouped(info, tokens)?;
    Some(DecodePlan {
        kernel: format!("experts_dense_{}_n{}", act.name(), tile.tm),
        grid: [n.div_ceil(tile.bn) as u32, 1, 1],
        shared: tile.shared(info) as u32,
        k_warps_log2: 0,
        k_split: k.next_multiple_of(TILE_K),
        splits: 1,
        stages: tile.stages(info),
        partial_bytes: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::super::args::Matrix;
    use super::super::choose::{DENSE_TILES_ROWS, GEMV_ROWS};
    use super::super::decode::scratch_bytes;
    use super::super::gemv::WARPS;
    use super::*;

    fn device(sm: u32, multiprocessors: u32, shared_kib: u32) -> DeviceInfo {
        DeviceInfo {
            name: "test".into(),
            sm,
            multiprocessors,
            memory_total: 1 << 30,
            shared_per_block: shared_kib << 10,
            l2_bytes: 0,
            memory_bw: 0,
            clock_khz: 0,
            driver: 0,
        }
    }

    /// T4, A10, L40S, A100, H200 and a consumer Blackwell.
    fn devices() -> [DeviceInfo; 6] {
        [(75, 40, 64), (86, 72, 99), (89, 142, 99), (80, 108, 163), (90, 132, 227), (120, 170, 99)]
            .map(|(sm, n, kib)| device(sm, n, kib))
    }

    #[test]
    fn every_column_is_in_one_part_and_no_split_is_empty() {
        for info in devices() {
            for (n, k) in
                [(1, 8), (7, 576), (576, 1536), (4096, 4096), (1024, 14336), (128256, 4096), (28672, 4104)]
            {
                for m in [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 1024] {
                    let plan = DecodePlan::new(&info, &Matrix::Dense { n, k }, Half::F16, m);
                    let (warps, splits) = plan.k_parts();
                    assert!(plan.k_split * warps * splits >= k, "{plan:?} leaves columns of {k}");
                    assert!(plan.k_split * (splits - 1) < k, "{plan:?} has empty splits of {k}");
                    assert!(plan.shared <= info.shared_per_block, "{plan:?} on {info:?}");
                    assert!(
                        plan.partial_bytes + COUNTER_BYTES
                            <= scratch_bytes(&info, &Matrix::Dense { n, k }, m.max(64))
                    );
                }
            }
        }
    }

    #[test]
    fn splits_follow_from_shape_and_device_not_from_the_batch() {
        for info in devices() {
            for (n, k) in [(576, 576), (4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)] {
                let mut seen = std::collections::HashMap::new();
                for m in 1..=DENSE_TILES_ROWS {
                    let plan = DecodePlan::new(&info, &Matrix::Dense { n, k }, Half::F16, m);
                    let split = (plan.k_split, plan.k_parts());
                    assert_eq!(*seen.entry(plan.kernel).or_insert(split), split, "{m} x {n} x {k}");
                }
            }
        }
    }

    /// Checks the arithmetic in the kernels' headers: bytes in flight per multiprocessor, with one wave of blocks.
    #[test]
    fn large_weights_keep_enough_bytes_in_flight() {
        for info in devices() {
            let need = if info.sm >= 90 { 26 << 10 } else { 5 << 10 };
            for (n, k) in [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)] {
                for m in [1, 4, 5, 8, 16, 32, 64, 128] {
                    let plan = DecodePlan::new(&info, &Matrix::Dense { n, k }, Half::F16, m);
                    let blocks = plan.grid.iter().product::<u32>() as usize;
                    let block = if m <= GEMV_ROWS {
                        WARPS * 32 * 8 * 16
                    } else {
                        // All stages but the one being read.
                        let tile = Tile::of(&info, m);
                        plan.shared as usize - (tile.bn + tile.tm) * TILE_K * 2
                    };
                    let flight = blocks * block / info.multiprocessors as usize;
                    assert!(flight >= need, "{m} x {n} x {k} on {info:?}: {flight} of {need} bytes");
                }
            }
        }
    }
}
