//! Naive, safe, obviously right: the lowest tier and the oracle of every kernel.

pub mod attention;
pub mod dequant;
pub mod linear;
