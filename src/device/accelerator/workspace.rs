//! Activations: the buffers that sublayers read and write.

use crate::device::runtime::DevPtr;

use super::exchange::PartialRows;

/// Addresses of the activations of up to [`Limits::rows`](super::Limits::rows) rows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Workspace {
    /// Residual stream, f32 `[rows][d]`.
    pub hidden: DevPtr,
    /// To be added to it, f32 `[rows][d]`.
    pub delta: DevPtr,
    /// Normed, act `[rows][d]`.
    pub x: DevPtr,
    /// f32 `[rows][qkv_dim]`.
    pub qkv: DevPtr,
    /// kv `[rows][q_dim]`.
    pub q: DevPtr,
    /// Attention's output, act `[rows][q_dim]`.
    pub attn: DevPtr,
    /// f32 `[rows][2 · d_ff]`, where gate and up cannot be fused; NULL if never.
    pub gate_up: DevPtr,
    /// act `[rows][d_ff]`.
    pub act: DevPtr,
    /// act `[logit_rows][d]`.
    pub head_x: DevPtr,
    /// f32 `[logit_rows][V]`.
    pub logits: DevPtr,
    /// u32 `[logit_rows]`.
    pub argmax: DevPtr,
    /// Partial attention of the rows with [`Attend::From`](super::Attend::From), in order; NULL where none ever has.
    pub partial: PartialRows,
    /// [`Accelerator::scratch_bytes`](super::Accelerator::scratch_bytes) of working memory, zeroed once.
    pub scratch: DevPtr,
}

/// What is still to be added to the residual stream before a norm: the last sublayer's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residual {
    /// Nothing (before the first sublayer).
    None,
    /// `delta`.
    Delta,
    /// `delta`, normed with these weights (f32 `[d]`) first.
    Normed(DevPtr),
}

impl Residual {
    /// `delta`, through `post` if that is not NULL.
    pub fn after(post: DevPtr) -> Residual {
        if post.is_null() { Residual::Delta } else { Residual::Normed(post) }
    }
}
