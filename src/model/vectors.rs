//! Converts one-dimensional tensors when a model is loaded.

use super::Weights;
use crate::Result;
use crate::tensor::{Bytes, DType, Tensor};

/// Converts norms and biases to f32. They are small, and every kernel takes them in f32.
pub(super) fn vectors_to_f32(tensors: impl Iterator<Item = (String, Tensor)>) -> Result<Weights> {
    let mut weights = Weights::default();
    for (name, t) in tensors {
        let t = if t.shape.len() == 1 && t.dtype != DType::F32 {
            f32_tensor(t.shape.clone(), &crate::reference::dequant::dequantise(&t))?
        } else {
            t
        };
        weights.insert(name, t);
    }
    Ok(weights)
}

/// An owned f32 tensor.
pub(super) fn f32_tensor(shape: Vec<usize>, values: &[f32]) -> Result<Tensor> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor::new(DType::F32, shape, Bytes::copy_of(&bytes))
}
