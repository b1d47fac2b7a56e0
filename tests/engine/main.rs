//! The engine: its host's half, its promise of the same bits, many requests at a time and in any order.

mod host_sublayers;
mod interleave;
mod interleavings;
#[cfg(tandem_kernels)]
mod on_a_device;
mod requests;
mod same_bits;
#[cfg(tandem_kernels)]
mod stand_in;
#[path = "../support/mod.rs"]
mod support;
mod weights_node;
