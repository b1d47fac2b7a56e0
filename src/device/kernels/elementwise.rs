//! Launching of `cuda/` elementwise kernels.
