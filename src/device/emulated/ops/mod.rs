//! The kernels' results on the host: plain functions from slices to slices.
//!
//! They round where the kernels round (activations, queries, keys, values), compute each row independently, and know
//! nothing of lanes or addresses: `super::accelerator` passes them the bytes. [`cpu`] is an alternative arithmetic: the
//! CPU's own in deterministic mode, bit for bit.

pub(super) mod attention;
pub(super) mod cast;
pub(super) mod cpu;
pub(super) mod linear;
pub(super) mod matrix;
pub(super) mod norm;
pub(super) mod pages;
pub(super) mod qkv;
