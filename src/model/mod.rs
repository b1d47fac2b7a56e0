//! From a model file to sizes ([`ModelSpec`]) and named zero-copy weights ([`Weights`]).
//!
//! [`load()`] is the front door: a `.gguf` file, a Hugging Face folder, or `synth:NAME` for random weights.
//! What it returns has been checked: every tensor that the sizes call for is there, in the right shape.
//!
//! | offered | what |
//! |---|---|
//! | [`load()`], [`from_gguf`], [`LoadedModel`], [`TextSource`], [`Weights`] | a model that can be run |
//! | [`ModelSpec`], [`Ffn`], [`Norm`], [`Position`], [`Rope`], [`RopePairing`], [`RopeScaling`] | its sizes, no format left |
//! | [`Block`], [`MatrixSpec`], [`NormSpec`], [`tensor_name`] | the tensors of a block, by name |
//! | [`SamplingDefaults`], [`TEMPERATURE_RANGE`], [`TOP_P_RANGE`], [`MIN_P_RANGE`], [`REPEAT_PENALTY_RANGE`] | how its files say to sample |
//! | [`validate`], [`wanted_tensors`], [`describe()`], [`Description`] | what has to be there, and what is |
//! | [`FAMILIES`], [`Family`], [`hf_spec`] | the kinds of models, and the one of a `config.json` |
//! | [`export_gguf`], [`export_hf_folder`] | a loaded model as files |
//! | [`formats`] | GGUF and safetensors, apart from what a model means by them |
//! | [`synth`] | models by name with random weights |

mod arch;
mod block;
mod check;
mod describe;
mod export;
pub mod formats;
mod hf;
mod load;
mod loaded;
mod sampling;
mod spec;
pub mod synth;
mod vectors;
mod weights;

pub use arch::{FAMILIES, Family};
pub use block::{Block, MatrixSpec, NormSpec, tensor_name};
pub use check::{validate, wanted_tensors};
pub use describe::{Description, describe};
pub use export::{export_gguf, export_hf_folder};
pub use hf::hf_spec;
pub use load::{from_gguf, load};
pub use loaded::{LoadedModel, TextSource};
pub use sampling::{MIN_P_RANGE, REPEAT_PENALTY_RANGE, SamplingDefaults, TEMPERATURE_RANGE, TOP_P_RANGE};
pub use spec::{Ffn, ModelSpec, Norm, Position, Rope, RopePairing, RopeScaling};
pub use weights::Weights;
