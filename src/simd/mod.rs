//! SIMD kernels: capabilities, dispatch table, AVX2 and AVX-512 tiers.
//!
//! An algorithm is written once, in `generic/`, over the [`vector::Simd`] trait; `avx2/` and `avx512/`
//! implement the trait and instantiate the algorithms. [`Kernels`] is what callers use.

pub mod attention;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod caps;
#[cfg(target_arch = "x86_64")]
mod generic;
pub mod linear;
mod rope_table;
mod table;
#[cfg(target_arch = "x86_64")]
pub(crate) mod vector;

pub use caps::{Caps, Isa};
pub use rope_table::RopeTable;
pub use table::Kernels;
