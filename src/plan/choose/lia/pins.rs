//! How many blocks stay on the GPU, and which.

use super::super::planner::{CandidateDraft, ENDS, Ends, Planner};
use super::{RESIDENTS, Vectors};
use crate::plan::cost::Group;
use crate::plan::memory::page_bytes;
use crate::plan::prefix::Prefix;
use crate::plan::price::block;
use crate::plan::search::most as most_that_fit;
use crate::plan::sublayer::Resident;
use crate::program::{
    COPY_LANE_ROWS, LayerPlacement, Phase, Placement, Policy, Residence, Side, Staging, Sublayer,
};

/// Ways to pin whose programs are run.
const FEW: usize = 3;

/// Which blocks are pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The first.
    Front,
    /// Evenly among the others.
    Spread,
}

/// Pinned blocks, and what goes with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pins {
    /// Blocks with keys and values on the GPU, and blocks without.
    pub counts: [usize; 2],
    /// Rows of a prefill step.
    pub chunk: u64,
    /// Sides of embedding and head.
    pub ends: Ends,
    /// Which blocks these are.
    pub order: Order,
}

impl Pins {
    /// With a block more or less of a kind, or of the other kind.
    pub fn neighbours(self) -> impl Iterator<Item = Pins> {
        let steps = [(-1, 0), (1, 0), (0, -1), (0, 1), (-1, 1), (1, -1)];
        steps.into_iter().filter_map(move |(da, db)| {
            let [a, b] = self.counts;
            Some(Pins { counts: [a.checked_add_signed(da)?, b.checked_add_signed(db)?], ..self })
        })
    }
}

impl Pins {
    /// In both orders, with other sides of the ends, for which a block may have to go.
    pub fn variants(self) -> impl Iterator<Item = Pins> {
        let [a, b] = self.counts;
        let counts = [Some(a), a.checked_sub(1)].into_iter().flatten().map(move |a| [a, b]);
        let ended = counts.flat_map(|counts| ENDS.map(|ends| (counts, ends)));
        ended.flat_map(move |(counts, ends)| {
            [Order::Front, Order::Spread].map(|order| Pins { counts, ends, order, ..self })
        })
    }
}

/// Vectors of the three kinds of blocks, and what there is to say of them.
pub(super) struct BlockKinds {
    vectors: Vectors,
    placed: [LayerPlacement; 3],
    notes: Vec<String>,
}

/// The vectors of a kind of block, as placed.
fn layer(at: Resident, (prefill, decode): (Policy, Policy)) -> LayerPlacement {
    let streams =
        [prefill, decode].iter().any(|p| Sublayer::PRODUCTS.iter().any(|&s| p.side(s) == Side::Device));
    let weights = match at.weights {
        Residence::Host if streams => Residence::Streamed,
        other => other,
    };
    LayerPlacement { weights, prefill, decode, kv: at.kv, device_experts: 0 }
}

impl BlockKinds {
    pub fn new(vectors: Vectors, notes: Vec<String>) -> BlockKinds {
        let placed = std::array::from_fn(|i| layer(RESIDENTS[i], vectors[i]));
        BlockKinds { vectors, placed, notes }
    }

    /// The best few ways to pin, by the closed form; none if nothing fits.
    pub fn few(&self, planner: &Planner<'_>) -> Vec<Pins> {
        let mut found: Vec<(f64, Pins)> = Vec::new();
        for chunk in planner.chunks() {
            let sums = seconds(planner, &self.placed, chunk);
            for ends in ENDS {
                for counts in counts(planner, self, &sums, chunk, ends) {
                    let pins = Pins { counts, chunk, ends, order: Order::Front };
                    found.push((planner.total(&self.place(planner, pins), chunk), pins));
                }
            }
        }
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        found.truncate(FEW);
        let (n, streams) = (planner.sizes.layers(), self.placed[2].weights == Residence::Streamed);
        let orders = |pins: Pins| match pins.counts[0] + pins.counts[1] {
            pinned if streams && pinned > 0 && pinned < n => &[Order::Front, Order::Spread][..],
            _ => &[Order::Front],
        };
        found
            .into_iter()
            .flat_map(|(_, pins)| orders(pins).iter().map(move |&order| Pins { order, ..pins }))
            .collect()
    }

    /// Whether it is allowed by what is fixed, and fits.
    pub fn fits(&self, planner: &Planner<'_>, pins: Pins) -> bool {
        is_allowed(planner, pins.counts) && planner.memory(&self.place(planner, pins), pins.chunk).fits()
    }

    /// The placement with so many blocks of the first two kinds, in the order of their kinds.
    fn place(&self, planner: &Planner<'_>, Pins { counts, ends, order, .. }: Pins) -> Placement {
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
            i if i < counts[0] => self.placed[0],
            i if i < counts[0] + counts[1] => self.placed[1],
            _ => self.placed[2],
        };
        let device_pages = if counts[0] > 0 { planner.device_pages() } else { 0 };
        let leave = counts[0] > 0 && device_pages < planner.pages();
        let [embedding, head] = ends;
        Placement {
            embedding,
            layers: match order {
                Order::Front => (0..n).map(kind).collect(),
                Order::Spread => (0..n).map(|i| kind(spread(i))).collect(),
            },
            head,
            device_pages,
            host_pages: if counts[0] < n || leave { planner.pages() } else { 0 },
            windows: Vec::new(),
            staging: Staging::Ahead,
            copy_lane_rows: COPY_LANE_ROWS,
            stream_rows: 0,
        }
    }

    pub fn draft(&self, planner: &Planner<'_>, pins: Pins) -> CandidateDraft {
        let (n, [with, without]) = (planner.sizes.layers(), pins.counts);
        let pinned = with + without;
        // What is told are the vectors of the blocks that are not pinned, if there is one.
        let told = self.vectors[if pinned < n { 2 } else { usize::from(without > 0) }];
        let mut reason = format!("{pinned} of {n} blocks pinned on the GPU");
        if pins.order == Order::Spread {
            reason += ", spread evenly";
        }
        if without > 0 {
            reason += &format!(", {without} of them with keys and values on the host");
        }
        if pinned < n {
            let text = |p: Policy| p.bits().map(|b| b.to_string()).join(",");
            reason +=
                &format!("; the others ({}) for prompts and ({}) in decode", text(told.0), text(told.1));
        }
        let mut draft = CandidateDraft::new(self.place(planner, pins), pins.chunk, reason);
        (draft.policies, draft.pinned, draft.notes) = (Some(told), Some(pinned), self.notes.clone());
        draft
    }
}

/// Whether what is fixed allows so many pinned blocks: given vectors apply to one at least.
fn is_allowed(planner: &Planner<'_>, [a, b]: [usize; 2]) -> bool {
    let (fixed, n) = (planner.request.fixed, planner.sizes.layers());
    let most = if fixed.has_vectors() { n - 1 } else { n };
    fixed.pinned.is_none_or(|p| a + b == p) && a + b <= most
}

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

/// How many blocks of the first two kinds to pin: the best, and the best of the first kind alone, which leaves the link and the
/// CPU alone in a way that a closed form does not see. None, if it does not even fit without any.
fn counts(
    planner: &Planner<'_>,
    kinds: &BlockKinds,
    sums: &[Prefix; 3],
    chunk: u64,
    ends: Ends,
) -> Vec<[usize; 2]> {
    let n = planner.sizes.layers();
    let memory = |counts: [usize; 2]| {
        planner.memory(&kinds.place(planner, Pins { counts, chunk, ends, order: Order::Front }), chunk)
    };
    let fits = |counts: [usize; 2]| memory(counts).fits();
    let time = |[a, b]: [usize; 2]| sums[0].sum(0..a) + sums[1].sum(a..a + b) + sums[2].sum(a + b..n);
    let fixed = planner.request.fixed;
    let most = if fixed.has_vectors() { n - 1 } else { n };
    // Of all, and of those without the second kind.
    let mut best: [Option<([usize; 2], f64)>; 2] = [None; 2];
    // What cannot win need not fit.
    let wins = |best: &[Option<([usize; 2], f64)>; 2], counts: [usize; 2]| {
        let [_, b] = counts;
        let allowed = is_allowed(planner, counts);
        let better = |best: &Option<([usize; 2], f64)>| best.is_none_or(|b| time(counts) < b.1);
        allowed && (better(&best[0]) || b == 0 && better(&best[1]))
    };
    let take = |best: &mut [Option<([usize; 2], f64)>; 2], counts: [usize; 2]| {
        let of = if counts[1] == 0 { &mut best[..] } else { &mut best[..1] };
        for slot in of.iter_mut().filter(|s| s.is_none_or(|b| time(counts) < b.1)) {
            *slot = Some((counts, time(counts)));
        }
    };
    // Without a streamed block there are no staging buffers: full pins are tried first.
    for counts in [[n, 0], [0, n], [0, 0]] {
        if wins(&best, counts) && fits(counts) {
            take(&mut best, counts);
        }
    }
    // How many fit besides, by the largest block; exactly by trial.
    let kv = planner.device_pages() as u64 * page_bytes(planner.sizes);
    let weights = planner.sizes.largest_block().next_multiple_of(256);
    let base = memory([0, 0]).gpu;
    let room = base.available.checked_sub(base.total);
    let most_of_one = room.map_or(0, |_| most + 1);
    let room = room.unwrap_or(0);
    for a in 0..most_of_one {
        let left = room.saturating_sub(a as u64 * (weights + kv));
        let guess = ((left / weights) as usize).min(most - a);
        let rest = fixed.pinned.and_then(|p| p.checked_sub(a));
        for b in [0, guess].into_iter().chain(rest) {
            if !wins(&best, [a, b]) {
                continue;
            }
            let exact = b == 0 || fixed.pinned.is_some();
            let b = match fits([a, b]) {
                true if exact => Some(b),
                true => (b + 1..=most - a).take_while(|&b| fits([a, b])).last().or(Some(b)),
                false if exact => None,
                false => Some(most_that_fit(b - 1, |b| fits([a, b]))).filter(|&b| b > 0),
            };
            if let Some(b) = b.filter(|&b| wins(&best, [a, b])) {
                take(&mut best, [a, b]);
            }
        }
    }
    let mut counts: Vec<[usize; 2]> = best.into_iter().flatten().map(|b| b.0).collect();
    counts.dedup();
    counts
}
