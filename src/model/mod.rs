//! Loads a model file into sizes ([`ModelSpec`]) and named zero-copy weights ([`Weights`]).
//!
//! [`load()`] is the entry point: it takes a `.gguf` file, a Hugging Face folder, or `synth:NAME` for random weights.
//! The model that it returns has been checked: every tensor that the sizes require is present in the right shape.
//!
//! | item | what |
//! |---|---|
//! | [`load()`], [`from_gguf`], [`LoadedModel`], [`TextSource`], [`Weights`] | a model ready to run |
//! | [`ModelSpec`], [`Experts`], [`RouterWeights`], [`Ffn`], [`Norm`], [`Position`], [`Rope`], [`RopePairing`], [`RopeScaling`], [`QueryScaling`] | its sizes, independent of the file format |
//! | [`route`] | which experts a router's logits choose |
//! | [`RouterProfile`], [`RouterCounts`] | how often each expert was chosen over a text, and what follows for the experts that rows read |
//! | [`Block`], [`FeedForward`], [`Mlp`], [`Mixture`], [`MatrixSpec`], [`Bias`], [`NormSpec`], [`tensor_name`], [`expert_tensor_name`] | the tensors of a block and their names |
//! | [`SamplingDefaults`], [`TEMPERATURE_RANGE`], [`TOP_P_RANGE`], [`MIN_P_RANGE`], [`REPEAT_PENALTY_RANGE`], [`PENALTY_RANGE`] | sampling settings from its files, and their valid ranges |
//! | [`validate`], [`wanted_tensors`], [`describe()`], [`Description`] | the tensors it must have, and the tensors it has |
//! | [`FAMILIES`], [`Family`], [`hf_spec`] | model families, and the one that a `config.json` names |
//! | [`export_gguf`], [`export_hf_folder`] | writes a loaded model to files |
//! | [`formats`] | GGUF and safetensors files |
//! | [`synth`] | models with random weights, by name |

mod arch;
mod block;
mod check;
mod describe;
mod experts;
mod export;
pub mod formats;
mod fused;
mod hf;
mod interleaved;
mod load;
mod loaded;
mod router;
mod router_profile;
mod sampling;
mod spec;
mod stacks;
pub mod synth;
mod vectors;
mod weights;

pub use arch::{FAMILIES, Family};
pub use block::{
    Bias, Block, FeedForward, MatrixSpec, Mixture, Mlp, NormSpec, expert_tensor_name, tensor_name,
};
pub use check::{validate, wanted_tensors};
pub use describe::{Description, describe};
pub(crate) use experts::{distinct, share_read};
pub use export::{export_gguf, export_hf_folder, export_split_gguf};
pub use hf::hf_spec;
pub use load::{from_gguf, load};
pub use loaded::{LoadedModel, TextSource};
pub use router::route;
pub use router_profile::{RouterCounts, RouterProfile};
pub use sampling::{
    MIN_P_RANGE, PENALTY_RANGE, REPEAT_PENALTY_RANGE, SamplingDefaults, TEMPERATURE_RANGE, TOP_P_RANGE,
};
pub use spec::{
    Experts, Ffn, ModelSpec, Norm, Position, QkNorm, QueryScaling, Rope, RopePairing, RopeScaling,
    RouterWeights,
};
pub use weights::Weights;
