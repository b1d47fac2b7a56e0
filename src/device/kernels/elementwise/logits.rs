//! Launching `cuda/logits.cu`.

use super::super::abi::{LOGITS_MAX_K, LOGITS_SPAN, LogitsReduceParams, SoftcapParams};
use crate::Result;
use crate::device::runtime::{DevPtr, Lane, Runtime};

/// Warps of a first-stage block; each takes one span.
const SPAN_WARPS: usize = 4;
/// Most warps of a second-stage block: one warp must be able to take the candidates that they keep.
const MERGE_WARPS: usize = 16;
/// Candidates that a warp of the second stage takes at a time.
const MERGE_STEP: usize = (LOGITS_SPAN - LOGITS_MAX_K) as usize;

/// Operands of [`logits_reduce`]. Optional addresses may be NULL.
#[derive(Debug, Clone, Copy)]
pub struct LogitsReduce {
    /// f32 `[rows][ld]`.
    pub logits: DevPtr,
    /// [`logits_workspace_bytes`] of working memory, 16-byte aligned.
    pub workspace: DevPtr,
    /// u32 `[rows][k]`: indices of the greatest logits, in descending order.
    pub indices: DevPtr,
    /// f32 `[rows][k]`; optional.
    pub values: DevPtr,
    /// f32 `[rows]`: log Σ e^x; optional.
    pub logsumexp: DevPtr,
    /// Rows.
    pub rows: usize,
    /// Logits of a row.
    pub vocab: usize,
    /// Distance of rows.
    pub ld: usize,
    /// Number of logits to find per row; 1 is greedy decoding.
    pub k: usize,
}

fn spans(vocab: usize) -> usize {
    vocab.div_ceil(LOGITS_SPAN as usize)
}

/// Bytes of [`LogitsReduce::workspace`].
pub fn logits_workspace_bytes(rows: usize, vocab: usize, k: usize) -> usize {
    rows * spans(vocab) * (8 * k + 8)
}

/// Finds the `k` greatest logits of each row, among equals the lowest index first, and log Σ e^x. NaN ranks below
/// everything.
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If `k` is not in 1..=64 or exceeds the vocabulary.
pub fn logits_reduce(runtime: &dyn Runtime, lane: Lane, args: &LogitsReduce) -> Result<()> {
    assert!(
        (1..=args.vocab.min(LOGITS_MAX_K as usize)).contains(&args.k) && args.ld >= args.vocab,
        "logits: the {} greatest of {} in rows {} apart; wanted 1 to {LOGITS_MAX_K}",
        args.k,
        args.vocab,
        args.ld
    );
    let spans = spans(args.vocab);
    let params = LogitsReduceParams {
        logits: args.logits,
        keys: args.workspace,
        sums: args.workspace.add(args.rows * spans * args.k * 8),
        indices: args.indices,
        values: args.values,
        logsumexp: args.logsumexp,
        rows: args.rows as u32,
        vocab: args.vocab as u32,
        ld: args.ld as u32,
        spans: spans as u32,
        k: args.k as u32,
        ..Default::default()
    };
    let grid = [args.rows, spans.div_ceil(SPAN_WARPS)];
    super::launch(runtime, lane, "logits_spans", grid, 32 * SPAN_WARPS, 0, &params)?;
    let warps = (spans * args.k).div_ceil(MERGE_STEP).min(MERGE_WARPS);
    super::launch(runtime, lane, "logits_merge", [args.rows, 1], 32 * warps, warps * args.k * 8, &params)
}

/// logits = cap · tanh(logits / cap), in place.
///
/// # Errors
/// As [`Runtime::launch`].
pub fn softcap(
    runtime: &dyn Runtime,
    lane: Lane,
    logits: DevPtr,
    cap: f32,
    rows: usize,
    vocab: usize,
    ld: usize,
) -> Result<()> {
    assert!(ld >= vocab, "softcap: {vocab} logits in rows {ld} apart");
    let params = SoftcapParams { logits, rows: rows as u32, vocab: vocab as u32, ld: ld as u32, cap };
    super::launch(runtime, lane, "softcap", [rows, vocab.div_ceil(1024)], 256, 0, &params)
}
