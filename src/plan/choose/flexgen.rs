//! FlexGen: a share of the blocks on the GPU, searched, the others streamed ahead from pinned memory; keys and values, and attention, on
//! either side.
//!
//! FlexGen splits every tensor by its percentages; here whole blocks are resident, at the front or spread evenly, which loads the link as
//! evenly. Its zig-zag order over GPU batches is what a step of all sequences is.

use super::planner::{CandidateDraft, Planner};
use super::streamed::{FEW, HEAD_ON_GPU, ON_GPU, WAYS, Way, most, streamed};
use super::{Candidate, Strategy};
use crate::program::Staging;

/// The fastest share that fits.
pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    let layers = planner.sizes.layers();
    let place = |way, n: usize| streamed(planner, way, HEAD_ON_GPU, Staging::Ahead, |l| l < n);
    let mut found: Vec<(f64, Way, usize, u64)> = Vec::new();
    for way in WAYS {
        for chunk in planner.chunks() {
            let Some(n) = most(planner, chunk, |n| place(way, n)) else { continue };
            found.push((planner.total(&place(way, n), chunk), way, n, chunk));
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.truncate(FEW);
    if found.is_empty() {
        let chunk = planner.chunks()[0];
        return planner.candidate(Strategy::Flexgen, CandidateDraft::new(place(ON_GPU, 0), chunk, ""));
    }
    let mut drafts = Vec::new();
    for &(_, way, n, chunk) in &found {
        let share = format!("{n} of {layers} blocks on the GPU ({:.0}%)", 100.0 * n as f64 / layers as f64);
        let rest = if n < layers { ", the others streamed for every step" } else { "" };
        drafts.push(CandidateDraft::new(place(way, n), chunk, format!("{share}{rest}{}", way.says)));
        if n > 0 && n < layers {
            let evenly = |l| (l + 1) * n / layers > l * n / layers;
            let spread = streamed(planner, way, HEAD_ON_GPU, Staging::Ahead, evenly);
            let reason = format!("{share}, spread evenly{rest}{}", way.says);
            drafts.push(CandidateDraft::new(spread, chunk, reason));
        }
    }
    planner.fastest(drafts, Strategy::Flexgen)
}
