//! Keys and values in pages.
//!
//! A page holds [`PAGE_TOKENS`] tokens of one layer, for all KV heads. Per KV head its layout is the
//! one that dot-product instructions (vdpbf16ps, AMX tiles) read without a shuffle:
//!
//! * K: `[token/16][head_dim/2][16 tokens][2 dims]`, so a 64-byte line is one pair of dims of 16 tokens;
//! * V: `[token/2][head_dim][2 tokens]`, so a 64-byte line is 16 dims of a pair of tokens.
//!
//! Elements are as wide as the [`KvType`] says. Codes of 8 bits lie in the same order (32 bytes are what a line is above), and a
//! scale for each token follows K, and V: f32 `[32 tokens]`.
//!
//! [`PagePool`] owns the memory and the [`PageList`] of free ones ([`PageContent`] finds those whose content is still of use),
//! [`BlockTable`] lists the pages of one sequence,
//! [`SplitTable`] those of one whose older tokens are on the host and whose newer ones are on a device,
//! [`LayerKv`] is the view of one layer that kernels read and appends write, and [`SeqRows`] names
//! the rows of a step that belong to one sequence.

mod geometry;
mod kv_type;
mod layer;
mod pages;
mod pool;
mod rows;
mod split;
mod table;

pub use geometry::KvGeometry;
pub use kv_type::{KvType, quantise_head};
pub use layer::{KvElement, LayerKv};
pub use pages::{PageContent, PageList};
pub use pool::{HUGE_FROM, PagePool};
pub use rows::SeqRows;
pub use split::{PageCopy, SplitTable};
pub use table::BlockTable;

/// Tokens per page.
pub const PAGE_TOKENS: usize = 32;
