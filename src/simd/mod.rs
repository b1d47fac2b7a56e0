//! SIMD kernels: capabilities, dispatch table, AVX2 and AVX-512 tiers.

mod caps;
pub mod linear;

pub use caps::{Caps, Isa};
