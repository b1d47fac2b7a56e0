//! Repacking and launching of quantised linear kernels.
