//! HELM's candidate: boundary, prefill steps, and whether host blocks are streamed for prompts, searched together.
//!
//! ```text
//! units    embedding │ block 1 … block L │ head                 k = 0: GPU-only, k = L + 2: CPU-only
//! T(k)   = max(Σ T_cpu, k·δ_cpu) + max(Σ T_gpu, (N−k)·δ_gpu) + T_comm        T_comm = 0 if one side has all units
//! subject to the memory of each side (HELM §4.1)
//! ```
//! The search is exhaustive. Departures from the paper: all-CPU is a candidate; memory counts keys and values, activations,
//! staging and workspace ([`memory`](crate::plan::memory())); δ is a lower bound of a stage, since no additive δ fits the
//! paper's own table. With weights alone and slower memory on the CPU's side, the optimum is the smallest feasible k, which
//! greedy filling finds too. The search pays where the terms differ: keys and values against the room on each side, batches
//! that make CPU stages compute-bound, units of unequal size, prefill against decode (tests in `tests/plan/helm.rs`).
//!
//! Every unit is priced three times (on the CPU, on the GPU, streamed) for each length of step; a boundary is then two
//! sums. Keys and values that the GPU's pages cannot hold may stay on the host ([`Spilled`](super::Spilled)).

use super::greedy::filled;
use super::planner::{CandidateDraft, Planner};
use super::{Candidate, Strategy};
use crate::plan::cost::{Direction, Group};
use crate::plan::prefix::Prefix;
use crate::plan::price::{UnitTime, Workload, block, spilled_tokens, units};
use crate::program::{LayerPlacement, Phase, Placement, Policy, Residence, Side};

/// Host blocks compute prompts in place, or are streamed to the GPU for them.
fn boundary(planner: &Planner<'_>, k: usize, streams: bool, device_pages: u64) -> Placement {
    let pages = planner.pages();
    let mut placement = Placement::boundary(k, planner.sizes.layers(), device_pages as usize, pages);
    if device_pages < pages as u64 {
        placement.host_pages = pages;
    }
    if streams {
        for layer in placement.layers.iter_mut().filter(|l| l.weights == Residence::Host) {
            (layer.weights, layer.prefill) = (Residence::Streamed, Policy::all(Side::Device));
        }
    }
    placement
}

/// Prefix sums of the units' seconds on each side.
pub(super) struct SideSums {
    work: Workload,
    steps: u64,
    host: [Prefix; 2],
    device: [Prefix; 2],
    streamed: [Prefix; 2],
    /// Rows and logits carried to the GPU in prefill, logits carried to the host, a decode step's rows to the GPU.
    carry: [f64; 4],
    issue: (f64, f64),
}

impl SideSums {
    pub(super) fn new(planner: &Planner<'_>, chunk: u64) -> SideSums {
        let work = planner.request.work(chunk);
        let n = planner.units();
        let price = |placement: &Placement| units(planner.costs, planner.sizes, placement, &work).0;
        let sums = |units: &[UnitTime]| {
            [Prefix::new(units.iter().map(|u| u.prefill)), Prefix::new(units.iter().map(|u| u.step))]
        };
        let pages = planner.pages() as u64;
        let (host, device) =
            (price(&boundary(planner, n, false, pages)), price(&boundary(planner, 0, false, pages)));
        let streamed = price(&boundary(planner, n, true, pages));
        let steps = work.prefill_steps();
        let to = |direction, rows| planner.costs.transfer(direction, planner.sizes.hidden(rows));
        let logits = |group: &Group| if group.rows == work.prompt { group.sequences } else { 1 };
        let rows: f64 = steps.iter().map(|(c, g)| *c as f64 * to(Direction::ToDevice, g.total_rows())).sum();
        // Of a prompt in pieces only the last has logits.
        let ends = |direction| -> f64 {
            match work.chunk >= work.prompt {
                true => steps.iter().map(|(c, g)| *c as f64 * to(direction, logits(g))).sum(),
                false => work.batch as f64 * to(direction, 1),
            }
        };
        SideSums {
            work,
            steps: steps.iter().map(|(c, _)| c).sum(),
            host: sums(&host),
            device: sums(&device),
            streamed: sums(&streamed),
            carry: [
                rows,
                ends(Direction::ToDevice),
                ends(Direction::ToHost),
                to(Direction::ToDevice, work.batch),
            ],
            issue: (planner.costs.issue(Side::Host), planner.costs.issue(Side::Device)),
        }
    }

    /// Seconds of the run with boundary `k`, no keys or values spilled.
    pub(super) fn total(&self, k: usize, streams: bool) -> f64 {
        let n = self.host[0].len();
        let [rows, logits_down, logits_up, step] = self.carry;
        let (cpu_issue, gpu_issue) = self.issue;
        let steps = self.steps as f64;
        let stage = |sum: f64, units: usize, issue: f64| sum.max(units as f64 * issue);
        let gpu_prefill = stage(self.device[0].sum(k..n), n - k, steps * gpu_issue);
        let gpu_step = stage(self.device[1].sum(k..n), n - k, gpu_issue);
        let (prefill, decode) = match streams {
            false => (
                stage(self.host[0].sum(0..k), k, steps * cpu_issue),
                stage(self.host[1].sum(0..k), k, cpu_issue),
            ),
            true => {
                // Embedding, streamed blocks and head are stages of their own.
                let blocks = 1..k.clamp(1, n - 1);
                let ends = |sums: &Prefix, issue: f64| {
                    let one = |range: std::ops::Range<usize>| stage(sums.sum(range), 1, issue);
                    (if k > 0 { one(0..1) } else { 0.0 }) + (if k == n { one(n - 1..n) } else { 0.0 })
                };
                (
                    stage(self.streamed[0].sum(blocks.clone()), blocks.len(), steps * gpu_issue)
                        + ends(&self.host[0], steps * cpu_issue),
                    stage(self.streamed[1].sum(blocks.clone()), blocks.len(), cpu_issue)
                        + ends(&self.host[1], cpu_issue),
                )
            }
        };
        let crossing = match (k, streams) {
            (0, _) => 0.0,
            (k, true) => rows + if k == n { logits_up } else { 0.0 },
            (k, false) if k == n => 0.0,
            (k, false) if k == n - 1 => logits_down,
            _ => rows,
        };
        let link = if k == 0 || k == n { 0.0 } else { step };
        let gen_len = self.work.gen_len as f64;
        prefill + gpu_prefill + crossing + gen_len * (decode + gpu_step + link)
    }
}

/// What attention over spilled keys and values adds to the run, for boundary `k`.
fn spilled_seconds(planner: &Planner<'_>, k: usize, work: &Workload, device_pages: u64) -> f64 {
    let placement = boundary(planner, k, false, device_pages);
    let at = LayerPlacement::all(Side::Device);
    // Blocks with the same window cost the same.
    let mut counts: Vec<(Option<u64>, usize, usize)> = Vec::new();
    for (i, block) in planner.sizes.blocks.iter().enumerate().skip(k.saturating_sub(1)) {
        match counts.iter_mut().find(|c| c.0 == block.window) {
            Some(c) => c.2 += 1,
            None => counts.push((block.window, i, 1)),
        }
    }
    let extra = |layer: usize, phase: Phase, group: Group| {
        let spilled = spilled_tokens(&placement, work, group.past);
        let seconds = |spilled| {
            block(planner.costs, planner.sizes, layer, &at, phase, &[group], spilled).0.overlapped()
        };
        seconds(spilled) - seconds(0)
    };
    let one = |layer: usize| {
        let prefill: f64 =
            work.prefill_steps().iter().map(|&(n, g)| n as f64 * extra(layer, Phase::Prefill, g)).sum();
        prefill + work.gen_len as f64 * extra(layer, Phase::Decode, work.decode_step())
    };
    counts.iter().map(|&(_, layer, n)| n as f64 * one(layer)).sum()
}

/// A boundary with all it needs to be built.
#[derive(Clone, Copy)]
struct Found {
    seconds: f64,
    k: usize,
    chunk: u64,
    streams: bool,
    device_pages: u64,
}

/// Times of every boundary that fits, for a drawing: (k, seconds), with the best step and mode of each.
pub(super) fn curve(planner: &Planner<'_>) -> Vec<(usize, f64)> {
    let mut all = search(planner);
    all.sort_by(|a, b| a.k.cmp(&b.k).then(a.seconds.total_cmp(&b.seconds)));
    all.dedup_by_key(|f| f.k);
    all.into_iter().map(|f| (f.k, f.seconds)).collect()
}

/// The best of each boundary and mode that fits.
fn search(planner: &Planner<'_>) -> Vec<Found> {
    let (n, pages) = (planner.units(), planner.device_pages() as u64);
    let mut best: Vec<[Option<Found>; 2]> = vec![[None; 2]; n + 1];
    let boundaries = match planner.request.fixed.boundary {
        Some(k) => k..k + 1,
        None if planner.hardware.accelerator.is_some() => 0..n + 1,
        None => n..n + 1,
    };
    if planner.hardware.accelerator.is_none() && boundaries != (n..n + 1) {
        return Vec::new();
    }
    for chunk in planner.chunks() {
        let sums = planner.hardware.accelerator.is_some().then(|| SideSums::new(planner, chunk));
        for k in boundaries.clone() {
            for streams in [false, true] {
                if streams && (k <= 1 || planner.hardware.accelerator.is_none()) {
                    continue;
                }
                let best = &mut best[k][usize::from(streams)];
                let mut seconds = match &sums {
                    Some(sums) => sums.total(k, streams),
                    None => planner.total(&boundary(planner, k, false, pages), chunk),
                };
                // Time is cheaper to know than memory: what cannot win need not fit.
                if best.is_some_and(|b| b.seconds <= seconds) {
                    continue;
                }
                let place = |pages: usize| boundary(planner, k, streams, pages as u64);
                let mut device_pages = pages;
                if !planner.memory(&place(pages as usize), chunk).fits() {
                    let fewer = (k < n - 1).then(|| planner.fewer_pages(chunk, place)).flatten();
                    let Some(fewer) = fewer else { continue };
                    device_pages = fewer as u64;
                }
                if device_pages < planner.pages() as u64 {
                    seconds += spilled_seconds(planner, k, &planner.request.work(chunk), device_pages);
                }
                if best.is_none_or(|b| seconds < b.seconds) {
                    *best = Some(Found { seconds, k, chunk, streams, device_pages });
                }
            }
        }
    }
    best.into_iter().flatten().flatten().collect()
}

/// Boundaries of each mode whose programs are run.
const FEW: usize = 2;

/// See the [module](self).
pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    let (n, pages) = (planner.units(), planner.device_pages() as u64);
    let mut found = search(planner);
    found.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let mode = |streams: bool| found.iter().filter(move |f| f.streams == streams).take(FEW);
    let mut few: Vec<Found> = mode(false).chain(mode(true)).copied().collect();
    if few.is_empty() {
        let k = planner.request.fixed.boundary.unwrap_or(n);
        let mut draft = CandidateDraft::new(boundary(planner, k, false, pages), planner.chunks()[0], "");
        draft.k = Some(k);
        return planner.candidate(Strategy::Helm, draft);
    }
    few.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let draft = |f: Found| {
        let mut reason = match f.k {
            0 => "all units on the GPU".to_owned(),
            k if k == n => "all units on the CPU".to_owned(),
            k => format!("the first {k} of {n} units on the CPU"),
        };
        if f.streams {
            reason += ", streamed to the GPU for prompts";
        }
        let placement = boundary(planner, f.k, f.streams, f.device_pages);
        // On one side alone it is what CPU-only or GPU-only is, down to the step.
        let one_side = !f.streams && (f.k == 0 || f.k == n);
        let chunk =
            if one_side && f.device_pages == pages { planner.best_chunk(&placement) } else { f.chunk };
        let mut draft = CandidateDraft::new(placement, chunk, reason);
        draft.k = Some(f.k);
        draft
    };
    let mut drafts: Vec<CandidateDraft> = few.into_iter().map(draft).collect();
    if planner.hardware.accelerator.is_some() && planner.request.fixed.boundary.is_none() {
        // What filling finds is a boundary, too, and its step is not searched: it must not win by a rounding.
        let filled = filled(planner);
        let (k, device_pages) = (filled.k.unwrap_or(n), filled.placement.device_pages as u64);
        let device_pages = if k < n - 1 { device_pages } else { pages };
        drafts.push(draft(Found { seconds: 0.0, k, chunk: filled.chunk, streams: false, device_pages }));
    }
    let mut candidate = planner.fastest(drafts, Strategy::Helm);
    let device_pages = candidate.placement.device_pages as u64;
    if candidate.feasible && candidate.spilled.is_some() {
        let how = match candidate.spilled {
            Some(super::Spilled::Split) => "attended there by the CPU",
            _ => "streamed to the GPU",
        };
        let all = planner.pages() as u64;
        candidate.reason += &format!(", {} of {all} KV pages on the host and {how}", all - device_pages);
        if let Some(far) = &candidate.far {
            let ms = |s: f64| format!("{:.1} ms", 1e3 * s);
            let (attend, stream) = (ms(far.attend_s), ms(far.stream_s));
            candidate.reason += &format!(" ({attend} a token at the end by the CPU, {stream} streamed)");
        }
    }
    candidate
}
