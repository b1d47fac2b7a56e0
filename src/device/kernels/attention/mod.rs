//! Launching of `cuda/` attention kernels.
