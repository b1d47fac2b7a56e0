//! What other systems do, as placements: each is as good as its own rules make it.
//!
//! | strategy | on the GPU | the other blocks | keys and values | on the CPU |
//! |---|---|---|---|---|
//! | `greedy` | as many units as fit | computed by the CPU | beside their blocks | these blocks |
//! | `accelerate` | as many blocks as fit | copied from pageable memory, each waited for | GPU | nothing |
//! | `flexgen` | a share of the blocks, searched | streamed ahead from pinned memory | either side | attention, if that is faster |
//! | `zero-inference` | nothing | streamed ahead from pinned memory | GPU | nothing |
//! | `stream` | nothing | streamed ahead from pinned memory | either side | attention, if that is faster |
//!
//! `greedy` is llama.cpp's `--n-gpu-layers` at its best value. Accelerate's `device_map="auto"` gives modules to the GPU in their order,
//! embedding first, and its hooks copy the others before their forward; here the head is on the GPU, too, and as many blocks fewer:
//! the bytes that cross the link are the same. FlexGen splits every tensor by its percentages; here whole blocks are resident, at the
//! front or spread evenly, which loads the link as evenly. Its zig-zag order over GPU batches is what a step of all sequences is.

use super::planner::{CandidateDraft, ENDS, Ends, Planner};
use super::request::MIN_CHUNK;
use super::{Candidate, Strategy};
use crate::plan::search::most as most_that_fit;
use crate::program::{COPY_LANE_ROWS, LayerPlacement, Placement, Policy, Residence, Side, Staging};

/// Placements whose programs are run.
const FEW: usize = 3;

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

pub(super) fn greedy(planner: &Planner<'_>) -> Candidate {
    let mut draft = filled(planner);
    if planner.hardware.accelerator.is_none() {
        draft.reason = "no GPU to fill: everything on the CPU".into();
    }
    planner.fastest(vec![draft], Strategy::Greedy)
}

/// Where keys and values are, and who attends them in decode.
#[derive(Clone, Copy)]
struct Way {
    kv: Side,
    decode: Policy,
    says: &'static str,
}

/// A table that only looks up rows stays where it is.
const HEAD_ON_GPU: Ends = [Side::Host, Side::Device];

const ON_GPU: Way = Way { kv: Side::Device, decode: Policy::all(Side::Device), says: "" };

const WAYS: [Way; 3] = [
    ON_GPU,
    Way { kv: Side::Host, decode: Policy::ATTENTION_ON_HOST, says: ", decode attention on the CPU" },
    Way { kv: Side::Host, decode: Policy::all(Side::Device), says: ", keys and values streamed, too" },
];

/// Blocks `resident` on the GPU, the others streamed.
fn streamed(
    planner: &Planner<'_>,
    way: Way,
    [embedding, head]: Ends,
    staging: Staging,
    resident: impl Fn(usize) -> bool,
) -> Placement {
    let weights = |layer| if resident(layer) { Residence::Device } else { Residence::Streamed };
    let layer = |l| LayerPlacement {
        weights: weights(l),
        prefill: Policy::all(Side::Device),
        decode: way.decode,
        kv: way.kv,
        device_experts: 0,
    };
    let device_pages = if way.kv == Side::Device { planner.device_pages() } else { 0 };
    let leave = way.kv == Side::Device && device_pages < planner.pages();
    Placement {
        embedding,
        layers: (0..planner.sizes.layers()).map(layer).collect(),
        head,
        device_pages,
        host_pages: if way.kv == Side::Host || leave { planner.pages() } else { 0 },
        windows: Vec::new(),
        staging,
        copy_lane_rows: COPY_LANE_ROWS,
        stream_rows: 0,
    }
}

/// The most blocks on the GPU with which `place` fits, if it does: the more there are the less is on the host.
fn most(planner: &Planner<'_>, chunk: u64, place: impl Fn(usize) -> Placement) -> Option<usize> {
    let layers = planner.sizes.layers();
    let gpu = |n: usize| {
        let gpu = planner.memory(&place(n), chunk).gpu;
        gpu.total <= gpu.available
    };
    planner.hardware.accelerator.as_ref()?;
    // Without streamed blocks there is no staging buffer: all may fit where one fewer does not.
    let found = if gpu(layers) { layers } else { most_that_fit(layers.saturating_sub(1), gpu) };
    planner.memory(&place(found), chunk).fits().then_some(found)
}

/// See the [module](self). Prompts are one forward, however long, if their rows fit.
pub(super) fn accelerate(planner: &Planner<'_>) -> Candidate {
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

/// See the [module](self).
pub(super) fn flexgen(planner: &Planner<'_>) -> Candidate {
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

/// See the [module](self).
pub(super) fn zero_inference(planner: &Planner<'_>) -> Candidate {
    let placement = streamed(planner, ON_GPU, HEAD_ON_GPU, Staging::Ahead, |_| false);
    let chunk = planner.best_chunk(&placement);
    let draft = CandidateDraft::new(placement, chunk, "weights streamed for every step");
    planner.fastest(vec![draft], Strategy::ZeroInference)
}

/// The fastest way that fits.
pub(super) fn stream(planner: &Planner<'_>) -> Candidate {
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
