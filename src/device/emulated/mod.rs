//! CPU threads in the role of an accelerator: a separate arena, truly asynchronous lanes, faults on demand.

#[cfg(tandem_emulation)]
pub mod ffi;
