//! Every block streamed ahead from pinned memory; keys and values, and attention, on either side.

use super::planner::{CandidateDraft, ENDS, Planner};
use super::streamed::{FEW, WAYS, streamed};
use super::{Candidate, Strategy};
use crate::program::{Side, Staging};

/// The fastest way that fits.
pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    let mut drafts: Vec<(f64, CandidateDraft)> = Vec::new();
    for way in WAYS {
        for ends in ENDS {
            let placement = streamed(planner, way, ends, Staging::Ahead, |_| false);
            let chunk = planner.best_chunk(&placement);
            let total = match planner.memory(&placement, chunk).fits() {
                true => planner.total(&placement, chunk),
                false => f64::INFINITY,
            };
            let head = if ends[1] == Side::Host { ", head on the CPU" } else { "" };
            let reason = format!("weights streamed for every step{}{head}", way.says);
            drafts.push((total, CandidateDraft::new(placement, chunk, reason)));
        }
    }
    if drafts.iter().any(|d| d.0.is_finite()) {
        drafts.sort_by(|a, b| a.0.total_cmp(&b.0));
        drafts.truncate(FEW);
    }
    planner.fastest(drafts.into_iter().map(|d| d.1).collect(), Strategy::Stream)
}
