//! Hugging Face Accelerate: as many blocks on the GPU as fit, the others copied from pageable memory and waited for in each forward.
//!
//! `device_map="auto"` gives modules to the GPU in their order, embedding first, and hooks copy the others before their forward; here
//! the head is on the GPU, too, and as many blocks fewer: the bytes that cross the link are the same.

use super::planner::{CandidateDraft, ENDS, Planner};
use super::request::MIN_CHUNK;
use super::streamed::{ON_GPU, most, streamed};
use super::{Candidate, Strategy};
use crate::program::Staging;

/// Prompts are one forward, however long, if their rows fit.
pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    let layers = planner.sizes.layers();
    let place = |n: usize| streamed(planner, ON_GPU, ENDS[0], Staging::Waited, |l| l < n);
    let whole = planner.chunks().last().copied().unwrap_or(1);
    let shortest = planner.request.chunk.unwrap_or(MIN_CHUNK).min(whole);
    let halves = std::iter::successors(Some(whole), |&c| (c > shortest).then(|| (c / 2).max(shortest)));
    let fitting = |chunk| most(planner, chunk, place).map(|n| (n, chunk));
    let (n, chunk) = halves.into_iter().find_map(fitting).unwrap_or((0, shortest));
    let reason = match n {
        n if n == layers => "everything on the GPU".to_owned(),
        n => format!(
            "{n} of {layers} blocks on the GPU, the others copied there for every forward and waited for"
        ),
    };
    planner.fastest(vec![CandidateDraft::new(place(n), chunk, reason)], Strategy::Accelerate)
}
