//! Attention over paged keys and values: decode and prefill by one algorithm, in every tier.
//!
//!   out = Σ_t softmax(cap(scale·q·k_t)) v_t      over the tokens that the row may see; cap(e) = e, or c·tanh(e/c)
//!
//! A model may have a sink in each head, a logit e_0 that takes part in the softmax and has no value: the sum gets another
//! exp(e_0). It joins where a row is normalised ([`AttnOut::WithSinks`]), so no kernel knows of it.
//!
//! Planning and running are split: [`AttnPlan::new`] turns the sequences of a step into work items once,
//! [`AttnPlan::run`] executes them for each layer.
//!
//! A plan may bound the tokens that a sequence attends ([`AttnRows::tokens`]). If the others are attended elsewhere,
//! its rows give partial results ([`Partial`], written to any place that the caller chooses), which are merged with the
//! rest.
//!
//! * A **row** is a (position, query head). The rows of an item share a KV head: positions x the heads of a
//!   query group, so each line of the cache is loaded once for all of them.
//! * An item has one **row block** of up to 32 rows, or, of a prompt, up to eight, which follow each other over the same tokens
//!   while these are in the core's cache.
//! * Tokens are processed in **blocks** of 64 by three kernels (`kernels.rs`): scores, online softmax, values; a
//!   fourth caps the scores of models that want it.
//! * Blocks belong to **segments** of [`SEGMENT`] tokens, at multiples of it. Each segment starts from zero and gives
//!   (m, s, o); segments are merged in order. If there are too few items to keep the threads busy, the segments of a
//!   row go to different threads (flash-decoding), and the thread that finishes last merges them, in the same order.
//!
//! Partial results (m, s, o) are sums over the segments so far. So tokens that are attended in two places and merged
//! (first those before a page, then the segments from that page on one by one) give the same bits as in one place, if
//! the page begins a segment. With segments of one page ([`AttnPlan::in_segments_of`]) every page does. Deterministic
//! mode uses these; they cost a merge per page, and room for as many results where a row is split over threads.
//!
//! So the bits of a row depend on its q, its tokens and the tier alone, not on the batch, the number of threads, the
//! chunking of a prompt, or whether the row is prefill or decode.
//!
//! refs: Milakov & Gimelshein 2018 (online softmax); Dao 2022, 2023 (FlashAttention, flash-decoding);
//! Jiang et al. 2024 (NEO, §4).

mod execute;
mod item;
pub(crate) mod kernels;
mod partial;
mod plan;
mod scratch;
mod shape;
mod share;
mod tiers;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx_run;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod f32_body;
#[cfg(target_arch = "x86_64")]
mod vector;

pub use partial::{AttnOut, Partial, PartialMut, merge_partials};
pub use plan::{AttnPlan, AttnRows};
pub use shape::AttnShape;

pub use crate::cache::SeqRows;

/// Tokens per segment: the unit in which a row is split across threads, and in which it is summed.
pub const SEGMENT: usize = 512;
