//! llama.cpp's `--n-gpu-layers` at its best value: the GPU filled, the rest computed on the CPU.

use super::planner::{CandidateDraft, Planner};
use super::request::MIN_CHUNK;
use super::{Candidate, Strategy};
use crate::program::Placement;

pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    let mut draft = filled(planner);
    if planner.hardware.accelerator.is_none() {
        draft.reason = "no GPU to fill: everything on the CPU".into();
    }
    planner.fastest(vec![draft], Strategy::Greedy)
}

/// The GPU filled without a look at time. The ladder when not all fits: shorter prefill steps, then old keys and values on the
/// host, then blocks there. Steps are then as long as what is left allows. What the user set is not on the ladder: sequences and
/// context stay.
pub(super) fn filled(planner: &Planner<'_>) -> CandidateDraft {
    let (units, pages) = (planner.units(), planner.device_pages());
    let longest = planner.default_chunk();
    let shortest = planner.request.chunk.unwrap_or(MIN_CHUNK).min(longest);
    let at = |k: usize, device_pages: usize| {
        let all = planner.pages();
        let mut placement = Placement::boundary(k, planner.sizes.layers(), device_pages, all);
        if device_pages < all {
            placement.host_pages = all;
        }
        placement
    };
    // Half of the pages at least: beyond that every token waits for the link.
    let fewest = planner.bytes.fewest_pages(shortest);
    let kept = (4..8).rev().map(|eighths| pages * eighths / 8).filter(|&p| p >= fewest);
    let kept = kept.take_while(|_| planner.bytes.fixed_pages().is_none());
    let all = [(0, pages)].into_iter().chain(kept.map(|p| (0, p))).chain((1..=units).map(|k| (k, pages)));
    let usable = |k: usize| planner.hardware.accelerator.is_some() || k == units;
    let Some((k, device_pages)) =
        all.into_iter().find(|&(k, p)| usable(k) && planner.memory(&at(k, p), shortest).fits())
    else {
        // The candidate says what it lacks.
        return CandidateDraft { k: Some(units), ..CandidateDraft::new(at(units, pages), longest, "") };
    };
    let placement = at(k, device_pages);
    let mut halves = std::iter::successors(Some(longest), |c| (*c > shortest).then(|| (c / 2).max(shortest)));
    let chunk = halves.find(|&c| planner.memory(&placement, c).fits()).expect("the shortest fits");
    let mut rungs = Vec::new();
    if chunk < longest {
        rungs.push(format!("prefill steps of {chunk} rows"));
    }
    if device_pages < pages {
        rungs.push(format!("{} of {pages} KV pages on the host", pages - device_pages));
    }
    if k > 0 {
        rungs.push(format!("{k} of {units} units on the host"));
    }
    let reason = match k {
        0 if rungs.is_empty() => "everything on the GPU".to_owned(),
        k if k == units => "nothing fits the GPU: everything on the CPU".to_owned(),
        _ => format!("the GPU filled: {}", rungs.join(", ")),
    };
    CandidateDraft { k: Some(k), ..CandidateDraft::new(placement, chunk, reason) }
}
