//! Models back to files.
