//! Dtypes, quantised block formats and shared byte buffers: what every other room speaks.

mod bytes;
mod dtype;
pub mod quant;
mod view;

pub use bytes::Bytes;
pub use dtype::DType;
pub use view::Tensor;
