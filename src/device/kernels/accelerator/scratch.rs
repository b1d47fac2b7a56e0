//! Where the working memory of attention, logits and linear layers lies in the scratch memory.

use super::super::attention::{AttentionShape, Capacity, DecodeWorkspace};
use super::super::elementwise::logits_workspace_bytes;
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{Limits, Shape};
use crate::device::runtime::DevPtr;

/// Where the parts of the scratch memory begin: attention's workspace at 0, then that of the logits, then the scratch
/// that linear layers share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scratch {
    attention_rows: usize,
    attention_splits: usize,
    pub logits: usize,
    pub linear: usize,
}

impl Scratch {
    pub fn new(shape: &Shape, limits: &Limits) -> Scratch {
        let splits = attention_capacity(limits).splits;
        let bytes = DecodeWorkspace::bytes(&attention_shape(shape), limits.rows, splits);
        let logits = bytes.next_multiple_of(256);
        let linear =
            (logits + logits_workspace_bytes(limits.logit_rows, shape.vocab, 1)).next_multiple_of(256);
        Scratch { attention_rows: limits.rows, attention_splits: splits, logits, linear }
    }

    pub fn attention(&self, base: DevPtr, shape: &AttentionShape) -> DecodeWorkspace {
        DecodeWorkspace::at(base, shape, self.attention_rows, self.attention_splits)
    }
}

pub(super) fn attention_capacity(limits: &Limits) -> Capacity {
    Capacity::anywhere(limits.rows, limits.sequences, limits.pages_per_sequence * PAGE_TOKENS)
}

pub(super) fn attention_shape(shape: &Shape) -> AttentionShape {
    AttentionShape {
        n_heads: shape.n_heads,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
        scale: shape.attn_scale,
        softcap: shape.attn_softcap,
        kv: shape.kv,
        out: shape.act,
    }
}
