//! Requests: many at a time, each as if it were alone.

mod accepted;
mod answers;
mod emulated;
mod faults;
mod lifecycle;
mod numbers;
mod prefixes;
mod random;
mod scores;
mod service;
mod streamed;
mod world;
