//! Naive, safe, obviously right: the lowest tier and the oracle of every kernel.

pub mod activation;
pub mod convert;
pub mod norm;
pub mod reduce;
pub mod rope;
pub mod softmax;
