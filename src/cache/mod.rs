//! Keys and values in pages.
//!
//! A page holds [`PAGE_TOKENS`] tokens of one layer, for all KV heads. Per KV head its layout is the
//! one that dot-product instructions (vdpbf16ps, AMX tiles) read without a shuffle:
//!
//! * K: `[token/16][head_dim/2][16 tokens][2 dims]`, so a 64-byte line is one pair of dims of 16 tokens;
//! * V: `[token/2][head_dim][2 tokens]`, so a 64-byte line is 16 dims of a pair of tokens.

/// Tokens per page.
pub const PAGE_TOKENS: usize = 32;

/// Storage type of keys and values (both are 16 bits wide).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDType {
    /// bfloat16 (default: dot-product instructions read it directly).
    BF16,
    /// IEEE half.
    F16,
}
