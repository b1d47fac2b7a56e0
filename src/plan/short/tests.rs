use super::*;
use crate::model::synth;
use crate::plan::{Roofline, hardware};
use crate::program::{Flow, PageMove, RequestId};

fn group(slot: u32, phase: Phase, first: u32, tokens: u32, kv: Kv, wants: Wants) -> Group {
    Group { request: RequestId { slot, generation: 0 }, phase, first, tokens, kv, wants }
}

/// Decode rows with keys and values on `kv`, with different lengths.
fn decode(n: u32, kv: Kv, base: u32) -> Vec<Group> {
    (0..n).map(|i| group(base + i, Phase::Decode, 100 + 37 * i % 900, 1, kv, Wants::Last)).collect()
}

fn prompt(slot: u32, tokens: u32, kv: Kv) -> Group {
    group(slot, Phase::Prefill, 0, tokens, kv, Wants::Last)
}

fn iterations() -> Vec<Iteration> {
    let of = |batches: Vec<Vec<Group>>, flow| {
        let sub_batches = batches.into_iter().map(|groups| SubBatch { groups, at: None }).collect();
        Iteration { sub_batches, moves: Vec::new(), flow, pick: false }
    };
    let mixed = [
        vec![prompt(0, 300, Kv::Host), prompt(1, 200, Kv::Device)],
        decode(20, Kv::Device, 10),
        decode(15, Kv::Host, 100),
    ]
    .concat();
    let mut swapped = of(vec![mixed.clone(), decode(150, Kv::Host, 200)], Flow::TwoLanes);
    swapped.moves = vec![PageMove { request: mixed[5].request, to: Side::Device, pages: 0..20 }];
    vec![
        of(vec![decode(1, Kv::Device, 0)], Flow::Serial),
        of(vec![decode(300, Kv::Device, 0)], Flow::Serial),
        of(vec![vec![prompt(0, 700, Kv::Device)]], Flow::Serial),
        of(vec![mixed.clone()], Flow::Serial),
        of(vec![decode(40, Kv::Host, 0)], Flow::Serial),
        of(vec![decode(200, Kv::Host, 0), decode(200, Kv::Host, 500)], Flow::TwoLanes),
        of(vec![mixed, decode(60, Kv::Host, 200)], Flow::TwoLanes),
        swapped,
    ]
}

/// The whole model's program, group by group, takes what its few layers say.
#[test]
fn a_few_layers_say_what_all_of_them_take() {
    for (spec, machine) in
        [("llama-2-7b", "t4-xeon"), ("llama-3.1-8b", "a10g-g5"), ("gemma-3-1b", "rtx4060-laptop")]
    {
        let sizes = Sizes::of_spec(&synth::spec(spec).unwrap());
        let mut machine = hardware::named(machine).unwrap();
        // Copies slow down attention on the host.
        machine.efficiency.cpu_beside_copies = 0.6;
        let costs = Roofline::new(&machine, &sizes);
        let placement = Placement { host_pages: 1000, ..Placement::all(Side::Device, sizes.layers(), 1000) };
        let short = Short::new(&costs, &sizes, &placement);
        for (i, iteration) in iterations().iter().enumerate() {
            let program = lower(&placement, iteration).unwrap();
            let line =
                run(&program, &OpCosts::new(&costs, &sizes).of(iteration).on(&placement).beside(&program));
            let (want, got) = (line.seconds(), short.seconds(iteration).unwrap());
            assert!((got.all / want - 1.0).abs() < 0.02, "{spec} {i}: {} for {want}", got.all);
            for (unit, busy) in Unit::ALL.iter().zip(got.busy) {
                let want = line.busy(*unit);
                assert!(
                    (busy - want).abs() < 0.02 * want.max(line.seconds()),
                    "{spec} {i} {unit:?}: {busy} for {want}"
                );
            }
        }
    }
}

/// Windows are of each request's own position: long ones are cut, short ones are not.
#[test]
fn windows_cut_each_request_by_itself() {
    let sizes = Sizes::of_spec(&synth::spec("gemma-3-1b").unwrap());
    let window = sizes.blocks.iter().find_map(|b| b.window).unwrap();
    let groups = [10, 2000].map(|first| group(first, Phase::Decode, first, 1, Kv::Device, Wants::Last));
    let iteration = Iteration::serial(groups.to_vec(), false);
    let (few, members) = condensed(&iteration);
    assert_eq!((few.sub_batches[0].groups.len(), few.sub_batches[0].rows()), (1, 2));
    assert_eq!(scans(&iteration, &members, Some(window))[0][0].kv_tokens, 11 + window);
    assert_eq!(scans(&iteration, &members, None)[0][0].kv_tokens, 11 + 2001);
}
