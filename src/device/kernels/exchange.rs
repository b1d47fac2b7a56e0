//! Launching of `cuda/` exchange kernels.
