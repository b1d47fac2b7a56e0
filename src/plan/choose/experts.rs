//! Mixtures of experts with some or all experts on the CPU, and the rest of a block on the GPU. A token reads few of the experts, so that
//! the CPU's memory is fast enough for them, and all of the attention.
//!
//! ```text
//!                                                                                          keys, values   chosen by
//! cpu-moe    the experts of all blocks on the CPU (llama.cpp's --cpu-moe)                  either side    cost
//! ncmoe      those of the first N blocks, N the least that fits (llama.cpp's --n-cpu-moe)  GPU            memory
//! experts    those of the first N blocks, N and all else by predicted time                 either side    cost
//!
//! GPU   norm ─ q, k, v ─ attend ─ out ──┐              ┌─► next block      norm ─ q, k, v ─ attend ─ out ─ norm ─ route ─ experts ─►
//! CPU                                   └► norm ─ route ─ experts
//! ```
//! Blocks with a dense feed-forward are wholly on the GPU, or (not of `ncmoe`) on the CPU like experts. Where not all blocks fit, the
//! first are on the CPU.

use super::planner::{Draft, ENDS, Ends, Planner};
use super::{Candidate, Strategy};
use crate::plan::search::most;
use crate::program::{COPY_LANE_ROWS, LayerPlacement, Placement, Policy, Residence, Side, Staging, Sublayer};

/// Placements whose programs are run.
const FEW: usize = 4;

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

/// How many blocks, the first ones, are on the CPU, and how many, with those, have their experts there.
#[derive(Clone, Copy)]
struct OnHost {
    blocks: usize,
    experts: usize,
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
    LayerPlacement { weights, prefill: policy, decode: policy, kv }
}

fn place(planner: &Planner<'_>, sides: Sides, [embedding, head]: Ends, on_host: OnHost) -> Placement {
    let spec = &planner.sizes.spec;
    let n = planner.sizes.layers();
    let of = |l: usize| match l {
        l if l < on_host.blocks => LayerPlacement::all(Side::Host),
        l if spec.experts_of(l).is_none() => layer(sides.kv, sides.dense),
        l if l < on_host.experts => layer(sides.kv, Side::Host),
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

fn searched(planner: &Planner<'_>, strategy: Strategy) -> Candidate {
    let (n, chunks) = (planner.sizes.layers(), planner.chunks());
    let mut found: Vec<(f64, Draft)> = Vec::new();
    if planner.hardware.accelerator.is_some() {
        // The host attends with sinks, where there are any.
        let sinks = planner.sizes.spec.sinks;
        for sides in SIDES.into_iter().filter(|sides| !sinks || sides.kv == Side::Host) {
            for ends in ENDS {
                for &chunk in &chunks {
                    let memory = |on: OnHost| planner.memory(&place(planner, sides, ends, on), chunk);
                    // The more there is on the GPU the less is on the host, which may be short, too.
                    let fits = |on: OnHost| {
                        let gpu = memory(on).gpu;
                        gpu.total <= gpu.available
                    };
                    let with = |experts: usize| OnHost { blocks: 0, experts };
                    let on_host = match fits(with(n)) {
                        false => {
                            let of = |blocks| OnHost { blocks, experts: n };
                            of(n - most(n, |on_gpu| fits(of(n - on_gpu))))
                        }
                        true if strategy == Strategy::CpuMoe => with(n),
                        true => with(n - most(n, |on_gpu| fits(with(n - on_gpu)))),
                    };
                    // With all blocks on the CPU it is another strategy.
                    if on_host.blocks == n || !memory(on_host).fits() {
                        continue;
                    }
                    let placement = place(planner, sides, ends, on_host);
                    let total = planner.total(&placement, chunk);
                    found.push((total, draft(planner, placement, chunk, sides, on_host)));
                }
            }
        }
    }
    if found.is_empty() {
        let none = OnHost { blocks: 0, experts: n };
        let placement = place(planner, SIDES[2], ENDS[2], none);
        return planner
            .candidate(strategy, draft(planner, placement, planner.default_chunk(), SIDES[2], none));
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.truncate(FEW);
    planner.fastest(found.into_iter().map(|f| f.1).collect(), strategy)
}

/// All on the GPU but for the experts of the first N blocks, without a look at time.
pub(super) fn ncmoe(planner: &Planner<'_>) -> Candidate {
    let (n, sides, ends) = (planner.sizes.layers(), SIDES[0], ENDS[0]);
    let at = |experts: usize| place(planner, sides, ends, OnHost { blocks: 0, experts });
    let chunk = planner.default_chunk();
    let experts = planner.request.fixed.experts_on_host.unwrap_or_else(|| {
        let usable = planner.hardware.accelerator.is_some();
        n - most(n, |on_gpu| usable && planner.memory(&at(n - on_gpu), chunk).fits())
    });
    let on_host = OnHost { blocks: 0, experts };
    let draft = draft(planner, at(experts), chunk, sides, on_host);
    match planner.hardware.accelerator {
        Some(_) => planner.fastest(vec![draft], Strategy::Ncmoe),
        None => planner.candidate(Strategy::Ncmoe, draft),
    }
}

fn draft(planner: &Planner<'_>, placement: Placement, chunk: u64, sides: Sides, on_host: OnHost) -> Draft {
    let n = planner.sizes.layers();
    let experts = match on_host.experts {
        0 => String::new(),
        e if e == n => "experts".to_owned(),
        e => format!("the experts of the first {e} of {n} blocks"),
    };
    let mut reason = match (sides.kv, &experts[..]) {
        (Side::Device, "") => "everything on the GPU".to_owned(),
        (Side::Host, "") => "keys and values on the CPU".to_owned(),
        (Side::Device, experts) => format!("{experts} on the CPU, attention on the GPU"),
        (Side::Host, experts) => format!("{experts}, keys and values on the CPU"),
    };
    if on_host.blocks > 0 {
        reason += &format!(", the first {} of {n} blocks on the CPU", on_host.blocks);
    }
    Draft::new(placement, chunk, reason)
}
