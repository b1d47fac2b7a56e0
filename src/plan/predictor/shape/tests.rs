//! Programs of many layers, put together from few, are those that lowering makes.

use super::*;
use crate::model::synth;
use crate::program::Residence;

/// The classes of a lane: phase, where keys and values are, stored tokens, and new ones.
type Lane<'a> = &'a [(Phase, Kv, u32, u32)];

fn step(flow: Flow, lanes: &[Lane<'_>], moves: &[(Side, u32)]) -> Iteration {
    let mut slot = 0;
    let mut batch = |lane: &Lane<'_>| {
        let group = |&(phase, kv, first, tokens): &(Phase, Kv, u32, u32)| {
            slot += 1;
            let wants = if tokens == 3 { Wants::Nothing } else { Wants::Last };
            Group { request: RequestId { slot, generation: 0 }, phase, first, tokens, kv, wants }
        };
        SubBatch::from(lane.iter().map(group).collect::<Vec<_>>())
    };
    let sub_batches = lanes.iter().map(&mut batch).collect();
    let moves = moves.iter().map(|&(to, slot)| MoveRequest {
        request: RequestId { slot, generation: 0 },
        to,
        pages: 0..3,
    });
    Iteration { sub_batches, moves: moves.collect(), flow, pick: true, top: false }
}

/// All in device memory; some layers on the host; weights of some streamed; all of them.
fn placements(sizes: &Sizes) -> Vec<Placement> {
    let n = sizes.layers();
    let on_device = Placement { host_pages: 5000, ..Placement::all(Side::Device, n, 1000) };
    let mut split = on_device.clone();
    for at in &mut split.layers[n - 11..] {
        *at = LayerPlacement::all(Side::Host);
    }
    let streams = |from: usize| {
        let mut streamed = on_device.clone();
        streamed.layers[from..].iter_mut().for_each(|at| at.weights = Residence::Streamed);
        streamed
    };
    vec![split, streams(0), streams(15), streams(n - 4), on_device]
}

#[test]
fn layers_that_repeat_are_lowered_once() {
    use Phase::{Decode, Prefill};
    let device = (Decode, Kv::Device, 40, 1);
    let host = (Decode, Kv::Host, 50, 1);
    let prompts = [(Prefill, Kv::Host, 0, 20), (Prefill, Kv::Host, 32, 3), (Prefill, Kv::Device, 17, 9)];
    let stored = [(Prefill, Kv::Host, 37, 20), host];
    let lanes: [&[Lane<'_>]; 7] = [
        &[&[device]],
        &[&[host, device]],
        &[&prompts],
        &[&stored],
        &[&[prompts[0], device, host], &[host]],
        &[&[prompts[1], prompts[2], device], &[prompts[0], host]],
        &[&[device], &stored],
    ];
    let moves: [&[(Side, u32)]; 4] =
        [&[], &[(Side::Host, 99)], &[(Side::Host, 1)], &[(Side::Host, 99), (Side::Device, 2)]];
    let (mut unrolled_ones, mut all) = (0, 0);
    for model in ["llama-3.1-8b", "qwen3-14b"] {
        let sizes = Sizes::of_spec(&synth::spec(model).unwrap());
        for placement in placements(&sizes) {
            let kinds = LayerKinds::of(&sizes, &placement);
            let each: Vec<usize> = kinds.runs.iter().map(|&(_, n)| n).collect();
            let few: Vec<usize> = each.iter().map(|&n| unroll::lowered(n)).collect();
            for (lanes, moves) in lanes.iter().flat_map(|l| moves.iter().map(move |m| (*l, *m))) {
                let flow = if lanes.len() == 1 { Flow::Serial } else { Flow::TwoLanes };
                let iteration = step(flow, lanes, moves);
                let sums = Sums::of(&iteration, &kinds);
                let shape =
                    Shape::of(&placement, &iteration, &kinds, &sums, &MovesToSide::of(&iteration, &kinds));
                let mut ops = Vec::new();
                // Pages of a layer on the host do not move between the sides.
                let Ok(want) = program(&shape, &placement, &kinds, &each, &mut ops) else { continue };
                let known = ops.len();
                let short = program(&shape, &placement, &kinds, &few, &mut ops).unwrap();
                all += 1;
                let Some(got) = unrolled(short, &few, &each) else { continue };
                unrolled_ones += 1;
                let plain = |run: &Run| -> Vec<_> {
                    run.program
                        .ops
                        .iter()
                        .map(|o| (o.kind, o.unit, o.layer, o.sub_batch, o.groups.clone()))
                        .collect()
                };
                assert_eq!(got.program.ops.len(), want.program.ops.len(), "{iteration:?}");
                for (at, (got, want)) in plain(&got).into_iter().zip(plain(&want)).enumerate() {
                    assert_eq!(got, want, "operation {at}: {iteration:?}");
                }
                assert_eq!((got.waits, got.priced), (want.waits, want.priced), "{iteration:?}");
                assert_eq!(ops.len(), known);
            }
        }
    }
    println!("{unrolled_ones} of {all}");
    assert!(all > 150 && unrolled_ones * 20 >= all * 19, "{unrolled_ones} of {all}");
}
