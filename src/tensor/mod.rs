//! Dtypes, quantised block formats and shared byte buffers: what every other room speaks.

mod bytes;
mod dtype;
mod half;
pub mod quant;
mod rows;
mod view;

pub use self::half::{Half, bf16_bits};
pub use bytes::Bytes;
pub use dtype::DType;
pub use rows::{Rows, RowsMut};
pub use view::Tensor;
