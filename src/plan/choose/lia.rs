//! LIA's candidate: the best vectors for prompts and decode rows, and as many whole blocks on the GPU as fit (LIA §5).
//!
//! A pinned block has its weights on the GPU and, where that pays more, its keys and values, too. With n blocks of the
//! first kind the number of the second follows from the memory left, so all n are tried. The paper pins the first blocks; where the
//! others are streamed, pins spread evenly keep the link busy while pinned blocks are computed, so both orders are predicted.

use super::{Candidate, Draft, Planner, Strategy};
use crate::plan::cost::{Batch, Group};
use crate::plan::memory::page_bytes;
use crate::plan::prefix::Prefix;
use crate::plan::price::block;
use crate::plan::roofline::Roofline;
use crate::plan::sublayer::{self, Priced, Resident};
use crate::program::{
    COPY_LANE_ROWS, LayerPlacement, Phase, Placement, Policy, Residence, Side, Staging, Sublayer,
};

/// The vectors of a kind of block, as placed.
fn layer(at: Resident, prefill: Policy, decode: Policy) -> LayerPlacement {
    let streams =
        [prefill, decode].iter().any(|p| Sublayer::PRODUCTS.iter().any(|&s| p.side(s) == Side::Device));
    let weights = match at.weights {
        Residence::Host if streams => Residence::Streamed,
        other => other,
    };
    LayerPlacement { weights, prefill, decode, kv: at.kv }
}

/// Which blocks are pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// The first.
    Front,
    /// Evenly among the others.
    Spread,
}

/// The placement with so many blocks of the first two kinds, in the order of their kinds.
fn place(planner: &Planner<'_>, counts: [usize; 2], kinds: &[LayerPlacement; 3], head: Side) -> Placement {
    ordered(planner, counts, kinds, head, Order::Front)
}

fn ordered(
    planner: &Planner<'_>,
    counts: [usize; 2],
    kinds: &[LayerPlacement; 3],
    head: Side,
    order: Order,
) -> Placement {
    let n = planner.sizes.layers();
    let pinned = counts[0] + counts[1];
    // The place of a block if pins, and the first kind among them, are spread evenly.
    let spread = |i: usize| {
        let is_one = |i: usize, of: usize, all: usize| (i + 1) * of / all > i * of / all;
        let at = i * pinned / n;
        match is_one(i, pinned, n) {
            false => n,
            true if is_one(at, counts[0], pinned) => 0,
            true => counts[0],
        }
    };
    let kind = |i: usize| match i {
        i if i < counts[0] => kinds[0],
        i if i < counts[0] + counts[1] => kinds[1],
        _ => kinds[2],
    };
    Placement {
        embedding: Side::Host,
        layers: match order {
            Order::Front => (0..n).map(kind).collect(),
            Order::Spread => (0..n).map(|i| kind(spread(i))).collect(),
        },
        head,
        device_pages: if counts[0] > 0 { planner.pages() } else { 0 },
        host_pages: if counts[0] < n { planner.pages() } else { 0 },
        windows: Vec::new(),
        staging: Staging::Ahead,
        copy_lane_rows: COPY_LANE_ROWS,
    }
}

/// The vectors: LIA's own costs, serial or overlapped.
fn vectors(
    planner: &Planner<'_>,
    costs: &Roofline<'_>,
    overlap: bool,
    at: Resident,
    notes: &mut Vec<String>,
) -> (Policy, Policy) {
    let request = planner.request;
    let mut best = |phase: Phase, group: Group| {
        let groups = [group];
        let batch = Batch { phase, groups: &groups };
        let (any, runnable): (Priced, Priced) =
            sublayer::best_policies(costs, planner.sizes, 0, at, &batch, overlap);
        if any.policy != runnable.policy
            && let Some(refusal) = sublayer::refusal(any.policy)
        {
            notes.push(format!(
                "{refusal}; predicted {:.3} ms a block against {:.3} ms",
                any.seconds * 1e3,
                runnable.seconds * 1e3
            ));
        }
        runnable.policy
    };
    let prefill = best(Phase::Prefill, Group::prompts(request.batch, request.prompt));
    (prefill, best(Phase::Decode, request.work(1).decode_step()))
}

/// See the [module](self).
pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    if planner.hardware.accelerator.is_none() {
        let placement = Placement::all(Side::Device, planner.sizes.layers(), planner.pages());
        return planner.candidate(Strategy::Lia, Draft::new(placement, planner.request.chunks()[0], ""));
    }
    // By the paper's costs; the same for transfers under compute, which programs have; where the machine's CPU attends slower than it
    // multiplies by its own rate, too; and each with decode attention where the keys and values are: pages that come to the device
    // queue up behind the weights of later blocks, which no closed form has.
    let printed = Roofline::serial(planner.hardware, planner.sizes);
    let measured = Roofline::serial_measured(planner.hardware, planner.sizes);
    let slow = planner.hardware.efficiency.cpu_attention < 1.0;
    let costs = if slow { vec![printed, measured] } else { vec![printed] };
    let overlaps = if planner.request.overlap { &[true][..] } else { &[false, true] };
    let fixed = planner.request.fixed;
    let mut ways: Vec<([(Policy, Policy); 3], Vec<String>)> = Vec::new();
    for costs in &costs {
        for &overlap in overlaps {
            let mut notes = Vec::new();
            let chosen = RESIDENTS.map(|at| vectors(planner, costs, overlap, at, &mut notes));
            let beside = std::array::from_fn(|i| match RESIDENTS[i].kv {
                Side::Host => (chosen[i].0, attends_on_host(chosen[i].1)),
                Side::Device => chosen[i],
            });
            for mut vectors in [chosen, beside] {
                let [.., others] = &mut vectors;
                *others = (fixed.prefill.unwrap_or(others.0), fixed.decode.unwrap_or(others.1));
                if ways.iter().all(|way| way.0 != vectors) {
                    // They are told of vectors that were not asked for.
                    let notes = if fixed.has_vectors() { Vec::new() } else { notes.clone() };
                    ways.push((vectors, notes));
                }
            }
        }
    }
    let all = ways.iter().flat_map(|(vectors, notes)| drafts(planner, vectors, notes));
    planner.fastest(all.collect(), Strategy::Lia)
}

/// Kinds of blocks: pinned with keys and values, pinned without, and the others.
const RESIDENTS: [Resident; 3] =
    [Resident::DEVICE, Resident { weights: Residence::Device, kv: Side::Host }, Resident::HOST];

/// The same with attention on the host.
fn attends_on_host(mut policy: Policy) -> Policy {
    for sublayer in [Sublayer::Scores, Sublayer::Values] {
        policy.0[sublayer as usize] = Side::Host;
    }
    policy
}

/// The best few with these vectors of the kinds of blocks.
fn drafts(planner: &Planner<'_>, vectors: &[(Policy, Policy); 3], notes: &[String]) -> Vec<Draft> {
    let fixed = planner.request.fixed;
    let kinds: [LayerPlacement; 3] = std::array::from_fn(|i| layer(RESIDENTS[i], vectors[i].0, vectors[i].1));
    let mut found: Vec<(f64, [usize; 2], u64, Side)> = Vec::new();
    for chunk in planner.request.chunks() {
        let sums = seconds(planner, &kinds, chunk);
        for head in [Side::Device, Side::Host] {
            let Some(counts) = pin(planner, &kinds, &sums, chunk, head) else { continue };
            let total = planner.total(&place(planner, counts, &kinds, head), chunk);
            found.push((total, counts, chunk, head));
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.truncate(FEW);
    if found.is_empty() {
        found.push((0.0, [fixed.pinned.unwrap_or(0), 0], planner.request.chunks()[0], Side::Device));
    }
    let n = planner.sizes.layers();
    let draft = |&(_, counts, chunk, head): &(f64, [usize; 2], u64, Side), order: Order| {
        let pinned = counts[0] + counts[1];
        // What is told are the vectors of the blocks that are not pinned, if there is one.
        let told = if pinned < n {
            vectors[2]
        } else if counts[1] > 0 {
            vectors[1]
        } else {
            vectors[0]
        };
        let mut reason = format!("{pinned} of {n} blocks pinned on the GPU");
        if order == Order::Spread {
            reason += ", spread evenly";
        }
        if counts[1] > 0 {
            reason += &format!(", {} of them with keys and values on the host", counts[1]);
        }
        if pinned < n {
            let text = |p: Policy| p.bits().map(|b| b.to_string()).join(",");
            reason +=
                &format!("; the others ({}) for prompts and ({}) in decode", text(told.0), text(told.1));
        }
        let mut draft = Draft::new(ordered(planner, counts, &kinds, head, order), chunk, reason);
        (draft.policies, draft.pinned, draft.notes) = (Some(told), Some(pinned), notes.to_vec());
        draft
    };
    let streams = kinds[2].weights == Residence::Streamed;
    let orders = |&(_, [a, b], ..): &(f64, [usize; 2], u64, Side)| match a + b {
        pinned if streams && pinned > 0 && pinned < n => &[Order::Front, Order::Spread][..],
        _ => &[Order::Front],
    };
    found.iter().flat_map(|f| orders(f).iter().map(|&order| draft(f, order))).collect()
}

/// Ways to pin whose programs are run.
const FEW: usize = 3;

/// Seconds of a run in each block, by kind.
fn seconds(planner: &Planner<'_>, kinds: &[LayerPlacement; 3], chunk: u64) -> [Prefix; 3] {
    let work = planner.request.work(chunk);
    let (steps, decode) = (work.prefill_steps(), work.decode_step());
    let of = |layer: usize, at: &LayerPlacement| {
        let one = |phase, group: Group| {
            block(planner.costs, planner.sizes, layer, at, phase, &[group], 0).0.overlapped()
        };
        steps.iter().map(|&(n, g)| n as f64 * one(Phase::Prefill, g)).sum::<f64>()
            + work.gen_len as f64 * one(Phase::Decode, decode)
    };
    std::array::from_fn(|kind| Prefix::new((0..planner.sizes.layers()).map(|l| of(l, &kinds[kind]))))
}

/// How many blocks of the first two kinds to pin; `None` if it does not even fit without any.
fn pin(
    planner: &Planner<'_>,
    kinds: &[LayerPlacement; 3],
    sums: &[Prefix; 3],
    chunk: u64,
    head: Side,
) -> Option<[usize; 2]> {
    let n = planner.sizes.layers();
    let fits = |counts: [usize; 2]| planner.memory(&place(planner, counts, kinds, head), chunk).fits();
    let kv = planner.pages() as u64 * page_bytes(planner.sizes);
    let weights = planner.sizes.largest_block().next_multiple_of(256);
    let base = planner.memory(&place(planner, [0, 0], kinds, head), chunk).gpu;
    let room = base.available.checked_sub(base.total);
    let time = |[a, b]: [usize; 2]| sums[0].sum(0..a) + sums[1].sum(a..a + b) + sums[2].sum(a + b..n);
    let mut best: Option<([usize; 2], f64)> = None;
    let fixed = planner.request.fixed;
    let most = if fixed.has_vectors() { n - 1 } else { n };
    let allowed = |[a, b]: [usize; 2]| fixed.pinned.is_none_or(|p| a + b == p) && a + b <= most;
    let mut offer = |counts: [usize; 2]| {
        if !allowed(counts) {
            return;
        }
        if best.is_none_or(|b| time(counts) < b.1) && fits(counts) {
            best = Some((counts, time(counts)));
        }
    };
    // Without a streamed block there are no staging buffers: full pins are tried first.
    offer([n, 0]);
    offer([0, n]);
    if let Some(room) = room {
        offer([0, 0]);
        for a in 0..=n as u64 {
            let Some(left) = room.checked_sub(a * (weights + kv)) else { break };
            let room = (left / weights).min((most as u64).saturating_sub(a));
            let rest = fixed.pinned.and_then(|p| (p as u64).checked_sub(a)).filter(|&b| b <= room);
            for b in [0, room].into_iter().chain(rest) {
                offer([a as usize, b as usize]);
            }
        }
    }
    best.map(|b| b.0)
}
