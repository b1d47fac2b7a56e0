//! Launching of quantised linear layers: `gemv_quant.cu` for 1 to 4 tokens, `linear_quant.cu` for more,
//! `dequant.cu` where rows are wanted as such (prefill GEMM, embeddings).
//!
//! How k is divided among blocks follows from the weight's shape, the kernel and the device alone, so a token's
//! result has the same bits in every batch that runs the same kernel ([`QuantPlan::kernel`]). Scratch memory is laid out as
//! in [`super::super::linear`], with which it can be shared on one lane.

use super::PackedLayout;
use crate::Result;
use crate::device::kernels::abi::{LinearParams, QuantGatherParams, QuantLinearParams, QuantRowsParams};
use crate::device::kernels::linear::{COUNTER_BYTES, Epilogue, LinearArgs, params};
use crate::device::kernels::product::choose::{GEMV_ROWS, QUANT_TILES_ROWS};
use crate::device::runtime::{DevPtr, DeviceInfo, Lane, Launch, Params, Runtime};
use crate::tensor::Half;

/// Warps of a block, all kernels.
const WARPS: usize = 8;
/// Rows and columns of a tile.
const TILE_ROWS: usize = 16;
const TILE_COLS: usize = 64;
/// Columns of a step of `linear_quant.cu`.
const STEP_COLS: usize = 128;

/// y\[m\]\[n\] = Σ_k x\[m\]\[k\]·w\[n\]\[k\] + bias\[n\].
#[derive(Debug, Clone, Copy)]
pub struct QuantLinearArgs {
    /// What the weight is.
    pub layout: PackedLayout,
    /// [Packed](super::pack()), 16-byte aligned.
    pub w: DevPtr,
    /// Type of the activations.
    pub act: Half,
    /// `[m][ldx]`, 16-byte aligned.
    pub x: DevPtr,
    /// f32 `[n]` in the order of w's rows, or NULL.
    pub bias: DevPtr,
    /// `[m][ldy]` of what [`Epilogue`] says; may be columns of a wider buffer.
    pub y: DevPtr,
    /// [`scratch_bytes`], its head zeroed once.
    pub scratch: DevPtr,
    /// Tokens, 1 to [`QUANT_TILES_ROWS`].
    pub m: usize,
    /// Elements between rows of x, a multiple of 8.
    pub ldx: usize,
    /// Elements between rows of y.
    pub ldy: usize,
    /// What becomes of the sums.
    pub epilogue: Epilogue,
}

/// A kernel of `linear_quant.cu`: the table at that file's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    tokens: usize,
    /// Row tiles of a warp (R).
    row_tiles: usize,
    /// Blocks that its registers allow on a multiprocessor.
    resident: usize,
}

impl Tile {
    /// Those for codes of `bits`, by tokens.
    fn all(bits: usize) -> [Tile; 4] {
        // Small codes need many rows a block for the x they share, and have the room.
        let of = |tokens, row_tiles, resident| Tile { tokens, row_tiles, resident };
        match bits {
            4 | 5 => [of(8, 4, 2), of(16, 4, 2), of(32, 4, 1), of(64, 2, 1)],
            _ => [of(8, 2, 2), of(16, 2, 2), of(32, 2, 2), of(64, 2, 1)],
        }
    }

    /// The smallest that holds `m` tokens, or else the largest that the device has shared memory for.
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

    /// As `Ring` in the kernel.
    fn shared(self, layout: &PackedLayout, stages: usize) -> usize {
        let tiles = WARPS * self.row_tiles;
        let stage = self.tokens * STEP_COLS * 2 + tiles * layout.shared_tile_bytes();
        let scales = if layout.has_super_blocks() { tiles * TILE_ROWS * 16 } else { 0 };
        // At the end, half of the warps hand their sums to the others.
        (stages * stage + scales).max(self.rows() * self.tokens * 4)
    }

    /// The deepest ring with which as many blocks fit as registers allow, at least three stages; else the deepest
    /// that fits, or the least there is. Results do not depend on it.
    fn stages(self, info: &DeviceInfo, layout: &PackedLayout) -> usize {
        let room = info.shared_per_block as usize;
        let fits = |stages: &usize| self.shared(layout, *stages) <= room;
        let shares = |stages: &usize| self.shared(layout, *stages) <= room / self.resident;
        [4, 3].into_iter().find(shares).or_else(|| [4, 3, 2].into_iter().find(fits)).unwrap_or(2)
    }

    /// Columns of a split. Time is the steps of the busiest multiprocessor, three more until its ring is full, and
    /// what it costs to meet: two, and one for every four splits, whose sums the last one adds.
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

/// One launch, as decided by shapes and device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantPlan {
    /// Which kernel: equal names, equal bits of a token's result.
    pub kernel: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// Columns of a split.
    pub k_split: usize,
    /// Splits of k.
    pub splits: usize,
    stages: usize,
    /// Bytes of partial sums.
    partial_bytes: usize,
}

impl QuantPlan {
    /// For `m` tokens.
    pub fn new(info: &DeviceInfo, layout: &PackedLayout, act: Half, m: usize) -> QuantPlan {
        assert!(
            (1..=QUANT_TILES_ROWS).contains(&m),
            "quantised linear of {m} tokens, takes 1 to {QUANT_TILES_ROWS}"
        );
        if m <= GEMV_ROWS {
            QuantPlan::gemv(layout, act, gemv_k_split(info, layout))
        } else {
            let tile = Tile::of(info, layout, m);
            QuantPlan::tiled(info, layout, act, m, tile, tile.k_split(info, layout))
        }
    }

    /// With the kernel for `tokens` tokens (at most 4: GEMV; 8, 16, 32 or 64) and splits of `k_split` columns, a
    /// multiple of 128: for tests, which choose what a device would choose for other shapes.
    pub fn forced(
        info: &DeviceInfo,
        layout: &PackedLayout,
        act: Half,
        m: usize,
        tokens: usize,
        k_split: usize,
    ) -> QuantPlan {
        if tokens <= GEMV_ROWS {
            return QuantPlan::gemv(layout, act, k_split);
        }
        let tiles = Tile::all(layout.bits());
        let tile = tiles.into_iter().find(|t| t.tokens == tokens).expect("a kernel for so many tokens");
        QuantPlan::tiled(info, layout, act, m, tile, k_split)
    }

    fn gemv(layout: &PackedLayout, act: Half, k_split: usize) -> QuantPlan {
        let row_tiles = layout.tiles().0;
        let splits = layout.k().div_ceil(k_split);
        QuantPlan {
            kernel: format!("gemv_{}_{}", layout.dtype(), act.name()),
            grid: [row_tiles as u32, splits as u32, 1],
            shared: (WARPS * 32 * 16) as u32,
            k_split,
            splits,
            stages: 0,
            partial_bytes: if splits > 1 { row_tiles * splits * 32 * 16 } else { 0 },
        }
    }

    fn tiled(
        info: &DeviceInfo,
        layout: &PackedLayout,
        act: Half,
        m: usize,
        tile: Tile,
        k_split: usize,
    ) -> QuantPlan {
        let splits = layout.k().div_ceil(k_split);
        let (tiles_m, tiles_n) = (m.div_ceil(tile.tokens), layout.n().div_ceil(tile.rows()));
        let stages = tile.stages(info, layout);
        let partial_bytes =
            if splits > 1 { tiles_m * tiles_n * splits * tile.rows() * tile.tokens * 4 } else { 0 };
        assert!(
            splits == 1 || tiles_m * tiles_n * 4 <= COUNTER_BYTES,
            "quantised linear of {m} tokens by {layout:?}: {tiles_m} x {tiles_n} tiles have no counters"
        );
        QuantPlan {
            kernel: format!("linear_{}_{}_t{}", layout.dtype(), act.name(), tile.tokens),
            grid: [tiles_m as u32, tiles_n as u32, splits as u32],
            shared: tile.shared(layout, stages) as u32,
            k_split,
            splits,
            stages,
            partial_bytes,
        }
    }

    /// Bytes of scratch that it needs.
    pub fn scratch_bytes(&self) -> usize {
        COUNTER_BYTES + self.partial_bytes
    }
}

/// A block a row tile; k is split only until there are two blocks for every multiprocessor, and while each warp
/// still has four tiles to stream.
fn gemv_k_split(info: &DeviceInfo, layout: &PackedLayout) -> usize {
    let (row_tiles, k_tiles) = layout.tiles();
    let want = 2 * info.multiprocessors as usize / row_tiles;
    let splits = want.clamp(1, (k_tiles / (4 * WARPS)).clamp(1, 16));
    k_tiles.div_ceil(splits) * TILE_COLS
}

/// Bytes of scratch that a weight needs for up to `max_m` tokens (counters included).
pub fn scratch_bytes(info: &DeviceInfo, layout: &PackedLayout, max_m: usize) -> usize {
    // Every kernel's largest number of tokens up to max_m.
    let largest = [GEMV_ROWS, 8, 16, 32, 64, QUANT_TILES_ROWS].map(|m| m.min(max_m).max(1));
    let bytes = largest.map(|m| QuantPlan::new(info, layout, Half::F16, m).scratch_bytes());
    bytes.into_iter().max().expect("there are kernels")
}

/// Enqueues one linear layer.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn linear(rt: &dyn Runtime, lane: Lane, args: &QuantLinearArgs) -> Result<()> {
    linear_as(rt, lane, args, &QuantPlan::new(rt.info(), &args.layout, args.act, args.m))
}

/// The same as `plan` says.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn linear_as(rt: &dyn Runtime, lane: Lane, args: &QuantLinearArgs, plan: &QuantPlan) -> Result<()> {
    let &QuantLinearArgs { layout, w, act: dtype, x, bias, y, scratch, m, ldx, ldy, epilogue } = args;
    let (n, k) = (layout.n(), layout.k());
    let dense = LinearArgs { dtype, w, x, bias, y, scratch, m, n, k, ldx, ldy, epilogue };
    let linear = LinearParams { k_split: plan.k_split as u32, ..params("quantised linear", &dense) };
    let params = QuantLinearParams { linear, stages: plan.stages as u32, ..Default::default() };
    launch(rt, lane, &plan.kernel, plan.grid, plan.shared, &params)
}

/// Rows of a packed matrix as 16-bit floats, in the order that they were packed in.
#[derive(Debug, Clone, Copy)]
pub struct RowsArgs {
    /// What the weight is.
    pub layout: PackedLayout,
    /// [Packed](super::pack()), 16-byte aligned.
    pub w: DevPtr,
    /// Type to round to.
    pub to: Half,
    /// `[count][ldy]`, 16-byte aligned.
    pub y: DevPtr,
    /// Elements between rows of y, a multiple of 8.
    pub ldy: usize,
    /// First row, a multiple of 16.
    pub first: usize,
    /// Rows.
    pub count: usize,
}

/// Enqueues the decoding of rows.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn rows(rt: &dyn Runtime, lane: Lane, args: &RowsArgs) -> Result<()> {
    let &RowsArgs { layout, ldy, first, count, .. } = args;
    assert!(
        first.is_multiple_of(TILE_ROWS) && first + count <= layout.n() && count > 0,
        "rows {first} .. + {count} of {layout:?}"
    );
    assert!(
        ldy >= layout.k() && ldy.is_multiple_of(8) && args.y.0.is_multiple_of(16),
        "rows of {layout:?} to [{count}][{ldy}] at {:?}",
        args.y
    );
    let params = QuantRowsParams {
        w: args.w,
        y: args.y,
        n: layout.n() as u32,
        k: layout.k() as u32,
        row_begin: first as u32,
        rows: count as u32,
        ldy: ldy as u32,
        ..Default::default()
    };
    let grid = [count.div_ceil(TILE_ROWS) as u32, layout.tiles().1.div_ceil(WARPS) as u32, 1];
    let shared = WARPS * TILE_ROWS * (TILE_COLS * 2 + 16);
    let kernel = format!("quant_rows_{}_{}", layout.dtype(), args.to.name());
    launch(rt, lane, &kernel, grid, shared as u32, &params)
}

/// Some rows of a packed matrix as f32: an embedding that shares its table with the output layer.
#[derive(Debug, Clone, Copy)]
pub struct GatherArgs {
    /// What the table is.
    pub layout: PackedLayout,
    /// [Packed](super::pack()), 16-byte aligned.
    pub w: DevPtr,
    /// u32 `[count]`: which rows; from n on: a row of zeros.
    pub row_ids: DevPtr,
    /// f32 `[count][ldy]`, 8-byte aligned.
    pub y: DevPtr,
    /// Elements between rows of y, even.
    pub ldy: usize,
    /// Rows.
    pub count: usize,
    /// Multiplies every element.
    pub scale: f32,
}

/// Enqueues the decoding of some rows.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn gather(rt: &dyn Runtime, lane: Lane, args: &GatherArgs) -> Result<()> {
    let &GatherArgs { layout, ldy, count, .. } = args;
    assert!(
        ldy >= layout.k() && ldy.is_multiple_of(2) && count > 0 && args.y.0.is_multiple_of(8),
        "{count} rows of {layout:?} to [{count}][{ldy}] at {:?}",
        args.y
    );
    let params = QuantGatherParams {
        w: args.w,
        row_ids: args.row_ids,
        y: args.y,
        n: layout.n() as u32,
        k: layout.k() as u32,
        rows: count as u32,
        ldy: ldy as u32,
        scale: args.scale,
        ..Default::default()
    };
    let grid = [count as u32, layout.tiles().1.div_ceil(WARPS) as u32, 1];
    launch(rt, lane, &format!("quant_gather_{}", layout.dtype()), grid, 0, &params)
}

fn launch<P: Params>(
    rt: &dyn Runtime,
    lane: Lane,
    kernel: &str,
    grid: [u32; 3],
    shared: u32,
    params: &P,
) -> Result<()> {
    let block = [WARPS as u32 * 32, 1, 1];
    rt.launch(lane, &Launch { kernel, grid, block, shared, params: params.bytes() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    const TOKENS: [usize; 14] = [1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256];

    /// T4, A10, L40S, A100, H200, a consumer Blackwell.
    fn devices() -> [DeviceInfo; 6] {
        [(75, 40, 64), (86, 72, 99), (89, 142, 99), (80, 108, 163), (90, 132, 227), (120, 170, 99)].map(
            |(sm, multiprocessors, kib)| DeviceInfo {
                name: "test".into(),
                sm,
                multiprocessors,
                memory_total: 1 << 30,
                shared_per_block: kib << 10,
                l2_bytes: 0,
                driver: 0,
            },
        )
    }

    fn layouts() -> impl Iterator<Item = PackedLayout> {
        let shapes = [(1, 256), (576, 1536), (4096, 4096), (1024, 14336), (128256, 4096), (28672, 4096)];
        DType::QUANTISED
            .into_iter()
            .flat_map(move |d| shapes.map(|(n, k)| PackedLayout::new(d, n, k).unwrap()))
    }

    #[test]
    fn every_column_is_in_one_split_and_no_split_is_empty() {
        for info in devices() {
            for layout in layouts() {
                for m in TOKENS {
                    let plan = QuantPlan::new(&info, &layout, Half::F16, m);
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
                        plan.partial_bytes + COUNTER_BYTES <= scratch_bytes(&info, &layout, m),
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
                    let plan = QuantPlan::new(&info, &layout, Half::F16, m);
                    let split = (plan.k_split, plan.splits);
                    assert_eq!(*seen.entry(plan.kernel).or_insert(split), split, "{m} tokens by {layout:?}");
                }
            }
        }
    }

    /// The arithmetic of the kernels' headers: bandwidth times latency, shared by the multiprocessors, is in flight.
    #[test]
    fn large_weights_keep_enough_bytes_in_flight() {
        // GB/s of the devices above (a consumer Blackwell: 5090), 0.75 us.
        for (info, bandwidth) in devices().iter().zip([320, 600, 864, 1555, 4800, 1792]) {
            let need = bandwidth * 750 / info.multiprocessors as usize;
            for (n, k) in [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)] {
                for layout in DType::QUANTISED.map(|d| PackedLayout::new(d, n, k).unwrap()) {
                    for m in [1, 4, 5, 8, 16, 32, 64] {
                        let plan = QuantPlan::new(info, &layout, Half::F16, m);
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
