//! Mixtures of experts with some or all experts on the CPU, and the rest of a block on the GPU. A token reads few of the experts, so that
//! the CPU's memory is fast enough for them, and all of the attention.
//!
//! ```text
//!                                                                                          keys, values   chosen by
//! cpu-moe    the experts of all blocks on the CPU (llama.cpp's --cpu-moe)                  either side    cost
//! ncmoe      those of the first N blocks, N the least that fits (llama.cpp's --n-cpu-moe)  GPU            memory
//! experts    those of the first N blocks, or some of those of the first N, by predicted    either side    cost
//!            time
//!
//! GPU   norm ─ q, k, v ─ attend ─ out ──┐              ┌─► next block      norm ─ q, k, v ─ attend ─ out ─ norm ─ route ─ experts ─►
//! CPU                                   └► norm ─ route ─ experts
//!
//! GPU   norm ─ q, k, v ─ attend ─ out ─ norm ─ route ┬ its experts ─┬ + ─► next block                                  divided
//! CPU                                                └ its experts ─┘
//! ```
//! In a divided block the GPU has the most used experts and both sides work at a time; rows cross there and back as where all experts
//! are on the CPU. Whether that is better than whole blocks on the GPU follows from what crossings cost there, and from how unequally
//! experts are used.
//!
//! Blocks with a dense feed-forward are wholly on the GPU, or (not of `ncmoe`) on the CPU like experts. Where not all blocks fit, the
//! first are on the CPU.

mod requests;

pub use self::requests::{FEW_REQUESTS, experts_for_requests, experts_on_host};

use super::planner::{CandidateDraft, ENDS, Ends, Planner};
use super::{Candidate, Strategy};
use crate::plan::cost::Costs;
use crate::plan::price::{Workload, price};
use crate::plan::search::most;
use crate::plan::sizes::Sizes;
use crate::program::{COPY_LANE_ROWS, LayerPlacement, Placement, Policy, Residence, Side, Staging, Sublayer};

/// Placements whose programs are run.
const FEW: usize = 4;

/// Parts in which blocks that have all experts on the GPU are divided, too.
const EIGHTHS: usize = 8;

/// Where keys and values are and are attended, and where dense feed-forwards are computed.
#[derive(Clone, Copy)]
struct Sides {
    kv: Side,
    dense: Side,
}

const SIDES: [Sides; 4] = [
    Sides { kv: Side::Device, dense: Side::Device },
    Sides { kv: Side::Device, dense: Side::Host },
    Sides { kv: Side::Host, dense: Side::Device },
    Sides { kv: Side::Host, dense: Side::Host },
];

/// What of the first blocks is on the CPU.
#[derive(Clone, Copy, PartialEq)]
struct OnHost {
    /// Blocks, all of them.
    blocks: usize,
    /// Blocks, with those, that have their experts there, or some of them.
    experts: usize,
    /// Experts on the GPU of all these blocks together, shared evenly.
    divided: usize,
    /// Whether experts of blocks that have all of them on the CPU are copied to the GPU for prompts, layer by layer. Unless there are `blocks`,
    /// these are spread evenly then: a copy crosses beside the blocks before it.
    streams: bool,
}

/// Nothing.
const NONE: OnHost = OnHost { blocks: 0, experts: 0, divided: 0, streams: false };

/// Whether block `l` of `n` is one of `some` that are spread evenly; the first is not, unless all are.
fn is_spread(l: usize, some: usize, n: usize) -> bool {
    (l + 1) * some / n > l * some / n
}

impl OnHost {
    /// Whether block `l` of `n`, which is not wholly on the CPU, has experts there.
    fn has_experts(&self, l: usize, n: usize) -> bool {
        match self.streams && self.blocks == 0 {
            true => is_spread(l, self.experts, n),
            false => l < self.experts,
        }
    }

    /// Experts of block `l` that are on the GPU, where it has some on the CPU.
    fn on_device(&self, l: usize) -> u16 {
        let among = self.experts - self.blocks;
        let (each, more) = (self.divided / among.max(1), self.divided % among.max(1));
        (each + usize::from(l - self.blocks < more)) as u16
    }
}

/// A block of experts that the host computes for decode rows and the GPU, to which they are copied, for prompts.
fn streamed(kv: Side) -> LayerPlacement {
    let prefill = layer(kv, Side::Device).prefill;
    LayerPlacement { weights: Residence::StreamedExperts, prefill, ..layer(kv, Side::Host) }
}

/// A block with its attention's products on the GPU, and its feed-forward on `ffn`.
fn layer(kv: Side, ffn: Side) -> LayerPlacement {
    let mut policy = Policy::all(Side::Device);
    for (sublayer, side) in
        [(Sublayer::Scores, kv), (Sublayer::Values, kv), (Sublayer::Up, ffn), (Sublayer::Down, ffn)]
    {
        policy.0[sublayer as usize] = side;
    }
    let weights = if ffn == Side::Host { Residence::Both } else { Residence::Device };
    LayerPlacement { weights, prefill: policy, decode: policy, kv, device_experts: 0 }
}

/// From how many rows of prompts on a placement's experts are streamed for them: so many that a step of them takes no longer so than with
/// the host's experts. `None` if no step of up to `chunk` rows does.
fn stream_rows(costs: &dyn Costs, sizes: &Sizes, placement: &Placement, chunk: u64) -> Option<u32> {
    let of = |rows: u64, stream_rows: u32| {
        let work = Workload { prompt: rows, gen_len: 0, batch: 1, chunk: rows };
        price(costs, sizes, &Placement { stream_rows, ..placement.clone() }, &work).prefill
    };
    let pays = |rows: u64| of(rows, 0) <= of(rows, u32::MAX);
    if !pays(chunk) {
        return None;
    }
    let fewer = most(chunk as usize - 1, |below| pays(chunk - below as u64));
    Some((chunk - fewer as u64) as u32)
}

fn place(planner: &Planner<'_>, sides: Sides, [embedding, head]: Ends, on_host: OnHost) -> Placement {
    let spec = &planner.sizes.spec;
    let n = planner.sizes.layers();
    let of = |l: usize| match l {
        l if l < on_host.blocks => LayerPlacement::all(Side::Host),
        l if spec.experts_of(l).is_none() => layer(sides.kv, sides.dense),
        l if on_host.has_experts(l, n) => match on_host.on_device(l) {
            0 if on_host.streams => streamed(sides.kv),
            0 => layer(sides.kv, Side::Host),
            n => LayerPlacement {
                weights: Residence::Both,
                device_experts: n,
                ..layer(sides.kv, Side::Device)
            },
        },
        _ => layer(sides.kv, Side::Device),
    };
    let on_device = sides.kv == Side::Device && on_host.blocks < n;
    let device_pages = if on_device { planner.device_pages() } else { 0 };
    let pages_on_host = sides.kv == Side::Host || on_host.blocks > 0 || device_pages < planner.pages();
    Placement {
        embedding,
        layers: (0..n).map(of).collect(),
        head,
        device_pages,
        host_pages: if pages_on_host { planner.pages() } else { 0 },
        windows: Vec::new(),
        staging: Staging::Ahead,
        copy_lane_rows: COPY_LANE_ROWS,
        stream_rows: 0,
    }
}

/// The experts of all blocks on the CPU.
pub(super) fn cpu_moe(planner: &Planner<'_>) -> Candidate {
    searched(planner, Strategy::CpuMoe)
}

/// The experts of as many blocks on the CPU as is fastest.
pub(super) fn experts(planner: &Planner<'_>) -> Candidate {
    searched(planner, Strategy::Experts)
}

/// What of the blocks is on the CPU where so many experts of each are to be on the GPU.
fn fixed(planner: &Planner<'_>) -> Option<OnHost> {
    let on_gpu = planner.request.fixed.gpu_experts?;
    let n = planner.sizes.layers();
    let all = planner.sizes.spec.experts.as_ref().map_or(0, |e| e.count);
    let experts = if on_gpu < all { n } else { 0 };
    Some(OnHost { experts, divided: on_gpu * experts, ..NONE })
}

fn searched(planner: &Planner<'_>, strategy: Strategy) -> Candidate {
    let (n, chunks) = (planner.sizes.layers(), planner.chunks());
    let fixed = fixed(planner).filter(|_| strategy == Strategy::Experts);
    let mut found: Vec<Found> = Vec::new();
    let streaming = if strategy == Strategy::Experts { &[false, true][..] } else { &[false] };
    if planner.hardware.accelerator.is_some() {
        for sides in SIDES {
            for (ends, &streams) in ENDS.into_iter().flat_map(|ends| streaming.iter().map(move |s| (ends, s)))
            {
                for &chunk in &chunks {
                    let memory = |on: OnHost| planner.memory(&place(planner, sides, ends, on), chunk);
                    // The more there is on the GPU the less is on the host, which may be short, too.
                    let fits = |on: OnHost| {
                        let gpu = memory(on).gpu;
                        gpu.total <= gpu.available
                    };
                    let with = |experts: usize| OnHost { experts, streams, ..NONE };
                    let fixed = fixed.map(|on| OnHost { streams: streams && on.divided == 0, ..on });
                    let on_host = fixed.unwrap_or_else(|| match fits(with(n)) {
                        false => {
                            let of = |blocks| OnHost { blocks, ..with(n) };
                            of(n - most(n, |on_gpu| fits(of(n - on_gpu))))
                        }
                        true if strategy == Strategy::CpuMoe => with(n),
                        true => with(n - most(n, |on_gpu| fits(with(n - on_gpu)))),
                    });
                    // With all blocks on the CPU it is another strategy, and with all experts on the GPU none is copied.
                    let nothing = streams && (!on_host.streams || on_host.experts <= on_host.blocks);
                    if on_host.blocks == n || nothing || !memory(on_host).fits() {
                        continue;
                    }
                    found.push(Found::new(planner, sides, ends, chunk, on_host));
                }
            }
        }
    }
    if found.is_empty() {
        let none = fixed.unwrap_or(OnHost { experts: n, ..NONE });
        let placement = place(planner, SIDES[2], ENDS[2], none);
        return planner
            .candidate(strategy, draft(planner, placement, planner.default_chunk(), SIDES[2], none));
    }
    let fastest = |found: &mut Vec<Found>| {
        found.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        found.truncate(FEW);
    };
    fastest(&mut found);
    let mut divided: Vec<Found> = match strategy {
        Strategy::Experts if fixed.is_none() => {
            found.iter().flat_map(|whole| whole.divided(planner)).collect()
        }
        _ => Vec::new(),
    };
    fastest(&mut divided);
    let drafts = found.iter().chain(&divided).map(|f| f.draft(planner));
    planner.fastest(drafts.collect(), strategy)
}

/// A placement, and what it takes in closed form.
struct Found {
    seconds: f64,
    sides: Sides,
    ends: Ends,
    chunk: u64,
    on_host: OnHost,
}

impl Found {
    fn new(planner: &Planner<'_>, sides: Sides, ends: Ends, chunk: u64, on_host: OnHost) -> Found {
        let seconds = planner.total(&place(planner, sides, ends, on_host), chunk);
        Found { seconds, sides, ends, chunk, on_host }
    }

    fn draft(&self, planner: &Planner<'_>) -> CandidateDraft {
        let mut placement = place(planner, self.sides, self.ends, self.on_host);
        if self.on_host.streams {
            placement.stream_rows =
                stream_rows(planner.costs, planner.sizes, &placement, self.chunk).unwrap_or(0);
        }
        draft(planner, placement, self.chunk, self.sides, self.on_host)
    }

    /// The same with some experts on the GPU of the blocks that have theirs on the CPU, and perhaps of as many more, in whose place they
    /// are there: as many as fit.
    fn divided(&self, planner: &Planner<'_>) -> Vec<Found> {
        let spec = &planner.sizes.spec;
        let n = planner.sizes.layers();
        let Found { sides, ends, chunk, on_host, .. } = *self;
        let Some(e) = spec.experts.as_ref().filter(|_| on_host.blocks == 0 && on_host.experts > 0) else {
            return Vec::new();
        };
        // A block with all of them on the GPU is not divided.
        let most_of_one = e.count.min(usize::from(u16::MAX)) - 1;
        let fits = |on: OnHost| planner.memory(&place(planner, sides, ends, on), chunk).fits();
        let mut tried: Vec<usize> =
            (0..=EIGHTHS).map(|part| on_host.experts + (n - on_host.experts) * part / EIGHTHS).collect();
        tried.dedup();
        let of = |experts: usize| {
            let with = |divided: usize| OnHost { experts, divided, streams: false, ..on_host };
            let divided = most(experts * most_of_one, |divided| fits(with(divided)));
            (divided > 0).then(|| Found::new(planner, sides, ends, chunk, with(divided)))
        };
        tried.into_iter().filter_map(of).collect()
    }
}

/// All on the GPU but for the experts of the first N blocks, without a look at time.
pub(super) fn ncmoe(planner: &Planner<'_>) -> Candidate {
    let (n, sides, ends) = (planner.sizes.layers(), SIDES[0], ENDS[0]);
    let at = |experts: usize| place(planner, sides, ends, OnHost { experts, ..NONE });
    let chunk = planner.default_chunk();
    let experts = planner.request.fixed.experts_on_host.unwrap_or_else(|| {
        let usable = planner.hardware.accelerator.is_some();
        n - most(n, |on_gpu| usable && planner.memory(&at(n - on_gpu), chunk).fits())
    });
    let on_host = OnHost { experts, ..NONE };
    let draft = draft(planner, at(experts), chunk, sides, on_host);
    match planner.hardware.accelerator {
        Some(_) => planner.fastest(vec![draft], Strategy::Ncmoe),
        None => planner.candidate(Strategy::Ncmoe, draft),
    }
}

fn draft(
    planner: &Planner<'_>,
    placement: Placement,
    chunk: u64,
    sides: Sides,
    on_host: OnHost,
) -> CandidateDraft {
    let n = planner.sizes.layers();
    let experts = match on_host.experts {
        0 => String::new(),
        e if on_host.divided > 0 => {
            let all: usize = (0..e).filter_map(|l| planner.sizes.spec.experts_of(l)).map(|e| e.count).sum();
            let which = if e == n { "all".to_owned() } else { format!("the first {e} of {n}") };
            format!("{} of {all} experts of {which} blocks", all.saturating_sub(on_host.divided))
        }
        e if e == n => "experts".to_owned(),
        e if on_host.streams && on_host.blocks == 0 => {
            format!("the experts of {e} of {n} blocks, spread evenly,")
        }
        e => format!("the experts of the first {e} of {n} blocks"),
    };
    let mut reason = match (sides.kv, &experts[..]) {
        (Side::Device, "") => "everything on the GPU".to_owned(),
        (Side::Host, "") => "keys and values on the CPU".to_owned(),
        (Side::Device, experts) => format!("{experts} on the CPU, attention on the GPU"),
        (Side::Host, experts) => format!("{experts}, keys and values on the CPU"),
    };
    if on_host.streams {
        reason += &match placement.stream_rows {
            0 | 1 => ", copied to the GPU for prompts".to_owned(),
            rows => format!(", copied to the GPU for {rows} rows of prompts or more"),
        };
    }
    if on_host.blocks > 0 {
        reason += &format!(", the first {} of {n} blocks on the CPU", on_host.blocks);
    }
    CandidateDraft::new(placement, chunk, reason)
}
