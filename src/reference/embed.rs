//! One row of an embedding table.

use super::dequant::dequantise_row;
use crate::tensor::DType;

/// `out = scale·row`, decoded from any dtype.
pub fn embed_row(dtype: DType, row: &[u8], scale: f32, out: &mut [f32]) {
    dequantise_row(dtype, row, out);
    out.iter_mut().for_each(|x| *x *= scale);
}
