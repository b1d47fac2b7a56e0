//! Dtypes, quantised block formats and shared byte buffers: what every other room speaks.
//!
//! | item | what |
//! |---|---|
//! | [`DType`], [`Half`], [`bf16_bits`] | element types |
//! | [`Bytes`], [`Tensor`] | shared bytes, and a view of them with a shape |
//! | [`Rows`], [`RowsMut`] | rows of f32 with a stride |
//! | [`quantise_row`] | quantises a row of floats |

mod bytes;
mod dtype;
mod half;
mod quant;
mod rows;
mod view;

pub use self::half::{Half, bf16_bits};
pub use bytes::Bytes;
pub use dtype::DType;
pub(crate) use quant::pack_scales_mins;
pub use quant::quantise_row;
pub use rows::{Rows, RowsMut};
pub use view::Tensor;
