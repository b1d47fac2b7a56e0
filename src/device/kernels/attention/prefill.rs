//! Launching `cuda/attention_prefill.cu` and `cuda/attention_prefill_sm90a.cu`.

use super::super::abi::{
    KV_PAGE_TOKENS, PREFILL_QUERIES, PREFILL_QUERIES_SM90A, PrefillAttentionParams,
    PrefillAttentionTmaParams, TensorMap,
};
use super::AttentionShape;
use crate::Result;
use crate::device::accelerator::PartialRows;
use crate::device::runtime::{DevPtr, Lane, Launch, Params, Runtime};

/// Columns of a shared-memory tile that wgmma reads: 128 bytes.
const TMA_COLUMNS: usize = 64;

/// The prefill kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefillKernel {
    /// Tensor-core products by warps (mma), on any device.
    Mma,
    /// Warpgroup products (wgmma), with pages loaded by bulk tensor copies; sm_90 only.
    Wgmma,
}

impl PrefillKernel {
    /// The kernels that can run here, the fastest last.
    pub fn available(runtime: &dyn Runtime, shape: &AttentionShape) -> Vec<PrefillKernel> {
        [PrefillKernel::Mma, PrefillKernel::Wgmma].into_iter().filter(|k| k.can_run(runtime, shape)).collect()
    }

    /// The kernel to use: a function of the device and the model alone.
    pub fn best(runtime: &dyn Runtime, shape: &AttentionShape) -> PrefillKernel {
        if PrefillKernel::Wgmma.can_run(runtime, shape) { PrefillKernel::Wgmma } else { PrefillKernel::Mma }
    }

    /// Most queries of an item.
    pub fn queries(self) -> u32 {
        match self {
            PrefillKernel::Mma => PREFILL_QUERIES,
            PrefillKernel::Wgmma => PREFILL_QUERIES_SM90A,
        }
    }

    fn can_run(self, runtime: &dyn Runtime, shape: &AttentionShape) -> bool {
        // Code compiled for 90a runs on 9.0 and on no later device.
        (self == PrefillKernel::Mma || runtime.info().sm == 90) && runtime.has_kernel(&self.name(shape))
    }

    /// The kernel's name in `cuda/`.
    pub fn name(self, shape: &AttentionShape) -> String {
        let suffix = if self == PrefillKernel::Wgmma { "_sm90a" } else { "" };
        format!("prefill_attention_{}_d{}{suffix}", shape.kv.name(), shape.head_dim)
    }

    fn threads(self) -> u32 {
        match self {
            PrefillKernel::Mma => 128,
            PrefillKernel::Wgmma => 384,
        }
    }

    /// Shared memory of a block; mirrors `Tile` of the kernels.
    fn shared_bytes(self, shape: &AttentionShape, sm: u32) -> u32 {
        // Queries that lie there beside the tiles of keys and values, and these tiles.
        let (queries, tiles, keys) = match (self, shape.head_dim) {
            (PrefillKernel::Mma, 0..=96) => (0, 4, 64),
            (PrefillKernel::Mma, 97..=128) => (0, 3, 64),
            (PrefillKernel::Mma, _) => (PREFILL_QUERIES as usize, if sm >= 80 { 3 } else { 2 }, 32),
            (PrefillKernel::Wgmma, 0..=128) => (PREFILL_QUERIES_SM90A as usize, 4, 128),
            (PrefillKernel::Wgmma, _) => (PREFILL_QUERIES_SM90A as usize, 4, 64),
        };
        let barriers = if self == PrefillKernel::Wgmma { 4 * 16 } else { 0 };
        let scales = if shape.kv.is_scaled() { 2 * size_of::<f32>() } else { 0 };
        let token = shape.head_dim * shape.kv.element() + scales;
        (queries * shape.head_dim * 2 + tiles * keys * token + barriers) as u32
    }
}

/// Operands of [`prefill_attention`].
#[derive(Debug, Clone, Copy)]
pub struct PrefillAttention {
    /// The kernel; the plan was made for its [`PrefillKernel::queries`].
    pub kernel: PrefillKernel,
    /// Queries after RoPE, `[rows][n_heads · head_dim]`.
    pub q: DevPtr,
    /// The layer's pages, the rows' own keys and values included.
    pub kv: DevPtr,
    /// How many pages there are at `kv`.
    pub n_pages: usize,
    /// u32 page numbers of all sequences.
    pub page_table: DevPtr,
    /// [`super::AttentionPlan::prefill`].
    pub items: DevPtr,
    /// u32: how many items there are.
    pub n_items: DevPtr,
    /// Upper bound of the number of items, which sets the grid; exact unless the launch is captured.
    pub max_items: usize,
    /// The window that the plan was made with.
    pub window: Option<u32>,
    /// f32 `[n_heads]`: the sinks, which join the sums of final rows; NULL: none.
    pub sinks: DevPtr,
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
    let [cap_span, cap_slope] = shape.score_cap();
    let params = PrefillAttentionParams {
        q: args.q,
        kv: args.kv,
        page_table: args.page_table,
        items: args.items,
        n_items: args.n_items,
        sinks: args.sinks,
        out: args.out,
        part_m: args.partial.m,
        part_s: args.partial.s,
        part_o: args.partial.o,
        n_heads: shape.n_heads as u32,
        n_kv_heads: shape.n_kv_heads as u32,
        out_type: shape.out_type(),
        window: args.window.unwrap_or(0),
        scale_log2: shape.scale_log2(),
        cap_span,
        cap_slope,
        ..Default::default()
    };
    let launch = |params: &[u8]| {
        runtime.launch(
            lane,
            &Launch {
                kernel: &args.kernel.name(shape),
                grid: [(args.max_items * shape.n_heads) as u32, 1, 1],
                block: [args.kernel.threads(), 1, 1],
                shared: args.kernel.shared_bytes(shape, runtime.info().sm),
                params,
            },
        )
    };
    match args.kernel {
        PrefillKernel::Mma => launch(params.bytes()),
        PrefillKernel::Wgmma => {
            let rows = (args.n_pages * shape.n_kv_heads * 2 * KV_PAGE_TOKENS as usize) as u64;
            let columns = shape.head_dim as u64;
            let kv =
                runtime.tensor_map_2d(args.kv, rows, columns, columns, KV_PAGE_TOKENS, TMA_COLUMNS as u32)?;
            launch(
                PrefillAttentionTmaParams {
                    attention: params,
                    kv: TensorMap { bytes: kv },
                    ..Default::default()
                }
                .bytes(),
            )
        }
    }
}
