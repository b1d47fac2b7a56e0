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

use super::request::MIN_CHUNK;
use super::{Candidate, Draft, Planner, Strategy};
use crate::plan::memory::{Fitted, ladder};
use crate::program::{COPY_LANE_ROWS, LayerPlacement, Placement, Policy, Residence, Side, Staging};

/// Placements whose programs are run.
const FEW: usize = 3;

/// The GPU filled by the ladder of [`memory`](crate::plan::memory()): no time is looked at.
pub(super) fn filled(planner: &Planner<'_>) -> Draft {
    let (units, pages) = (planner.units(), planner.pages());
    let chunk = planner.request.default_chunk();
    let shortest = planner.request.chunk.unwrap_or(MIN_CHUNK);
    let at = |k: usize, device_pages: usize| {
        let mut placement = Placement::boundary(k, planner.sizes.layers(), device_pages, pages);
        if device_pages < pages {
            placement.host_pages = pages;
        }
        placement
    };
    match ladder(planner.sizes, &planner.request.load(chunk), planner.available, shortest) {
        // The candidate says what it lacks.
        Err(_) => Draft { k: Some(units), ..Draft::new(at(units, pages), chunk, "") },
        Ok(Fitted { k, chunk, device_pages, rungs }) => {
            let reason = match k {
                0 if rungs.is_empty() => "everything on the GPU".to_owned(),
                k if k == units => "nothing fits the GPU: everything on the CPU".to_owned(),
                _ => format!("the GPU filled: {}", rungs.join(", ")),
            };
            Draft { k: Some(k), ..Draft::new(at(k, device_pages as usize), chunk, reason) }
        }
    }
}

pub(super) fn greedy(planner: &Planner<'_>) -> Candidate {
    let mut draft = filled(planner);
    if planner.hardware.accelerator.is_none() {
        draft.reason = "no GPU to fill: everything on the CPU".into();
    }
    planner.candidate(Strategy::Greedy, draft)
}

/// Where keys and values are, and who attends them in decode.
#[derive(Clone, Copy)]
struct Way {
    kv: Side,
    decode: Policy,
    says: &'static str,
}

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
    staging: Staging,
    resident: impl Fn(usize) -> bool,
) -> Placement {
    let weights = |layer| if resident(layer) { Residence::Device } else { Residence::Streamed };
    let layer = |l| LayerPlacement {
        weights: weights(l),
        prefill: Policy::all(Side::Device),
        decode: way.decode,
        kv: way.kv,
    };
    let pages = |side| if way.kv == side { planner.pages() } else { 0 };
    Placement {
        embedding: Side::Host,
        layers: (0..planner.sizes.layers()).map(layer).collect(),
        head: Side::Device,
        device_pages: pages(Side::Device),
        host_pages: pages(Side::Host),
        windows: Vec::new(),
        staging,
        copy_lane_rows: COPY_LANE_ROWS,
    }
}

/// The most blocks on the GPU with which `place` fits, if it does: the more there are the less is on the host.
fn most(planner: &Planner<'_>, chunk: u64, place: impl Fn(usize) -> Placement) -> Option<usize> {
    let layers = planner.sizes.layers();
    let gpu = |n: usize| {
        let gpu = planner.memory(&place(n), chunk).gpu;
        gpu.total <= gpu.available
    };
    let found = if planner.hardware.accelerator.is_none() {
        return None;
    } else if gpu(layers) {
        // Without streamed blocks there is no staging buffer.
        layers
    } else {
        let (mut low, mut high) = (0, layers);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if gpu(middle) { low = middle } else { high = middle }
        }
        low
    };
    planner.memory(&place(found), chunk).fits().then_some(found)
}

/// See the [module](self). Prompts are one forward, however long, if their rows fit.
pub(super) fn accelerate(planner: &Planner<'_>) -> Candidate {
    let layers = planner.sizes.layers();
    let place = |n: usize| Placement {
        // As with the others, a table that only looks up rows stays where it is if memory is short.
        embedding: Side::Device,
        ..streamed(planner, ON_GPU, Staging::Waited, |l| l < n)
    };
    let whole = planner.request.chunks().last().copied().unwrap_or(1);
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
    planner.candidate(Strategy::Accelerate, Draft::new(place(n), chunk, reason))
}

/// See the [module](self).
pub(super) fn flexgen(planner: &Planner<'_>) -> Candidate {
    let layers = planner.sizes.layers();
    let place = |way, n: usize| streamed(planner, way, Staging::Ahead, |l| l < n);
    let mut found: Vec<(f64, Way, usize, u64)> = Vec::new();
    for way in WAYS {
        for chunk in planner.request.chunks() {
            let Some(n) = most(planner, chunk, |n| place(way, n)) else { continue };
            found.push((planner.total(&place(way, n), chunk), way, n, chunk));
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.truncate(FEW);
    if found.is_empty() {
        let chunk = planner.request.chunks()[0];
        return planner.candidate(Strategy::Flexgen, Draft::new(place(ON_GPU, 0), chunk, ""));
    }
    let mut drafts = Vec::new();
    for &(_, way, n, chunk) in &found {
        let share = format!("{n} of {layers} blocks on the GPU ({:.0}%)", 100.0 * n as f64 / layers as f64);
        let rest = if n < layers { ", the others streamed for every step" } else { "" };
        drafts.push(Draft::new(place(way, n), chunk, format!("{share}{rest}{}", way.says)));
        if n > 0 && n < layers {
            let spread = streamed(planner, way, Staging::Ahead, |l| (l + 1) * n / layers > l * n / layers);
            let reason = format!("{share}, spread evenly{rest}{}", way.says);
            drafts.push(Draft::new(spread, chunk, reason));
        }
    }
    planner.fastest(drafts, Strategy::Flexgen)
}

/// See the [module](self).
pub(super) fn zero_inference(planner: &Planner<'_>) -> Candidate {
    let placement = streamed(planner, ON_GPU, Staging::Ahead, |_| false);
    let chunk = planner.best_chunk(&placement);
    planner
        .candidate(Strategy::ZeroInference, Draft::new(placement, chunk, "weights streamed for every step"))
}

/// The fastest way that fits.
pub(super) fn stream(planner: &Planner<'_>) -> Candidate {
    let draft = WAYS.into_iter().map(|way| {
        let placement = streamed(planner, way, Staging::Ahead, |_| false);
        let chunk = planner.best_chunk(&placement);
        Draft::new(placement, chunk, format!("weights streamed for every step{}", way.says))
    });
    planner.fastest(draft.collect(), Strategy::Stream)
}
