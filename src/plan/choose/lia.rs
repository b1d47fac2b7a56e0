//! LIA's candidate: the best vectors for prompts and decode rows, and as many whole blocks on the GPU as fit (LIA §5).
//!
//! A pinned block has its weights on the GPU and, where that pays more, its keys and values, too ([`pins`]). The paper pins the first
//! blocks; where the others are streamed, pins spread evenly keep the link busy while pinned blocks are computed, so both orders are
//! predicted.

mod pins;

use self::pins::{BlockKinds, Order, Pins};
use super::planner::{CandidateDraft, ENDS, Planner};
use super::{Candidate, Strategy};
use crate::plan::cost::{Batch, Group};
use crate::plan::roofline::Roofline;
use crate::plan::sublayer::{self, Priced, Resident};
use crate::program::{Phase, Placement, Policy, Residence, Side, Sublayer};

/// Kinds of blocks: pinned with keys and values, pinned without, and the others.
const RESIDENTS: [Resident; 3] =
    [Resident::DEVICE, Resident { weights: Residence::Device, kv: Side::Host }, Resident::HOST];

/// The vectors of each kind, for prompts and for decode rows.
type Vectors = [(Policy, Policy); 3];

/// See the [module](self).
pub(super) fn candidate(planner: &Planner<'_>) -> Candidate {
    if planner.hardware.accelerator.is_none() {
        let placement = Placement::all(Side::Device, planner.sizes.layers(), planner.pages());
        return planner.candidate(Strategy::Lia, CandidateDraft::new(placement, planner.chunks()[0], ""));
    }
    let all = kinds(planner);
    let mut tried: Vec<Tried> = Vec::new();
    for (i, kinds) in all.iter().enumerate() {
        let few = kinds.few(planner).into_iter();
        tried.extend(few.map(|pins| Tried { kinds: i, pins, draft: kinds.draft(planner, pins) }));
    }
    if tried.is_empty() {
        let counts = [planner.request.fixed.pinned.unwrap_or(0), 0];
        let chunk = planner.chunks()[0];
        let pins = Pins { counts, chunk, ends: ENDS[2], order: Order::Front };
        return planner.candidate(Strategy::Lia, all[0].draft(planner, pins));
    }
    tried.iter_mut().for_each(|t| planner.predict(&mut t.draft));
    climb(planner, &all, &mut tried);
    planner.fastest(tried.into_iter().map(|t| t.draft).collect(), Strategy::Lia)
}

/// Pins whose programs were run.
struct Tried {
    /// Which of the kinds.
    kinds: usize,
    pins: Pins,
    draft: CandidateDraft,
}

/// Tries neighbours of the fastest, with a block more or less of each kind, for as long as one is faster: the closed form finds the
/// region, programs the place in it. Then the same among those whose pinned blocks all have their keys and values on the GPU: with some
/// that do not, pages cross beside weights, and the way from one region to the other is uphill, or through other sides of the ends.
fn climb(planner: &Planner<'_>, all: &[BlockKinds], tried: &mut Vec<Tried>) {
    climb_among(planner, all, tried, &|_| true);
    let alone = |pins: Pins| pins.counts[1] == 0;
    let Some(at) = fastest(tried, &alone) else { return };
    let Tried { kinds, pins, .. } = tried[at];
    try_all(planner, all, tried, kinds, pins.variants().filter(|&pins| alone(pins)));
    climb_among(planner, all, tried, &alone);
}

/// The place of the fastest of those that `among` takes.
fn fastest(tried: &[Tried], among: &dyn Fn(Pins) -> bool) -> Option<usize> {
    let seconds = |i: &usize| tried[*i].draft.seconds();
    (0..tried.len()).filter(|&i| among(tried[i].pins)).min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
}

fn climb_among(
    planner: &Planner<'_>,
    all: &[BlockKinds],
    tried: &mut Vec<Tried>,
    among: &dyn Fn(Pins) -> bool,
) {
    let Some(mut at) = fastest(tried, among) else { return };
    loop {
        let Tried { kinds, pins, .. } = tried[at];
        try_all(planner, all, tried, kinds, pins.neighbours().filter(|&pins| among(pins)));
        match fastest(tried, among) {
            Some(best) if best != at => at = best,
            _ => return,
        }
    }
}

/// Runs the programs of these pins, of those that fit and were not run before.
fn try_all(
    planner: &Planner<'_>,
    all: &[BlockKinds],
    tried: &mut Vec<Tried>,
    kinds: usize,
    pins: impl Iterator<Item = Pins>,
) {
    for pins in pins {
        let known = tried.iter().any(|t| (t.kinds, t.pins) == (kinds, pins));
        if !known && all[kinds].fits(planner, pins) {
            let mut draft = all[kinds].draft(planner, pins);
            planner.predict(&mut draft);
            tried.push(Tried { kinds, pins, draft });
        }
    }
}

/// Vectors worth trying: the best by the paper's costs; the same for transfers under compute, which programs have; where the machine's
/// CPU attends slower than it multiplies by its own rate, too; and each with decode attention where the keys and values are: pages
/// that come to the device queue up behind the weights of later blocks, which no closed form has.
fn kinds(planner: &Planner<'_>) -> Vec<BlockKinds> {
    let printed = Roofline::serial(planner.hardware, planner.sizes);
    let measured = Roofline::serial_measured(planner.hardware, planner.sizes);
    let slow = planner.hardware.efficiency.cpu_attention < 1.0;
    let costs = if slow { vec![printed, measured] } else { vec![printed] };
    let overlaps = if planner.request.overlap { &[true][..] } else { &[false, true] };
    let fixed = planner.request.fixed;
    let mut found: Vec<(Vectors, Vec<String>)> = Vec::new();
    for costs in &costs {
        for &overlap in overlaps {
            let mut notes = Vec::new();
            let chosen = RESIDENTS.map(|at| vectors(planner, costs, overlap, at, &mut notes));
            let beside: Vectors = std::array::from_fn(|i| match RESIDENTS[i].kv {
                Side::Host => (chosen[i].0, attends_on_host(chosen[i].1)),
                Side::Device => chosen[i],
            });
            // Of a block alone these may lose, and win among pinned blocks that hide the way of its weights over the link.
            let streams = [Policy::ATTENTION_ON_HOST, Policy::all(Side::Device)].map(|decode| {
                let [one, two, others] = beside;
                [one, two, (others.0, decode)]
            });
            for mut vectors in [chosen, beside].into_iter().chain(streams) {
                let [.., others] = &mut vectors;
                *others = (fixed.prefill.unwrap_or(others.0), fixed.decode.unwrap_or(others.1));
                if found.iter().all(|kinds| kinds.0 != vectors) {
                    // They are told of vectors that were not asked for.
                    let notes = if fixed.has_vectors() { Vec::new() } else { notes.clone() };
                    found.push((vectors, notes));
                }
            }
        }
    }
    found.into_iter().map(|(vectors, notes)| BlockKinds::new(vectors, notes)).collect()
}

/// The same with attention on the host.
fn attends_on_host(mut policy: Policy) -> Policy {
    for sublayer in [Sublayer::Scores, Sublayer::Values] {
        policy.0[sublayer as usize] = Side::Host;
    }
    policy
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
