//! Everything on the CPU.

use super::planner::{CandidateDraft, Planner};
use super::{Candidate, Strategy};
use crate::program::{Placement, Side};

pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    let placement = Placement::all(Side::Host, planner.sizes.layers(), planner.pages());
    let chunk = planner.best_chunk(&placement);
    let mut draft = CandidateDraft::new(placement, chunk, "everything on the CPU");
    draft.k = Some(planner.units());
    planner.candidate(Strategy::CpuOnly, draft)
}
