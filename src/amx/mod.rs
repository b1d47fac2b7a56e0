//! AMX tile kernels.
