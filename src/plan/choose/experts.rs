//! A mixture of experts with its experts on the CPU, and all else on the GPU: llama.cpp's `--cpu-moe`. A token reads few of the
//! experts, so that the CPU's memory is fast enough for them, and all of the attention.
//!
//! ```text
//! GPU   norm ─ q, k, v ─ attend ─ out ──┐              ┌─► next block
//! CPU                                   └► norm ─ route ─ experts
//! ```
//! Keys and values are on either side, attended where they are. Blocks with a dense feed-forward are wholly on the GPU, or on the CPU
//! like experts. Where not all blocks fit, the first are on the CPU.

use super::planner::{Draft, ENDS, Ends, Planner};
use super::{Candidate, Strategy};
use crate::program::{COPY_LANE_ROWS, LayerPlacement, Placement, Policy, Residence, Side, Staging, Sublayer};

/// Placements whose programs are run.
const FEW: usize = 4;

/// Where keys and values are and are attended, and where dense feed-forwards are computed.
#[derive(Clone, Copy)]
struct Way {
    kv: Side,
    dense: Side,
}

const WAYS: [Way; 4] = [
    Way { kv: Side::Device, dense: Side::Device },
    Way { kv: Side::Device, dense: Side::Host },
    Way { kv: Side::Host, dense: Side::Device },
    Way { kv: Side::Host, dense: Side::Host },
];

/// A block with its attention's products on the GPU.
fn layer(way: Way, experts: bool) -> LayerPlacement {
    let ffn = if experts { Side::Host } else { way.dense };
    let mut policy = Policy::all(Side::Device);
    for (sublayer, side) in
        [(Sublayer::Scores, way.kv), (Sublayer::Values, way.kv), (Sublayer::Up, ffn), (Sublayer::Down, ffn)]
    {
        policy.0[sublayer as usize] = side;
    }
    let weights = if ffn == Side::Host { Residence::Both } else { Residence::Device };
    LayerPlacement { weights, prefill: policy, decode: policy, kv: way.kv }
}

/// The first `on_host` blocks on the CPU.
fn place(planner: &Planner<'_>, way: Way, [embedding, head]: Ends, on_host: usize) -> Placement {
    let spec = &planner.sizes.spec;
    let n = planner.sizes.layers();
    let of = |l: usize| match l < on_host {
        true => LayerPlacement::all(Side::Host),
        false => layer(way, spec.experts_of(l).is_some()),
    };
    let on_device = way.kv == Side::Device && on_host < n;
    let device_pages = if on_device { planner.device_pages() } else { 0 };
    let on_host = way.kv == Side::Host || on_host > 0 || device_pages < planner.pages();
    Placement {
        embedding,
        layers: (0..n).map(of).collect(),
        head,
        device_pages,
        host_pages: if on_host { planner.pages() } else { 0 },
        windows: Vec::new(),
        staging: Staging::Ahead,
        copy_lane_rows: COPY_LANE_ROWS,
    }
}

/// See the [module](self).
pub(super) fn cpu_moe(planner: &Planner<'_>) -> Candidate {
    let (n, chunks) = (planner.sizes.layers(), planner.chunks());
    let mut found: Vec<(f64, Draft)> = Vec::new();
    if planner.hardware.accelerator.is_some() {
        // The host attends with sinks, where there are any.
        let sinks = planner.sizes.spec.sinks;
        for way in WAYS.into_iter().filter(|way| !sinks || way.kv == Side::Host) {
            for ends in ENDS {
                for &chunk in &chunks {
                    let fits = |k: usize| planner.memory(&place(planner, way, ends, k), chunk).fits();
                    // The fewer are on the GPU the more fit.
                    let (mut low, mut high) = (0, n);
                    while low < high {
                        let middle = low.midpoint(high);
                        if fits(middle) { high = middle } else { low = middle + 1 }
                    }
                    // With all on the CPU it is another strategy.
                    if high == n || !fits(high) {
                        continue;
                    }
                    let placement = place(planner, way, ends, high);
                    found.push((
                        planner.total(&placement, chunk),
                        draft(planner, placement, chunk, way, high),
                    ));
                }
            }
        }
    }
    if found.is_empty() {
        let all = draft(planner, place(planner, WAYS[2], ENDS[2], 0), planner.default_chunk(), WAYS[2], 0);
        return planner.candidate(Strategy::CpuMoe, all);
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.truncate(FEW);
    planner.fastest(found.into_iter().map(|f| f.1).collect(), Strategy::CpuMoe)
}

fn draft(planner: &Planner<'_>, placement: Placement, chunk: u64, way: Way, on_host: usize) -> Draft {
    let mut reason = match way.kv {
        Side::Device => "experts on the CPU, attention on the GPU".to_owned(),
        Side::Host => "experts, keys and values on the CPU".to_owned(),
    };
    if on_host > 0 {
        reason += &format!(", the first {on_host} of {} blocks on the CPU", planner.sizes.layers());
    }
    Draft::new(placement, chunk, reason)
}
