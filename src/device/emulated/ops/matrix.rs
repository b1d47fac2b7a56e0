//! A matrix in the device's memory.

use crate::tensor::DType;

/// A matrix stored row after row, as in its file.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    /// Storage type.
    pub dtype: DType,
    /// Columns.
    pub k: usize,
    /// Rows.
    pub data: &'a [u8],
    /// One element per row, or empty.
    pub bias: &'a [f32],
}

impl Matrix<'_> {
    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.k).expect("checked when packed")
    }

    /// Rows.
    pub fn n(&self) -> usize {
        self.data.len() / self.row_bytes()
    }
}
