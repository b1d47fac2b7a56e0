//! From a model file to sizes ([`ModelSpec`]) and named zero-copy weights ([`Weights`]).

pub mod arch;
pub mod formats;
pub mod spec;
pub mod synth;
mod weights;

pub use spec::ModelSpec;
pub use weights::Weights;
