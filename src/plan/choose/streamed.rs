//! What strategies share whose blocks are streamed: where keys and values are, and how many blocks can stay on the GPU.

use super::planner::{Ends, Planner};
use crate::plan::search::most as most_that_fit;
use crate::program::{COPY_LANE_ROWS, LayerPlacement, Placement, Policy, Residence, Side, Staging};

/// Placements whose programs are run.
pub(super) const FEW: usize = 3;

/// Where keys and values are, and who attends them in decode.
#[derive(Clone, Copy)]
pub(super) struct Way {
    kv: Side,
    decode: Policy,
    pub says: &'static str,
}

/// A table that only looks up rows stays where it is.
pub(super) const HEAD_ON_GPU: Ends = [Side::Host, Side::Device];

pub(super) const ON_GPU: Way = Way { kv: Side::Device, decode: Policy::all(Side::Device), says: "" };

pub(super) const WAYS: [Way; 3] = [
    ON_GPU,
    Way { kv: Side::Host, decode: Policy::ATTENTION_ON_HOST, says: ", decode attention on the CPU" },
    Way { kv: Side::Host, decode: Policy::all(Side::Device), says: ", keys and values streamed, too" },
];

/// Blocks `resident` on the GPU, the others streamed.
pub(super) fn streamed(
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
pub(super) fn most(planner: &Planner<'_>, chunk: u64, place: impl Fn(usize) -> Placement) -> Option<usize> {
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
