//! Naive, safe, obviously right: the lowest tier and the oracle of every kernel. Its modules are public: tests take oracles one
//! by one. Of experts, [`route`] and [`mix`].

pub mod activation;
pub mod attention;
pub mod convert;
pub mod dequant;
pub mod embed;
mod experts;
pub mod linear;
pub mod norm;
pub mod quantise;
pub mod reduce;
pub mod rope;
pub mod softmax;

pub use experts::{mix, route};
