//! What the kernels compute, on the host: plain functions from slices to slices.
//!
//! They round where the kernels round (activations, queries, keys, values), compute each row by itself, and
//! know nothing of lanes or addresses: `super::accelerator` gives them the bytes. [`cpu`] is the other arithmetic: the CPU's
//! own in deterministic mode, bit for bit.

pub mod attention;
pub mod cast;
pub mod cpu;
pub mod linear;
pub mod matrix;
pub mod norm;
pub mod pages;
pub mod qkv;
