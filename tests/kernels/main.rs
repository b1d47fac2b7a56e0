//! The CPU's kernels, every tier against the reference.

mod attention;
mod elementwise;
mod linear;
mod quantise;
