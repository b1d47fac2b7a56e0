//! Dense linear layers of 16-bit weights: `gemv.cu` for 1 to 4 tokens, `linear_dense.cu` for more.
//!
//! How k is divided among warps and blocks follows from the weight's shape, the kernel and the device alone,
//! so a token's result has the same bits in every batch that runs the same kernel ([`DensePlan::kernel`]).
//!
//! Partial sums of split k live in a scratch buffer: [`COUNTER_BYTES`] of arrival counters, zeroed once (every
//! launch leaves them zero), then [`scratch_bytes`] minus that of partials, whatever they hold.

use super::abi::{LINEAR_F32, LINEAR_GEGLU, LINEAR_RELU, LINEAR_SWIGLU, LinearParams};
use super::product::choose::{DENSE_TILES_ROWS, GEMV_ROWS};
use crate::Result;
use crate::device::runtime::{DevPtr, DeviceInfo, Lane, Launch, Params, Runtime};
use crate::tensor::Half;

/// The head of a scratch buffer that counts arrivals. Zero before the first launch.
pub const COUNTER_BYTES: usize = 64 << 10;

/// Warps of a block of `gemv.cu`, and its columns per step and per batch of loads.
const GEMV_WARPS: usize = 8;
const GEMV_STEP: usize = 256;
/// Columns of a tile of `linear_dense.cu`.
const TILE_K: usize = 64;

/// What becomes of the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// f32 `[m][n]`.
    F32,
    /// max(sum, 0), in the activation type.
    Relu,
    /// silu(gate)·up, in the activation type `[m][n/2]`: rows of the weight are [interleaved](gate_up_row).
    SwiGlu,
    /// gelu_tanh(gate)·up, likewise.
    GeGlu,
}

impl Epilogue {
    /// All of them.
    pub const ALL: [Epilogue; 4] = [Epilogue::F32, Epilogue::Relu, Epilogue::SwiGlu, Epilogue::GeGlu];

    /// Whether rows of the weight are interleaved gates and ups.
    pub fn is_gated(self) -> bool {
        matches!(self, Epilogue::SwiGlu | Epilogue::GeGlu)
    }

    pub(super) fn code(self) -> u32 {
        match self {
            Epilogue::F32 => LINEAR_F32,
            Epilogue::Relu => LINEAR_RELU,
            Epilogue::SwiGlu => LINEAR_SWIGLU,
            Epilogue::GeGlu => LINEAR_GEGLU,
        }
    }
}

/// y\[m\]\[n\] = Σ_k x\[m\]\[k\]·w\[n\]\[k\] + bias\[n\].
#[derive(Debug, Clone, Copy)]
pub struct LinearArgs {
    /// Type of weights and activations.
    pub dtype: Half,
    /// `[n][k]`, rows contiguous, 16-byte aligned.
    pub w: DevPtr,
    /// `[m][ldx]`, 16-byte aligned.
    pub x: DevPtr,
    /// f32 `[n]` in the order of w's rows, or NULL.
    pub bias: DevPtr,
    /// `[m][ldy]` of what [`Epilogue`] says; may be columns of a wider buffer.
    pub y: DevPtr,
    /// [`scratch_bytes`], or what else the kernel says; counters at its head, zeroed once. Kernels of one lane share it.
    pub scratch: DevPtr,
    /// Tokens: 1 to [`DENSE_TILES_ROWS`], any number for [`super::gemm`].
    pub m: usize,
    /// Rows of the weight (gates and ups counted both).
    pub n: usize,
    /// Columns of the weight, a multiple of 8.
    pub k: usize,
    /// Elements between rows of x, a multiple of 8.
    pub ldx: usize,
    /// Elements between rows of y.
    pub ldy: usize,
    /// What becomes of the sums.
    pub epilogue: Epilogue,
}

/// A tile of `linear_dense.cu`: the table at that file's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    /// Rows of the weight.
    bn: usize,
    /// Tokens.
    tm: usize,
    /// Stages of the ring: without asynchronous copies (they hide nothing then, but two save a barrier), with the
    /// 99 KiB of shared memory of an A10 and L40S, with the 227 KiB of an H200.
    stages: [usize; 3],
    /// Blocks to aim at, in twentieths of the device's multiprocessors.
    blocks: usize,
}

/// Small tiles want two blocks a multiprocessor, so that one computes while the other waits at its barrier; large
/// ones have the bytes in flight with one, and pay for every split with m·n partial sums.
const TILES: [Tile; 5] = [
    Tile { bn: 64, tm: 8, stages: [2, 4, 6], blocks: 38 },
    Tile { bn: 64, tm: 16, stages: [2, 4, 6], blocks: 38 },
    Tile { bn: 128, tm: 32, stages: [2, 3, 4], blocks: 19 },
    Tile { bn: 128, tm: 64, stages: [2, 3, 4], blocks: 19 },
    Tile { bn: 128, tm: 128, stages: [2, 3, 4], blocks: 19 },
];

impl Tile {
    fn stages(self, info: &DeviceInfo) -> usize {
        self.stages[if info.sm < 80 { 0 } else { usize::from(info.shared_per_block >= 200 << 10) + 1 }]
    }

    fn shared(self, info: &DeviceInfo) -> usize {
        self.stages(info) * (self.bn + self.tm) * TILE_K * 2
    }

    /// The smallest that holds `m` tokens, or else the largest that the device has shared memory for.
    fn of(info: &DeviceInfo, m: usize) -> Tile {
        let fits = |t: &Tile| t.shared(info) <= info.shared_per_block as usize;
        let tile = TILES.iter().filter(|t| fits(t)).find(|t| m <= t.tm);
        *tile.or_else(|| TILES.iter().rfind(|t| fits(t))).expect("18 KiB of shared memory, as every GPU has")
    }

    /// Columns of a split: the fewest splits that make the blocks aimed at, each at least four steps long.
    fn k_split(self, info: &DeviceInfo, n: usize, k: usize) -> usize {
        let steps = k.div_ceil(TILE_K).max(1);
        let aim = info.multiprocessors as usize * self.blocks / 20;
        let splits = aim.div_ceil(n.div_ceil(self.bn)).clamp(1, (steps / 4).clamp(1, 16));
        steps.div_ceil(splits) * TILE_K
    }
}

/// One launch, as decided by shapes and device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DensePlan {
    /// Which kernel: equal names (on one device), equal bits of a token's result.
    pub kernel: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// Warps of a block that share a row, as a power of two (`gemv.cu`).
    pub k_warps_log2: u32,
    /// Columns of a block's split (`linear_dense.cu`), or of a warp's slice (`gemv.cu`).
    pub k_split: usize,
    /// Tiles in the ring (`linear_dense.cu`).
    pub stages: usize,
    /// Bytes of partial sums.
    pub partial_bytes: usize,
}

impl DensePlan {
    /// For `m` tokens by an `n` x `k` weight.
    pub fn new(info: &DeviceInfo, dtype: Half, m: usize, n: usize, k: usize) -> DensePlan {
        assert!((1..=DENSE_TILES_ROWS).contains(&m), "linear of {m} tokens, takes 1 to {DENSE_TILES_ROWS}");
        assert!(
            n >= 1 && k >= 8 && k.is_multiple_of(8),
            "linear by a {n} x {k} weight: k is a multiple of 8"
        );
        if m <= GEMV_ROWS {
            return DensePlan::gemv(info, dtype, m, n, k);
        }
        let tile = Tile::of(info, m);
        let k_split = tile.k_split(info, n, k);
        let (tiles_m, tiles_n, splits) = (m.div_ceil(tile.tm), n.div_ceil(tile.bn), k.div_ceil(k_split));
        let partial_bytes = if splits > 1 { tiles_m * tiles_n * splits * tile.bn * tile.tm * 4 } else { 0 };
        assert!(
            splits == 1 || tiles_m * tiles_n * 4 <= COUNTER_BYTES,
            "linear of {m} tokens by a {n} x {k} weight: {tiles_m} x {tiles_n} tiles in {splits} splits have no counters"
        );
        DensePlan {
            kernel: format!("linear_dense_{}_n{}", dtype.name(), tile.tm),
            grid: [tiles_m as u32, tiles_n as u32, splits as u32],
            shared: tile.shared(info) as u32,
            k_warps_log2: 0,
            k_split,
            stages: tile.stages(info),
            partial_bytes,
        }
    }

    /// Warps share rows until there are 16 for every multiprocessor (or slices get shorter than two steps): the
    /// eight 16-byte loads of each lane then keep 64 KiB in flight.
    fn gemv(info: &DeviceInfo, dtype: Half, m: usize, n: usize, k: usize) -> DensePlan {
        let pairs = n.div_ceil(2);
        let want = 16 * info.multiprocessors as usize;
        let mut log2 = 0;
        while (1 << log2) < GEMV_WARPS && pairs << log2 < want && k >> (log2 + 1) >= 2 * GEMV_STEP {
            log2 += 1;
        }
        DensePlan {
            kernel: format!("gemv_{}_m{m}", dtype.name()),
            grid: [pairs.div_ceil(GEMV_WARPS >> log2) as u32, 1, 1],
            shared: (GEMV_WARPS * 2 * m * 4) as u32,
            k_warps_log2: log2,
            k_split: k.div_ceil(GEMV_STEP).div_ceil(1 << log2) * GEMV_STEP,
            stages: 0,
            partial_bytes: 0,
        }
    }

    /// How many parts k is summed in: by warps of a block and by blocks.
    pub fn k_parts(&self) -> (usize, usize) {
        (1 << self.k_warps_log2, self.grid[2] as usize)
    }
}

/// Bytes of scratch that an `n` x `k` weight needs for up to `max_m` tokens (counters included).
pub fn scratch_bytes(info: &DeviceInfo, max_m: usize, n: usize, k: usize) -> usize {
    // Every kernel's largest number of tokens up to max_m.
    let largest = TILES.iter().map(|t| t.tm.min(max_m)).chain([max_m]);
    let partials = largest.map(|m| DensePlan::new(info, Half::F16, m, n, k).partial_bytes).max();
    COUNTER_BYTES + partials.expect("there are tiles")
}

/// Enqueues one linear layer.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn linear(rt: &dyn Runtime, lane: Lane, args: &LinearArgs) -> Result<()> {
    linear_as(rt, lane, args, &DensePlan::new(rt.info(), args.dtype, args.m, args.n, args.k))
}

/// [`linear`] as another [`DensePlan`] for the same shape says: for tests and measurements.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn linear_as(rt: &dyn Runtime, lane: Lane, args: &LinearArgs, plan: &DensePlan) -> Result<()> {
    let params = LinearParams {
        k_warps_log2: plan.k_warps_log2,
        stages: plan.stages as u32,
        k_split: plan.k_split as u32,
        ..params("linear", args)
    };
    rt.launch(
        lane,
        &Launch {
            kernel: &plan.kernel,
            grid: plan.grid,
            block: [256, 1, 1],
            shared: plan.shared,
            params: params.bytes(),
        },
    )
}

/// What every kernel of `linear_*.cu` and `gemv*.cu` is told, once it is known to make sense; `what` names the layer
/// where it does not.
pub(super) fn params(what: &str, args: &LinearArgs) -> LinearParams {
    let &LinearArgs { m, n, k, ldx, ldy, .. } = args;
    let columns = if args.epilogue.is_gated() { n / 2 } else { n };
    assert!(
        ldx >= k && ldx.is_multiple_of(8) && ldy >= columns,
        "{what} of x [{m}][{ldx}] by w [{n}][{k}] to y [{m}][{ldy}]"
    );
    assert!(
        !args.epilogue.is_gated() || n.is_multiple_of(16),
        "gate and up by 8: {n} rows are no multiple of 16"
    );
    assert!(args.w.0.is_multiple_of(16) && args.x.0.is_multiple_of(16), "w and x lie on 16 bytes");
    LinearParams {
        w: args.w,
        x: args.x,
        bias: args.bias,
        y: args.y,
        partials: args.scratch.add(COUNTER_BYTES),
        counters: args.scratch,
        m: m as u32,
        n: n as u32,
        k: k as u32,
        ldx: ldx as u32,
        ldy: ldy as u32,
        epilogue: args.epilogue.code(),
        ..Default::default()
    }
}

/// Which row of which part is row `r` of a gate and an up projection interleaved by eight (gate 0..8, up 0..8, gate
/// 8..16, ...), so that one thread of an mma holds a gate and its up: `(false, i)` is the gate's row `i`, `(true, i)`
/// the up's.
pub fn gate_up_row(r: usize) -> (bool, usize) {
    (r % 16 >= 8, r / 16 * 8 + r % 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(sm: u32, multiprocessors: u32, shared_kib: u32) -> DeviceInfo {
        DeviceInfo {
            name: "test".into(),
            sm,
            multiprocessors,
            memory_total: 1 << 30,
            shared_per_block: shared_kib << 10,
            l2_bytes: 0,
            driver: 0,
        }
    }

    /// T4, A10, L40S, A100, H200, a consumer Blackwell.
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
                    let plan = DensePlan::new(&info, Half::F16, m, n, k);
                    let (warps, splits) = plan.k_parts();
                    assert!(plan.k_split * warps * splits >= k, "{plan:?} leaves columns of {k}");
                    assert!(plan.k_split * (splits - 1) < k, "{plan:?} has empty splits of {k}");
                    assert!(plan.shared <= info.shared_per_block, "{plan:?} on {info:?}");
                    assert!(plan.partial_bytes + COUNTER_BYTES <= scratch_bytes(&info, m.max(64), n, k));
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
                    let plan = DensePlan::new(&info, Half::F16, m, n, k);
                    let split = (plan.k_split, plan.k_parts());
                    assert_eq!(*seen.entry(plan.kernel).or_insert(split), split, "{m} x {n} x {k}");
                }
            }
        }
    }

    /// The arithmetic of the kernels' headers: bytes in flight a multiprocessor, with one wave of blocks.
    #[test]
    fn large_weights_keep_enough_bytes_in_flight() {
        for info in devices() {
            let need = if info.sm >= 90 { 26 << 10 } else { 5 << 10 };
            for (n, k) in [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)] {
                for m in [1, 4, 5, 8, 16, 32, 64, 128] {
                    let plan = DensePlan::new(&info, Half::F16, m, n, k);
                    let blocks = plan.grid.iter().product::<u32>() as usize;
                    let block = if m <= GEMV_ROWS {
                        GEMV_WARPS * 32 * 8 * 16
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

    #[test]
    fn gates_and_ups_alternate_by_eight() {
        let rows: Vec<_> = (0..32).map(gate_up_row).collect();
        let want = [(false, 0..8), (true, 0..8), (false, 8..16), (true, 8..16)];
        let want: Vec<_> = want.into_iter().flat_map(|(up, rows)| rows.map(move |i| (up, i))).collect();
        assert_eq!(rows, want);
    }
}
