//! Launching `cuda/attention_prefill.cu`.

use super::super::abi::{PREFILL_QUERIES, PrefillAttentionParams};
use super::AttentionShape;
use crate::Result;
use crate::device::accelerator::PartialRows;
use crate::device::runtime::{DevPtr, Lane, Launch, Params, Runtime};

const THREADS: u32 = 128;

/// Shared memory of a block; mirrors `Tile<D>` of the kernel.
fn shared_bytes(head_dim: usize, sm: u32) -> u32 {
    let (keys, stages, queries) = match head_dim {
        0..=96 => (64, 4, 0),
        97..=128 => (64, 3, 0),
        _ => (32, if sm >= 80 { 3 } else { 2 }, PREFILL_QUERIES as usize),
    };
    ((queries + stages * keys) * head_dim * 2) as u32
}

/// Operands of [`prefill_attention`].
#[derive(Debug, Clone, Copy)]
pub struct PrefillAttention {
    /// Queries after RoPE, `[rows][n_heads · head_dim]`.
    pub q: DevPtr,
    /// The layer's pages, the rows' own keys and values included.
    pub kv: DevPtr,
    /// u32 page numbers of all sequences.
    pub page_table: DevPtr,
    /// [`super::Plan::prefill`].
    pub items: DevPtr,
    /// u32: how many items there are.
    pub n_items: DevPtr,
    /// Upper bound of it, for the grid: exact, unless the launch is captured.
    pub max_items: usize,
    /// The window that the plan was made with.
    pub window: Option<u32>,
    /// Final rows.
    pub out: DevPtr,
    /// Partial rows, if any item has them.
    pub partial: PartialRows,
}

/// Attention of several rows of a sequence.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn prefill_attention(
    runtime: &dyn Runtime,
    lane: Lane,
    shape: &AttentionShape,
    args: &PrefillAttention,
) -> Result<()> {
    if args.max_items == 0 {
        return Ok(());
    }
    let params = PrefillAttentionParams {
        q: args.q,
        kv: args.kv,
        page_table: args.page_table,
        items: args.items,
        n_items: args.n_items,
        out: args.out,
        part_m: args.partial.m,
        part_s: args.partial.s,
        part_o: args.partial.o,
        n_heads: shape.n_heads as u32,
        n_kv_heads: shape.n_kv_heads as u32,
        out_type: shape.out_type(),
        window: args.window.unwrap_or(0),
        scale_log2: shape.scale_log2(),
        ..Default::default()
    };
    runtime.launch(
        lane,
        &Launch {
            kernel: &shape.prefill_kernel(),
            grid: [(args.max_items * shape.n_heads) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared: shared_bytes(shape.head_dim, runtime.info().sm),
            params: params.bytes(),
        },
    )
}
