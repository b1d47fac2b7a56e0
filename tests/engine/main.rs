//! The engine: its host's half, its promise of the same bits, many requests at a time and in any order.

mod host_sublayers;
mod interleave;
mod interleavings;
mod requests;
mod same_bits;
#[path = "../support/mod.rs"]
mod support;
mod weights_node;
