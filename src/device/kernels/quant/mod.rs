//! Quantised weights: packed once on the host ([`pack()`]), multiplied as they are
//! ([`product::quant`](super::product::quant)), or decoded to 16 bits for the prefill GEMM ([`rows`](mod@rows)).
//!
//! Packing rounds nothing: the device holds the file's own integers and scales, in the order in which tensor cores read
//! them (`cuda/include/quant_tile.cuh`).

mod codes;
mod layout;
pub mod pack;
pub mod rows;

pub use layout::PackedLayout;
pub use pack::pack;
pub use rows::{GatherArgs, RowsArgs, gather, rows};
