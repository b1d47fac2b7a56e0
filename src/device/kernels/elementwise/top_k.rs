//! Launching `cuda/top_k.cu`.

use super::super::abi::{self, TOP_ROWS, TOP_WORDS, TopKParams};
use crate::Result;
use crate::device::accelerator::{TOP_BYTES, TOP_K};
use crate::device::runtime::{DevPtr, Lane, Runtime};

const _: () =
    assert!(TOP_K == abi::TOP_K as usize && TOP_BYTES == 4 * TOP_WORDS as usize, "as abi.h has them");

const THREADS: usize = 1024;
/// Keys that are sorted at most, and a sum of each warp.
const SHARED: usize = 2048 * 8 + 32 * 4;

/// Operands of [`logits_top_k`].
#[derive(Debug, Clone, Copy)]
pub struct TopK<'a> {
    /// f32 `[rows][ld]`.
    pub logits: DevPtr,
    /// `[rows]` times [`TOP_BYTES`].
    pub out: DevPtr,
    /// For each row, what differences to the largest logit are multiplied by in the sum of exponentials.
    pub factors: &'a [f32],
    /// Logits of a row.
    pub vocab: usize,
    /// Distance of rows.
    pub ld: usize,
}

/// Finds the [`TOP_K`] greatest logits of each row and Σ e^(factor·(x − max)).
///
/// # Errors
/// As [`Runtime::launch`].
///
/// # Panics
/// If rows are shorter than the vocabulary, or it is empty.
pub fn logits_top_k(runtime: &dyn Runtime, lane: Lane, args: &TopK<'_>) -> Result<()> {
    assert!(
        args.vocab > 0 && args.ld >= args.vocab,
        "top k: {} logits in rows {} apart",
        args.vocab,
        args.ld
    );
    for (i, factors) in args.factors.chunks(TOP_ROWS as usize).enumerate() {
        let first = i * TOP_ROWS as usize;
        let mut params = TopKParams {
            logits: args.logits.add(first * args.ld * 4),
            out: args.out.add(first * TOP_BYTES),
            vocab: args.vocab as u32,
            ld: args.ld as u32,
            ..Default::default()
        };
        params.factors[..factors.len()].copy_from_slice(factors);
        super::launch(runtime, lane, "logits_top_k", [factors.len(), 1], THREADS, SHARED, &params)?;
    }
    Ok(())
}
