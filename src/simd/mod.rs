//! SIMD kernels: capabilities, dispatch table, AVX2 and AVX-512 tiers.
//!
//! An algorithm is written once, in `generic/`, over the `Simd` trait of `vector.rs`; `avx2/` and
//! `avx512/` implement the trait and run the algorithms. Callers use [`Kernels`] for small operations;
//! [`linear`] and [`attention`] plan their work and have their own entry points.

pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod caps;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // vectors use the constants
mod exp;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only tiers have vectors
mod generic;
pub mod linear;
mod table;
mod tiers;
pub mod tuning;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod vector;

pub use caps::{Caps, CpuId, Isa, Vendor};
pub use table::Kernels;
