//! From a model file to sizes ([`ModelSpec`]) and named zero-copy weights ([`Weights`]).
//!
//! [`load()`] is the front door: a `.gguf` file, a Hugging Face folder, or `synth:NAME` for random weights.
//! What it returns has been checked: every tensor that the sizes call for is there, in the right shape.

pub mod arch;
pub mod block;
mod check;
mod describe;
pub mod export;
pub mod formats;
pub mod hf;
mod load;
mod loaded;
pub mod sampling;
pub mod spec;
pub mod synth;
mod vectors;
mod weights;

pub use check::{validate, wanted_tensors};
pub use describe::{Description, describe};
pub use load::{from_gguf, load};
pub use loaded::{LoadedModel, TextSource};
pub use sampling::SamplingDefaults;
pub use spec::ModelSpec;
pub use weights::Weights;
