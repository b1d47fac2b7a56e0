//! Launching `cuda/embed.cu`.

use super::super::abi::{EMBED_POSITION_BF16, EMBED_POSITION_F16, EMBED_POSITION_F32, EmbedParams};
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::tensor::DType;
use crate::{Error, Result};

const THREADS: usize = 128;
/// Elements of a row that a block takes.
const PER_BLOCK: usize = THREADS * 4;

/// A table of learned positions.
#[derive(Debug, Clone, Copy)]
pub struct Positions {
    /// `[n][d]`.
    pub table: DevPtr,
    /// `F32`, `F16` or `BF16`.
    pub dtype: DType,
    /// Rows of the table; positions beyond add nothing.
    pub n: usize,
    /// Row of position 0.
    pub offset: usize,
    /// u32 `[rows]` in device memory: each row's position.
    pub row_pos: DevPtr,
}

/// Operands of [`embed`].
#[derive(Debug, Clone, Copy)]
pub struct Embed {
    /// u32 `[rows]` in device memory; `u32::MAX` (or any number from `vocab` on) gives a row of zeros. With NULL, row r
    /// is row r of the table (rows that the host looked up and uploaded).
    pub tokens: DevPtr,
    /// `[vocab][d]`, rows as in the model file, one after the other.
    pub table: DevPtr,
    /// Its storage type.
    pub dtype: DType,
    /// Rows of the table.
    pub vocab: usize,
    /// Multiplies the table's rows (not the positions).
    pub scale: f32,
    /// Learned positions, if the model has them.
    pub positions: Option<Positions>,
    /// f32 `[rows][d]`.
    pub hidden: DevPtr,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub d: usize,
}

/// hidden = scale · table\[tokens\] (+ positions).
///
/// # Errors
/// [`Error::Unsupported`] for quantised positions; else as [`Runtime::launch`].
///
/// # Panics
/// If `d` is no whole number of blocks of `dtype`.
pub fn embed(runtime: &dyn Runtime, lane: Lane, args: &Embed) -> Result<()> {
    let Some(row_bytes) = args.dtype.row_bytes(args.d) else {
        panic!("embed: {} rows of {} elements are not whole blocks", args.dtype, args.d)
    };
    let mut params = EmbedParams {
        tokens: args.tokens,
        table: args.table,
        hidden: args.hidden,
        row_bytes: row_bytes as u64,
        rows: args.rows as u32,
        d: args.d as u32,
        vocab: args.vocab as u32,
        scale: args.scale,
        ..Default::default()
    };
    if let Some(p) = &args.positions {
        params.positions = p.table;
        params.row_pos = p.row_pos;
        params.n_positions = p.n.min(u32::MAX as usize) as u32;
        params.position_offset = p.offset as u32;
        params.position_dtype = match p.dtype {
            DType::F32 => EMBED_POSITION_F32,
            DType::F16 => EMBED_POSITION_F16,
            DType::BF16 => EMBED_POSITION_BF16,
            other => {
                return Err(Error::Unsupported(format!(
                    "learned positions of type {other} on an accelerator; wanted f32, f16 or bf16"
                )));
            }
        };
    }
    let kernel = format!("embed_{}", args.dtype);
    super::launch(runtime, lane, &kernel, [args.rows, args.d.div_ceil(PER_BLOCK)], THREADS, 0, &params)
}
