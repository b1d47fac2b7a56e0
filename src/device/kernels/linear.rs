//! Launching of `cuda/` linear kernels.
