//! Everything on the GPU.

use super::planner::{CandidateDraft, Planner};
use super::{Candidate, Strategy};
use crate::program::{Placement, Side};

pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    let placement = Placement::all(Side::Device, planner.sizes.layers(), planner.pages());
    let chunk = planner.best_chunk(&placement);
    let mut draft = CandidateDraft::new(placement, chunk, "everything on the GPU");
    draft.k = Some(0);
    planner.candidate(Strategy::GpuOnly, draft)
}
