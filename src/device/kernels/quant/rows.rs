//! Decodes rows of a packed matrix (`dequant.cu`), for the prefill GEMM and for embeddings.

use super::PackedLayout;
use crate::Result;
use crate::device::kernels::abi::{QuantGatherParams, QuantRowsParams};
use crate::device::runtime::{DevPtr, Lane, Launch, Params, Runtime};
use crate::tensor::Half;

/// Warps of a block.
const WARPS: usize = 8;
/// Rows and columns of a tile.
const TILE_ROWS: usize = 16;
const TILE_COLS: usize = 64;

/// Operands of [`rows()`]: rows of a packed matrix as 16-bit floats, in the order in which they were packed.
#[derive(Debug, Clone, Copy)]
pub struct RowsArgs {
    /// Layout of the weight.
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

/// Enqueues the decoding of consecutive rows.
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

/// Operands of [`gather`]: some rows of a packed matrix as f32, for an embedding that shares its table with the output
/// layer.
#[derive(Debug, Clone, Copy)]
pub struct GatherArgs {
    /// Layout of the table.
    pub layout: PackedLayout,
    /// [Packed](super::pack()), 16-byte aligned.
    pub w: DevPtr,
    /// u32 `[count]`: the rows to decode; a number from n on gives a row of zeros.
    pub row_ids: DevPtr,
    /// f32 `[count][ldy]`, 8-byte aligned.
    pub y: DevPtr,
    /// Elements between rows of y, even.
    pub ldy: usize,
    /// Rows.
    pub count: usize,
    /// Factor that every element is multiplied by.
    pub scale: f32,
}

/// Enqueues the decoding of listed rows.
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
