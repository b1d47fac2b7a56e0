//! Launching `attention_merge_*` of `cuda/attention_decode.cu`.

use super::super::abi::AttentionMergeParams;
use super::AttentionShape;
use crate::Result;
use crate::device::accelerator::PartialRows;
use crate::device::runtime::{DevPtr, Lane, Launch, Params, Runtime};

const WARPS: usize = 4;
/// Blocks per multiprocessor in a launch; warps take heads of rows in turn.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// Operands of [`merge_attention`].
#[derive(Debug, Clone, Copy)]
pub struct MergeAttention {
    /// The partial rows of this device.
    pub here: PartialRows,
    /// The partial rows of another device: the same rows, over other tokens.
    pub elsewhere: PartialRows,
    /// u32 `[n_rows]`: the row of `out` that each merged row is written to.
    pub rows: DevPtr,
    /// u32: how many rows there are.
    pub n_rows: DevPtr,
    /// Upper bound of the number of rows, which sets the grid.
    pub max_rows: usize,
    /// f32 `[n_heads]`: the sinks, which join here; NULL: none.
    pub sinks: DevPtr,
    /// Final rows.
    pub out: DevPtr,
}

/// Merges two partial rows into each final row.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn merge_attention(
    runtime: &dyn Runtime,
    lane: Lane,
    shape: &AttentionShape,
    args: &MergeAttention,
) -> Result<()> {
    if args.max_rows == 0 {
        return Ok(());
    }
    let params = AttentionMergeParams {
        m_a: args.here.m,
        s_a: args.here.s,
        o_a: args.here.o,
        m_b: args.elsewhere.m,
        s_b: args.elsewhere.s,
        o_b: args.elsewhere.o,
        rows: args.rows,
        n_rows: args.n_rows,
        sinks: args.sinks,
        out: args.out,
        n_heads: shape.n_heads as u32,
        head_dim: shape.head_dim as u32,
    };
    let blocks = (args.max_rows * shape.n_heads).div_ceil(WARPS);
    let fill = (runtime.info().multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR) as usize;
    runtime.launch(
        lane,
        &Launch {
            kernel: &shape.merge_kernel(),
            grid: [blocks.min(fill) as u32, 1, 1],
            block: [WARPS as u32 * 32, 1, 1],
            shared: 0,
            params: params.bytes(),
        },
    )
}
