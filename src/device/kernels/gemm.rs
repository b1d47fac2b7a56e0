//! Launching of `cuda/` gemm kernels.
