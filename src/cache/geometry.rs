//! The memory that a token's keys and values occupy.

use super::{KvType, PAGE_TOKENS};

/// Sizes that decide what a token's keys and values occupy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGeometry {
    /// Layers with their own keys and values.
    pub n_layers: usize,
    /// KV heads per layer.
    pub n_kv_heads: usize,
    /// Elements per head, a multiple of 16.
    pub head_dim: usize,
    /// Storage type.
    pub dtype: KvType,
}

impl KvGeometry {
    /// Bytes of one token's keys and values in one layer: 2·h_kv·2·d_h in 16 bits, 2·h_kv·(d_h + 4) in 8.
    pub const fn bytes_per_token_layer(&self) -> usize {
        2 * self.n_kv_heads * self.dtype.head_bytes(self.head_dim)
    }

    /// Bytes of one token's keys and values in all layers.
    pub const fn bytes_per_token(&self) -> usize {
        self.n_layers * self.bytes_per_token_layer()
    }

    /// Bytes of one page in all layers.
    pub const fn bytes_per_page(&self) -> usize {
        PAGE_TOKENS * self.bytes_per_token()
    }

    /// Pages that `tokens` tokens of one sequence need.
    pub const fn pages_for(tokens: usize) -> usize {
        tokens.div_ceil(PAGE_TOKENS)
    }
}
