//! Which kernel multiplies a weight by how many rows of activations: the thresholds that several files must agree on.
//!
//! ```text
//! rows                  dense                 quantised
//! 1..=GEMV_ROWS         gemv                  gemv, codes to halves in registers
//! ..=DECODE_ROWS        linear_dense          linear_quant
//! more                  gemm                  rows decoded to a buffer, slice after slice, then gemm
//! ```
//!
//! Row buckets follow from this table: all row counts of a bucket are launched with the same kernels and the same
//! splits of k, so graphs can be recorded per bucket, and a row's bits do not depend on how many rows of the bucket are
//! used.

/// Most rows for which weights stream through registers once (`gemv.cu`, `gemv_quant.cu`).
pub const GEMV_ROWS: usize = 4;

/// Most rows for the kernels that read weights once per tile of tokens and split k over the device. Beyond that, tiles
/// of the prefill GEMM reuse both operands.
pub const DECODE_ROWS: usize = 128;

/// Most rows that `linear_dense.cu` can be launched for (tests and benches go beyond [`DECODE_ROWS`]), so that the
/// counters of all tiles fit.
pub const DENSE_TILES_ROWS: usize = 1024;

/// Most rows that `linear_quant.cu` can be launched for, for the same reason.
pub const QUANT_TILES_ROWS: usize = 256;

/// Most rows of a group of a grouped product (experts): the largest tile of tokens that all devices' kernels have.
pub const GROUP_ROWS: usize = 64;

const _: () = assert!(DECODE_ROWS <= DENSE_TILES_ROWS && DECODE_ROWS <= QUANT_TILES_ROWS);

/// The kinds of kernels, by the number of rows that each is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Weights stream through registers: `gemv.cu`, `gemv_quant.cu`.
    Gemv,
    /// Tiles of weights by all rows of a tile of tokens: `linear_dense.cu`, `linear_quant.cu`.
    Tiles,
    /// Tiles that reuse weights and activations: `gemm.cu`, `gemm_sm90a.cu`; quantised weights are decoded first.
    Gemm,
}

impl Choice {
    /// The kind of kernel for `rows` rows of activations.
    pub fn of(rows: usize) -> Choice {
        if rows <= GEMV_ROWS {
            Choice::Gemv
        } else if rows <= DECODE_ROWS {
            Choice::Tiles
        } else {
            Choice::Gemm
        }
    }
}

/// The number of rows that `rows` rows are launched and recorded as: GEMV has a kernel for each number, tiles of tokens
/// are powers of two, and beyond them the GEMM is planned by [`gemm_bucket`].
pub fn row_bucket(rows: usize) -> usize {
    match Choice::of(rows) {
        Choice::Gemv => rows,
        Choice::Tiles => rows.next_power_of_two(),
        Choice::Gemm => gemm_bucket(rows),
    }
}

/// The number of rows that the GEMM of `rows` rows is planned for: powers of two from 64, and the numbers halfway
/// between them.
pub fn gemm_bucket(rows: usize) -> usize {
    let power = rows.max(64).next_power_of_two();
    if rows.max(64) <= power / 4 * 3 { power / 4 * 3 } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_its_rows_and_has_one_kernel() {
        for rows in 0..=4096 {
            let bucket = row_bucket(rows);
            assert!(bucket >= rows && row_bucket(bucket) == bucket, "{rows} rows in a bucket of {bucket}");
            assert!(bucket <= row_bucket(rows + 1), "{rows} rows in a bucket of {bucket}");
            assert_eq!(Choice::of(bucket), Choice::of(rows), "{rows} rows in a bucket of {bucket}");
        }
    }

    /// The buckets that recorded graphs and profiles rely on.
    #[test]
    fn buckets_of_some_numbers_of_rows() {
        let rows = [0, 1, 3, 4, 5, 8, 9, 65, 128, 129, 192, 193, 257, 385, 1000];
        let want = [0, 1, 3, 4, 8, 8, 16, 128, 128, 192, 192, 256, 384, 512, 1024];
        assert_eq!(rows.map(row_bucket), want);
    }
}
