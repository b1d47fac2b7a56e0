//! A named-by-its-owner tensor: dtype, shape, bytes.

use super::{Bytes, DType};
use crate::{Error, Result};

/// A row-major tensor view over shared bytes. The last dimension is contiguous (and blocked, for
/// quantised types): a weight of a linear layer is `[out_features, in_features]`.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Storage type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Exactly the bytes of the elements.
    pub data: Bytes,
}

impl Tensor {
    /// Checks that `data` is as long as `shape` and `dtype` imply.
    pub fn new(dtype: DType, shape: Vec<usize>, data: Bytes) -> Result<Tensor> {
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape[..shape.len().saturating_sub(1)].iter().try_fold(1usize, |a, &b| a.checked_mul(b));
        let want = rows.and_then(|r| dtype.row_bytes(cols)?.checked_mul(r));
        if want != Some(data.len()) {
            return Err(Error::format(
                "tensor",
                format!("{dtype} of shape {shape:?} needs {want:?} bytes, found {}", data.len()),
            ));
        }
        Ok(Tensor { dtype, shape, data })
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    /// The last (contiguous) dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.cols()).expect("checked in Tensor::new")
    }

    /// The bytes of row `r`.
    pub fn row(&self, r: usize) -> &[u8] {
        let b = self.row_bytes();
        &self.data[r * b..(r + 1) * b]
    }
}
