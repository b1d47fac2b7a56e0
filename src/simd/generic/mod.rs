//! Kernels written once, over [`Simd`](super::vector::Simd): each a [`SimdOp`](super::vector::SimdOp), which the tiers run.

pub(crate) mod activation;
pub(crate) mod convert;
pub(crate) mod embed;
pub(crate) mod exp;
pub(crate) mod map;
pub(crate) mod norm;
pub(crate) mod reduce;
pub(crate) mod rope;
pub(crate) mod softmax;
