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

/// A block with its attention's products on the GPU.
fn layer(sides: Sides, experts: bool) -> LayerPlacement {
    let ffn = if experts { Side::Host } else { sides.dense };
    let mut policy = Policy::all(Side::Device);
    for (sublayer, side) in [
        (Sublayer::Scores, sides.kv),
        (Sublayer::Values, sides.kv),
        (Sublayer::Up, ffn),
        (Sublayer::Down, ffn),
    ] {
        policy.0[sublayer as usize] = side;
    }
    let weights = if ffn == Side::Host { Residence::Both } else { Residence::Device };
    LayerPlacement { weights, prefill: policy, decode: policy, kv: sides.kv }
}

/// The first `on_host` blocks on the CPU.
fn place(planner: &Planner<'_>, sides: Sides, [embedding, head]: Ends, on_host: usize) -> Placement {
    let spec = &planner.sizes.spec;
    let n = planner.sizes.layers();
    let of = |l: usize| match l < on_host {
        true => LayerPlacement::all(Side::Host),
        false => layer(sides, spec.experts_of(l).is_some()),
    };
    let on_device = sides.kv == Side::Device && on_host < n;
    let device_pages = if on_device { planner.device_pages() } else { 0 };
    let on_host = sides.kv == Side::Host || on_host > 0 || device_pages < planner.pages();
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
        for sides in SIDES.into_iter().filter(|sides| !sinks || sides.kv == Side::Host) {
            for ends in ENDS {
                for &chunk in &chunks {
                    let fits = |k: usize| planner.memory(&place(planner, sides, ends, k), chunk).fits();
                    let on_host = n - most(n, |on_gpu| fits(n - on_gpu));
                    // With all on the CPU it is another strategy.
                    if on_host == n {
                        continue;
                    }
                    let placement = place(planner, sides, ends, on_host);
                    found.push((
                        planner.total(&placement, chunk),
                        draft(planner, placement, chunk, sides, on_host),
                    ));
                }
            }
        }
    }
    if found.is_empty() {
        let all = draft(planner, place(planner, SIDES[2], ENDS[2], 0), planner.default_chunk(), SIDES[2], 0);
        return planner.candidate(Strategy::CpuMoe, all);
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.truncate(FEW);
    planner.fastest(found.into_iter().map(|f| f.1).collect(), Strategy::CpuMoe)
}

fn draft(planner: &Planner<'_>, placement: Placement, chunk: u64, sides: Sides, on_host: usize) -> Draft {
    let mut reason = match sides.kv {
        Side::Device => "experts on the CPU, attention on the GPU".to_owned(),
        Side::Host => "experts, keys and values on the CPU".to_owned(),
    };
    if on_host > 0 {
        reason += &format!(", the first {on_host} of {} blocks on the CPU", planner.sizes.layers());
    }
    Draft::new(placement, chunk, reason)
}
