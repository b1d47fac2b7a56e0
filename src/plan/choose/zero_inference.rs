//! DeepSpeed ZeRO-Inference: every block streamed ahead from pinned memory, keys and values on the GPU.

use super::planner::{CandidateDraft, Planner};
use super::streamed::{HEAD_ON_GPU, ON_GPU, streamed};
use super::{Candidate, Strategy};
use crate::program::Staging;

pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    let placement = streamed(planner, ON_GPU, HEAD_ON_GPU, Staging::Ahead, |_| false);
    let chunk = planner.best_chunk(&placement);
    let draft = CandidateDraft::new(placement, chunk, "weights streamed for every step");
    planner.fastest(vec![draft], Strategy::ZeroInference)
}
