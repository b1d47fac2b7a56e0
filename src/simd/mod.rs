//! SIMD kernels: capabilities, dispatch table, AVX2 and AVX-512 tiers.

pub mod attention;
mod caps;

pub use caps::{Caps, Isa};
