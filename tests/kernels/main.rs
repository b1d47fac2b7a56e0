//! The CPU's kernels, every tier against the reference.

mod attention;
mod elementwise;
mod experts;
mod linear;
mod quantise;
