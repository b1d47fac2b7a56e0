//! SIMD kernels: capabilities, dispatch table, AVX2 and AVX-512 tiers.

pub mod attention;
mod caps;
pub mod linear;
mod table;

pub use caps::{Caps, Isa};
pub use table::{Kernels, RopeTable};
