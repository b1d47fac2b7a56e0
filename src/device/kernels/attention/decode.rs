//! Launching `cuda/attention_decode.cu`.

use super::super::abi::{DECODE_HEADS, DecodeAttentionParams};
use super::AttentionShape;
use crate::Result;
use crate::device::accelerator::PartialRows;
use crate::device::runtime::{DevPtr, Lane, Launch, Params, Runtime};

const THREADS: u32 = 128;
const WARPS: usize = 4;
/// Tokens that a warp takes at a time.
const KEYS: usize = 16;
/// Blocks per multiprocessor in a launch. Blocks take items in turn, so a launch sized for more items than there are (a
/// captured graph) costs nothing.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;

/// Addresses of decode attention's working memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeWorkspace {
    counters: DevPtr,
    split_ms: DevPtr,
    split_o: DevPtr,
}

impl DecodeWorkspace {
    /// Bytes for `rows` rows and `splits` splits (`super::Capacity::splits`).
    pub fn bytes(shape: &AttentionShape, rows: usize, splits: usize) -> usize {
        let (_, o) = DecodeWorkspace::offsets(shape, rows, splits);
        o + (splits * shape.n_heads * shape.head_dim * 4).max(16)
    }

    /// The workspace in [`DecodeWorkspace::bytes`] of memory at `base`, 16-byte aligned and zeroed once. Each launch
    /// leaves it ready for the next, also for one with fewer rows.
    pub fn at(base: DevPtr, shape: &AttentionShape, rows: usize, splits: usize) -> DecodeWorkspace {
        let (ms, o) = DecodeWorkspace::offsets(shape, rows, splits);
        DecodeWorkspace { counters: base, split_ms: base.add(ms), split_o: base.add(o) }
    }

    /// Offsets of (m, s) and of o; the counters come first.
    fn offsets(shape: &AttentionShape, rows: usize, splits: usize) -> (usize, usize) {
        let ms = (rows * blocks_per_item(shape) * 4).next_multiple_of(16);
        (ms, (ms + splits * shape.n_heads * 2 * 4).next_multiple_of(16))
    }
}

/// Blocks that share an item: KV heads times groups of query heads.
fn blocks_per_item(shape: &AttentionShape) -> usize {
    shape.n_kv_heads * (shape.n_heads / shape.n_kv_heads).div_ceil(DECODE_HEADS as usize)
}

/// Shared memory of a block; mirrors `Tile<T, D>` of the kernel.
fn shared_bytes(shape: &AttentionShape, sm: u32) -> u32 {
    let stages = match shape.head_dim {
        0..=96 => 4,
        97..=128 => 3,
        _ if sm >= 80 => 3,
        _ => 2,
    };
    // Of keys and values in 8 bits, the scales of both come with the keys.
    let scales = if shape.kv.is_scaled() { 2 * KEYS * size_of::<f32>() } else { 0 };
    (WARPS * stages * (KEYS * shape.head_dim * shape.kv.element() + scales)) as u32
}

/// Operands of [`decode_attention`].
#[derive(Debug, Clone, Copy)]
pub struct DecodeAttention {
    /// Queries after RoPE, `[rows][n_heads · head_dim]`.
    pub q: DevPtr,
    /// The layer's pages.
    pub kv: DevPtr,
    /// u32 page numbers of all sequences.
    pub page_table: DevPtr,
    /// [`super::AttentionPlan::decode`].
    pub items: DevPtr,
    /// u32: how many items there are.
    pub n_items: DevPtr,
    /// Upper bound of the number of items, which sets the grid.
    pub max_items: usize,
    /// f32 `[n_heads]`: the sinks, which join the sums of final rows; NULL: none.
    pub sinks: DevPtr,
    /// Final rows.
    pub out: DevPtr,
    /// Partial rows, if any item writes one.
    pub partial: PartialRows,
    /// Working memory.
    pub workspace: DecodeWorkspace,
}

/// Attention of rows that are decoded one by one ([`super::AttentionPlan::decode`]).
///
/// # Errors
/// As [`Runtime::launch`].
pub fn decode_attention(
    runtime: &dyn Runtime,
    lane: Lane,
    shape: &AttentionShape,
    args: &DecodeAttention,
) -> Result<()> {
    if args.max_items == 0 {
        return Ok(());
    }
    let [cap_span, cap_slope] = shape.score_cap();
    let params = DecodeAttentionParams {
        q: args.q,
        kv: args.kv,
        page_table: args.page_table,
        items: args.items,
        n_items: args.n_items,
        sinks: args.sinks,
        out: args.out,
        part_m: args.partial.m,
        part_s: args.partial.s,
        part_o: args.partial.o,
        split_ms: args.workspace.split_ms,
        split_o: args.workspace.split_o,
        counters: args.workspace.counters,
        n_heads: shape.n_heads as u32,
        n_kv_heads: shape.n_kv_heads as u32,
        out_type: shape.out_type(),
        scale_log2: shape.scale_log2(),
        cap_span,
        cap_slope,
    };
    let info = runtime.info();
    let blocks = args.max_items * blocks_per_item(shape);
    let fill = (info.multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR) as usize;
    runtime.launch(
        lane,
        &Launch {
            kernel: &shape.decode_kernel(),
            grid: [blocks.min(fill) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared: shared_bytes(shape, info.sm),
            params: params.bytes(),
        },
    )
}
