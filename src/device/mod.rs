//! Where work runs: the host thread pool; accelerators come later.

pub mod host;
