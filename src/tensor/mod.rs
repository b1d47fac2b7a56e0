//! Dtypes, quantised block formats and shared byte buffers: what every other room speaks.

mod bytes;
mod dtype;
pub mod quant;
mod rows;
mod view;

pub use bytes::Bytes;
pub use dtype::DType;
pub use rows::{Rows, RowsMut};
pub use view::Tensor;
