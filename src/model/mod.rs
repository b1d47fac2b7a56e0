//! Loads a model file into sizes ([`ModelSpec`]) and named zero-copy weights ([`Weights`]).
//!
//! [`load()`] is the entry point: it takes a `.gguf` file, a Hugging Face folder, or `synth:NAME` for random weights.
//! The model that it returns has been checked: every tensor that the sizes require is present in the right shape.
//!
//! | offered | what |
//! |---|---|
//! | [`load()`], [`from_gguf`], [`LoadedModel`], [`TextSource`], [`Weights`] | a model that can be run |
//! | [`ModelSpec`], [`Ffn`], [`Norm`], [`Position`], [`Rope`], [`RopePairing`], [`RopeScaling`] | its sizes,
//! independent of the file format |
//! | [`Block`], [`MatrixSpec`], [`NormSpec`], [`tensor_name`] | the tensors of a block, by name |
//! | [`SamplingDefaults`], [`TEMPERATURE_RANGE`], [`TOP_P_RANGE`], [`MIN_P_RANGE`], [`REPEAT_PENALTY_RANGE`] | sampling
//! settings that its files recommend |
//! | [`validate`], [`wanted_tensors`], [`describe()`], [`Description`] | required tensors, and existing ones |
//! | [`FAMILIES`], [`Family`], [`hf_spec`] | the families, and the family of a `config.json` |
//! | [`export_gguf`], [`export_hf_folder`] | writing a loaded model to files |
//! | [`formats`] | GGUF and safetensors, independent of their meaning for a model |
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
