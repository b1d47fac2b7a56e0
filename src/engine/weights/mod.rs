//! A model's weights as an accelerator reads them.
//!
//! ```text
//! LayerLayout   what of a layer lies where in one contiguous image      ─ at(base) ─►  LayerWeights, for operations
//!     ├ Upload          images in the device's memory                    resident
//!     ├ ExpertImages    one expert of a layer                             exchanged while the model runs
//!     └ LayerImage      an image in pinned host memory ── LayerStream ─► staging buffers on the device   streamed
//! ```
//!
//! A layout is independent of the address: the same layer may be resident, staged, on the host, or several of these.
//! [`crate::model::Block`] lists the tensors; `matrix.rs` says which of them are multiplied together.

mod device;
mod experts;
mod layer;
mod matrix;
mod stream;

pub use device::{Upload, embedding_bytes, head_bytes, head_matrix_bytes, post_norm_bytes, table_bytes};
pub use experts::ExpertImages;
pub use layer::{LayerLayout, LayerSource};
pub use matrix::{activation_type, linear_shapes, separate_gate_up};
pub use stream::{LayerImage, LayerStream};
