//! Dtypes, quantised block formats and shared byte buffers: what every other room speaks.
//!
//! | item | what |
//! |---|---|
//! | [`DType`], [`Half`], [`bf16_bits`] | element types |
//! | [`Bytes`], [`Tensor`] | shared bytes, and a view of them with a shape |
//! | [`Rows`], [`RowsMut`] | rows of f32 with a stride |
//! | [`formats`] | one file per quantised weight type |
//! | [`quantise_row`], [`set_scales`] | quantises a row of floats; makes numbers of random blocks |

mod bytes;
pub(crate) mod formats;
mod half;
mod rows;
mod view;

pub use self::half::{Half, bf16_bits};
pub use bytes::Bytes;
pub use formats::{DType, quantise_row, set_scales};
pub use rows::{Rows, RowsMut};
pub use view::Tensor;
