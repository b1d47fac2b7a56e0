//! Linear layers of quantised weights: packed once on the host ([`pack()`]), multiplied as they are ([`launch`]),
//! or decoded to 16 bits for the prefill GEMM.
//!
//! Nothing is rounded when a weight is packed: the device has the file's own integers and scales, in the order
//! in which tensor cores want them (`cuda/include/quant_tile.cuh`).

mod codes;
pub mod launch;
pub mod layout;
pub mod pack;

pub use launch::{
    GatherArgs, QuantLinearArgs, QuantPlan, RowsArgs, gather, linear, linear_as, rows, scratch_bytes,
};
pub use layout::PackedLayout;
pub use pack::pack;
