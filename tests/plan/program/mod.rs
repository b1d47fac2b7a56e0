//! Any placement and any iteration lower to a program that the checker accepts, or are refused in a sentence; programs with
//! an operation missing, repeated or out of order are not accepted; the virtual machine keeps every order that matters.

mod overlap;

use proptest::prelude::*;
use tandem::cache::PAGE_TOKENS;
use tandem::program::virtual_machine::{Timeline, run};
use tandem::program::{
    Buffer, COPY_LANE_ROWS, Far, Flow, Group, Iteration, Kind, Kv, LayerPlacement, MoveRequest, Op, Phase,
    Placement, Policy, Program, RequestId, Residence, Side, Staging, SubBatch, Unit, Wants, check, lower,
    waits,
};

const PAGE: u32 = PAGE_TOKENS as u32;

fn any_side() -> impl Strategy<Value = Side> {
    prop_oneof![Just(Side::Host), Just(Side::Device)]
}

fn any_policy() -> impl Strategy<Value = Policy> {
    // Scores and values on one side, most of the time.
    (any::<[bool; 6]>(), 0..10u8).prop_map(|(mut bits, mix)| {
        if mix > 0 {
            bits[2] = bits[1];
        }
        Policy::from_bits(bits)
    })
}

fn any_layer() -> impl Strategy<Value = LayerPlacement> {
    let weights = prop_oneof![
        Just(Residence::Both),
        Just(Residence::Streamed),
        Just(Residence::StreamedExperts),
        Just(Residence::Host),
        Just(Residence::Device)
    ];
    // Experts divided between the sides, most of the time where the device routes and both have weights.
    let divided = prop_oneof![3 => Just((0u16, false)), 1 => (1..9u16, prop::bool::weighted(0.1))];
    let policies = (any_policy(), any_policy());
    (weights, policies, any_side(), divided).prop_map(|(weights, (mut prefill, mut decode), kv, (n, any))| {
        let weights = if n > 0 && !any { Residence::Both } else { weights };
        for policy in [&mut prefill, &mut decode].into_iter().filter(|_| n > 0 && !any) {
            policy.0[4..].fill(Side::Device);
        }
        let side = match weights {
            Residence::Host => Some(Side::Host),
            Residence::Device => Some(Side::Device),
            _ => None,
        };
        // Sublayers with weights where the weights are; attention anywhere.
        let fit = |p: Policy| match side {
            Some(side) => {
                let attention = p.0[1];
                let mut all = Policy::all(side);
                (all.0[1], all.0[2]) = (attention, p.0[2]);
                all
            }
            None => p,
        };
        LayerPlacement { weights, prefill: fit(prefill), decode: fit(decode), kv, device_experts: n }
    })
}

fn any_placement() -> impl Strategy<Value = Placement> {
    let windows = (prop_oneof![Just(0u32), 1..150u32], any::<[bool; 5]>());
    let layers = prop_oneof![
        3 => prop::collection::vec(any_layer(), 1..5),
        // What rows cross on the copy lanes for.
        1 => (1..5usize).prop_map(|n| vec![LayerPlacement::all(Side::Device); n]),
    ];
    let from = (prop_oneof![Just(1), Just(COPY_LANE_ROWS)], prop_oneof![Just(0), 1..60u32]);
    (any_side(), layers, any_side(), windows, from).prop_map(
        |(embedding, layers, head, (window, which), (copy_lane_rows, stream_rows))| {
            let n = layers.len();
            let placement = Placement {
                embedding,
                layers,
                head,
                device_pages: 64,
                host_pages: 64,
                windows: vec![],
                staging: Staging::Ahead,
                copy_lane_rows,
                stream_rows,
            };
            // One window, of some layers.
            placement.with_windows((0..n).map(|l| (window > 0 && which[l]).then_some(window)))
        },
    )
}

fn any_group() -> impl Strategy<Value = Group> {
    let kv = (0..4u8, 0..4u32);
    (any::<bool>(), 0..200u32, 1..40u32, kv, 0..3u8).prop_map(
        |(decode, first, tokens, (kv, pages), wants)| {
            let boundary = (pages * PAGE).min(first / PAGE * PAGE);
            Group {
                request: RequestId { slot: 0, generation: 0 },
                phase: if decode { Phase::Decode } else { Phase::Prefill },
                first,
                tokens: if decode { 1 } else { tokens },
                kv: match kv {
                    0 => Kv::Device,
                    1 => Kv::Host,
                    2 => Kv::Split { boundary, far: Far::Attend },
                    _ => Kv::Split { boundary, far: Far::Stream },
                },
                wants: if decode {
                    Wants::Last
                } else {
                    [Wants::Nothing, Wants::Last, Wants::All][wants as usize]
                },
            }
        },
    )
}

fn any_iteration() -> impl Strategy<Value = Iteration> {
    (prop::collection::vec(any_group(), 1..7), any::<bool>(), any::<bool>(), 0..7usize, any::<bool>())
        .prop_map(|(mut groups, two, lanes, cut, pick)| {
            for (slot, g) in groups.iter_mut().enumerate() {
                g.request.slot = slot as u32;
            }
            let moves: Vec<MoveRequest> = groups
                .iter()
                .filter_map(|g| match g.kv {
                    Kv::Split { boundary, .. } if boundary >= 2 * PAGE => Some(MoveRequest {
                        request: g.request,
                        to: Side::Host,
                        pages: boundary / PAGE - 1..boundary / PAGE,
                    }),
                    _ => None,
                })
                .collect();
            let rest = if two { groups.split_off(cut.min(groups.len())) } else { Vec::new() };
            let sub_batches = [groups, rest].into_iter().map(SubBatch::of).collect();
            let flow = if lanes { Flow::TwoLanes } else { Flow::Serial };
            Iteration { sub_batches, moves, flow, pick, top: false }
        })
}

/// Some made-up duration for each operation.
fn seconds(op: &Op) -> f64 {
    let layer = f64::from(op.layer.unwrap_or(7) + 1);
    match op.unit {
        Unit::Gpu => 1.0 + op.work.rows as f64 * 0.01,
        Unit::Host => 3.0 + op.work.kv_tokens as f64 * 0.02,
        Unit::H2d => 2.0 + layer,
        Unit::D2h => 0.5 * layer,
    }
}

/// Of every two operations that share memory, the earlier is done before the later begins.
fn in_order(program: &Program, timeline: &Timeline) -> Result<(), TestCaseError> {
    let ops = &program.ops;
    // Operations without length are of cohorts that stay parked.
    let ran = |&(i, _): &(usize, &Op)| timeline.spans[i].end > timeline.spans[i].start;
    for (j, later) in ops.iter().enumerate().filter(ran) {
        for (i, earlier) in ops.iter().enumerate().take(j).filter(ran) {
            if share_memory(earlier, later) {
                prop_assert!(
                    timeline.spans[i].end <= timeline.spans[j].start + 1e-9,
                    "{i} {earlier:?} and {j} {later:?} share memory"
                );
            }
        }
    }
    for unit in Unit::ALL {
        let ran = timeline.spans.iter().filter(|s| s.unit == unit && s.end > s.start);
        let mut spans: Vec<_> = ran.collect();
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        prop_assert!(
            spans.windows(2).all(|w| w[0].end <= w[1].start + 1e-9),
            "two operations at once on {unit:?}"
        );
    }
    Ok(())
}

fn share_memory(earlier: &Op, later: &Op) -> bool {
    later.reads.iter().any(|r| earlier.writes.iter().any(|w| w.overlaps(r)))
        || later.writes.iter().any(|w| earlier.writes.iter().chain(&earlier.reads).any(|r| r.overlaps(w)))
}

/// Of every two operations that share memory, the later waits for the earlier: by what it waits for and the order of its lane, and what
/// those wait for, however long anything takes.
fn implied(program: &Program) -> Result<(), TestCaseError> {
    let ops = &program.ops;
    let mut last = [None; 4];
    let mut before: Vec<Vec<bool>> = Vec::new();
    for (j, (later, waits)) in ops.iter().zip(waits(program)).enumerate() {
        let mut all = vec![false; j];
        // A carry ends, or begins, in a job of the host.
        let in_order = later.unit != Unit::Host && !matches!(later.kind, Kind::Carry { .. });
        let in_lane = in_order.then_some(last[later.unit as usize]).flatten();
        for i in waits.into_iter().chain(in_lane) {
            all[i] = true;
            all.iter_mut().zip(&before[i]).for_each(|(all, &of)| *all |= of);
        }
        if in_order {
            last[later.unit as usize] = Some(j);
        }
        for (i, earlier) in ops[..j].iter().enumerate() {
            prop_assert!(
                all[i] || !share_memory(earlier, later),
                "{i} {earlier:?} and {j} {later:?} share memory"
            );
        }
        before.push(all);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_placement_lowers_to_a_right_program_or_is_refused(placement in any_placement(), iteration in any_iteration()) {
        match lower(&placement, &iteration) {
            Ok(program) => {
                prop_assert!(!program.ops.is_empty());
                if let Err(fault) = check(&program, &placement, &iteration) {
                    let ops: Vec<String> = program.ops.iter().enumerate().map(|(i, o)| format!("{i}: {:?} {:?} {:?} {:?}", o.unit, o.layer, o.kind, o.rows)).collect();
                    prop_assert!(false, "{fault}\n{}", ops.join("\n"));
                }
                implied(&program)?;
                // Whichever unit is slow, so that the order is that of waits and not of durations.
                for slow in [[1.0; 4], [0.01, 50.0, 1.0, 30.0], [50.0, 0.01, 30.0, 0.01], [1.0, 1.0, 50.0, 0.01]] {
                    in_order(&program, &run(&program, &|op: &Op| slow[op.unit as usize] * seconds(op)))?;
                }
            }
            Err(e) => prop_assert!(["policy", "sublayer", "divided"].iter().any(|w| e.to_string().contains(w)), "{e}"),
        }
    }

    #[test]
    fn a_program_that_lacks_an_operation_is_not_accepted(
        placement in any_placement(), iteration in any_iteration(), at in any::<prop::sample::Index>()
    ) {
        let Ok(mut program) = lower(&placement, &iteration) else { return Ok(()) };
        let at = at.index(program.ops.len());
        let gone = program.ops.remove(at);
        prop_assert!(check(&program, &placement, &iteration).is_err(), "without {at}, {gone:?}");
    }

    #[test]
    fn an_operation_that_reads_before_it_is_written_is_not_accepted(
        placement in any_placement(), iteration in any_iteration(), at in any::<prop::sample::Index>()
    ) {
        let Ok(mut program) = lower(&placement, &iteration) else { return Ok(()) };
        // The first operation that reads what another has written, moved before that one.
        let waits: Vec<Vec<usize>> = (0..program.ops.len())
            .map(|j| {
                let later = &program.ops[j];
                (0..j).filter(|&i| {
                    // The last writer of what it reads.
                    later.reads.iter().any(|r| program.ops[i].writes.iter().any(|w| w.overlaps(r))
                        && !(i + 1..j).any(|k| program.ops[k].writes.iter().any(|w| w.overlaps(r))))
                }).collect()
            })
            .collect();
        let pairs: Vec<(usize, usize)> =
            waits.iter().enumerate().flat_map(|(j, w)| w.iter().map(move |&i| (i, j))).collect();
        prop_assume!(!pairs.is_empty());
        let (i, j) = pairs[at.index(pairs.len())];
        let op = program.ops.remove(j);
        program.ops.insert(i, op);
        prop_assert!(check(&program, &placement, &iteration).is_err(), "{j} before {i}: {:?}", program.ops[i]);
    }
}

fn decode(slot: u32, first: u32, kv: Kv) -> Group {
    Group {
        request: RequestId { slot, generation: 0 },
        phase: Phase::Decode,
        first,
        tokens: 1,
        kv,
        wants: Wants::Last,
    }
}

#[test]
fn one_sided_placements_are_one_segment_without_transfers() {
    let iteration = Iteration::serial(vec![decode(0, 5, Kv::Device), decode(1, 9, Kv::Device)], true);
    for (side, unit) in [(Side::Host, Unit::Host), (Side::Device, Unit::Gpu)] {
        let program = lower(&Placement::all(side, 3, 8), &iteration).unwrap();
        assert_eq!(program.one_unit(), Some(unit));
        // embed, (project, append, attend, out, up, down) per layer, head, pick
        assert_eq!(program.ops.len(), 1 + 3 * 6 + 2);
    }
}

#[test]
fn a_boundary_costs_one_crossing_of_the_hidden_state() {
    let iteration = Iteration::serial(vec![decode(0, 5, Kv::Device)], true);
    for k in 1..=5 {
        let placement = Placement::boundary(k, 4, 8, 8);
        let program = lower(&placement, &iteration).unwrap();
        check(&program, &placement, &iteration).unwrap();
        let carries = program.ops.iter().filter(|op| matches!(op.kind, Kind::Carry { .. })).count();
        assert_eq!(carries, 1, "k = {k}");
        assert_eq!(program.ops.iter().filter(|op| op.unit == Unit::H2d).count(), 1);
    }
    assert_eq!(Placement::boundary(0, 4, 8, 8), Placement::all(Side::Device, 4, 8));
    assert_eq!(Placement::boundary(6, 4, 8, 8), Placement::all(Side::Host, 4, 8));
}

#[test]
fn attention_on_the_host_is_published_and_collected_once_a_layer() {
    let layer = LayerPlacement {
        weights: Residence::Device,
        prefill: Policy::ATTENTION_ON_HOST,
        decode: Policy::ATTENTION_ON_HOST,
        kv: Side::Host,
        device_experts: 0,
    };
    let placement = Placement { layers: vec![layer; 3], ..Placement::all(Side::Device, 3, 8) };
    let iteration = Iteration::serial(vec![decode(0, 40, Kv::Device)], true);
    let program = lower(&placement, &iteration).unwrap();
    check(&program, &placement, &iteration).unwrap();
    let count = |name: &str| program.ops.iter().filter(|op| op.kind.name() == name).count();
    assert_eq!(
        (count("publish"), count("append"), count("attend"), count("collect"), count("carry")),
        (3, 3, 3, 3, 0)
    );
    assert!(program.ops.iter().filter(|op| op.kind.name() == "attend").all(|op| op.unit == Unit::Host));
}

/// Streamed experts cross for the rows that the device computes, and only the products of the feed-forward wait for them.
#[test]
fn streamed_experts_cross_for_prompts_alone() {
    let device = Policy::all(Side::Device);
    let mut decode_policy = device;
    decode_policy.0[4..].fill(Side::Host);
    let layer = LayerPlacement {
        weights: Residence::StreamedExperts,
        prefill: device,
        decode: decode_policy,
        kv: Side::Device,
        device_experts: 0,
    };
    let placement = Placement { layers: vec![layer; 3], ..Placement::all(Side::Device, 3, 8) };
    let prompt = Group { phase: Phase::Prefill, tokens: 20, ..decode(0, 0, Kv::Device) };
    let row = decode(0, 40, Kv::Device);
    for (group, from, crossings, reading) in
        [(prompt, 0, 3, 6), (prompt, 20, 3, 6), (prompt, 21, 0, 0), (row, 0, 0, 0)]
    {
        let placement = Placement { stream_rows: from, ..placement.clone() };
        let iteration = Iteration::serial(vec![group], true);
        let program = lower(&placement, &iteration).unwrap();
        check(&program, &placement, &iteration).unwrap();
        let staged = |op: &&Op| op.reads.iter().any(|r| matches!(r.buffer, Buffer::Weights(_)));
        let streams = program.ops.iter().filter(|op| matches!(op.kind, Kind::Stream { experts: true, .. }));
        assert_eq!(streams.count(), crossings);
        let readers: Vec<Kind> = program.ops.iter().filter(staged).map(|op| op.kind).collect();
        assert_eq!(readers.len(), reading);
        assert!(readers.iter().all(|k| matches!(k, Kind::FfnUp { .. } | Kind::FfnDown)), "{readers:?}");
        // A program whose copy is left out, or is of the whole layer, is found out.
        if let Some(at) = program.ops.iter().position(|op| matches!(op.kind, Kind::Stream { .. })) {
            let mut without = program.clone();
            without.ops.remove(at);
            check(&without, &placement, &iteration).unwrap_err();
            let mut whole = program;
            whole.ops[at].kind = Kind::Stream { slot: 0, experts: false };
            check(&whole, &placement, &iteration).unwrap_err();
        }
    }
}

/// Pages that a layer's window has left are not streamed, and nobody attends them: of such layers the host has nothing to do.
#[test]
fn pages_behind_a_window_stay_where_they_are() {
    let windows = [Some(64), None, Some(64)];
    let placement = Placement::all(Side::Device, 3, 8).with_windows(windows);
    for (first, phase, tokens) in
        [(300, Phase::Decode, 1), (280, Phase::Decode, 1), (300, Phase::Prefill, 30)]
    {
        for far in [Far::Stream, Far::Attend] {
            let kv = Kv::Split { boundary: 256, far };
            let iteration =
                Iteration::serial(vec![Group { first, phase, tokens, ..decode(0, 300, kv) }], true);
            let program = lower(&placement, &iteration).unwrap();
            check(&program, &placement, &iteration).unwrap();
            let of = |l: u32| program.ops.iter().filter(move |op| op.layer == Some(l));
            let pages = |l: u32| -> u64 {
                let moved = of(l).filter(|op| op.kind.name() == "page_in");
                moved.map(|op| op.work.pages).sum()
            };
            // Row 280 sees tokens from 217 on, of pages 6 and 7; row 300 from 237 on, of page 7.
            let left = if first == 280 { 2 } else { 1 };
            let want = if far == Far::Stream { [left, 8, left] } else { [0; 3] };
            assert_eq!([pages(0), pages(1), pages(2)], want, "{first} {far:?}");
            // A window of 32 has left them all.
            let narrow = Placement::all(Side::Device, 3, 8).with_windows([Some(32), None, Some(32)]);
            let iteration = Iteration {
                sub_batches: vec![SubBatch::of(vec![Group {
                    first: 300,
                    ..iteration.sub_batches[0].groups[0]
                }])],
                ..iteration
            };
            let program = lower(&narrow, &iteration).unwrap();
            check(&program, &narrow, &iteration).unwrap();
            for l in [0, 2] {
                let names: Vec<_> =
                    program.ops.iter().filter(|op| op.layer == Some(l)).map(|op| op.kind.name()).collect();
                assert_eq!(
                    names,
                    ["project", "append", "attend", "out_proj", "ffn_up", "ffn_down"],
                    "{far:?}"
                );
            }
            assert!(program.ops.iter().all(|op| op.unit == Unit::Gpu || op.layer == Some(1)));
        }
    }
}

/// Rows without logits end with the last layer's keys and values: behind its attention only those from the first that wants logits to
/// the last are computed, and carried.
#[test]
fn rows_without_logits_are_not_computed_behind_the_last_attention() {
    let prompt = |slot, wants| Group {
        first: 0,
        tokens: 40,
        phase: Phase::Prefill,
        wants,
        ..decode(slot, 0, Kv::Device)
    };
    let groups = vec![prompt(0, Wants::Nothing), prompt(1, Wants::Last), decode(2, 9, Kv::Device)];
    let iteration = Iteration::serial(groups, true);
    for placement in [
        Placement::all(Side::Device, 3, 8),
        Placement::all(Side::Host, 3, 8),
        Placement::boundary(4, 3, 8, 8),
        Placement { head: Side::Host, ..Placement::all(Side::Device, 3, 8) },
    ] {
        let program = lower(&placement, &iteration).unwrap();
        check(&program, &placement, &iteration).unwrap();
        let whole = [(0..80), (80..81), (0..81)];
        let mut last = 0;
        for op in program.ops.iter().filter(|op| op.layer == Some(2) || op.layer.is_none()) {
            match op.kind.name() {
                "embed" | "project" | "append" => assert!(whole.contains(&op.rows), "{op:?}"),
                // Kernels take whole sequences.
                "attend" if op.unit == Unit::Gpu => assert!(op.rows.start <= 79),
                _ => {
                    assert!([(79..80), (80..81), (79..81)].contains(&op.rows), "{op:?}");
                    last += 1;
                }
            }
        }
        assert!(last >= 5, "{last} operations");
    }
}

/// Weights cross the link under the computation of the layer before: two buffers, each reused only when its layer is done.
#[test]
fn streamed_weights_hide_behind_the_layers_before() {
    let layer = LayerPlacement { weights: Residence::Streamed, ..LayerPlacement::all(Side::Device) };
    let placement = Placement { layers: vec![layer; 10], ..Placement::all(Side::Device, 10, 8) };
    let iteration = Iteration::serial(vec![decode(0, 40, Kv::Device)], true);
    let program = lower(&placement, &iteration).unwrap();
    check(&program, &placement, &iteration).unwrap();
    assert_eq!(program.ops.iter().filter(|op| op.unit == Unit::H2d).count(), 10);
    for (stream, compute) in [(6.0, 1.0), (6.0, 6.0), (3.0, 1.0)] {
        let costs = |op: &Op| if op.unit == Unit::H2d { stream } else { compute };
        let timeline = run(&program, &costs);
        let (gpu, link) = (timeline.busy(Unit::Gpu), timeline.busy(Unit::H2d));
        let hidden = timeline.overlap(Unit::Gpu, Unit::H2d) / gpu.min(link);
        // All but the first transfer, or all but the last layer, can hide.
        assert!(hidden >= 0.79, "{hidden} hidden of gpu {gpu} and link {link}");
        assert!(timeline.seconds() <= gpu.max(link) + stream + 7.0 * compute);
    }
}

/// Pages of keys and values that lie in host memory cross the link beside streamed weights, and both hide under the computation of the
/// layers before, or it under them: a layer takes what the longest of the three takes, whatever share of the link is the pages'.
#[test]
fn streamed_pages_and_weights_hide_behind_the_layers_before() {
    let resident = LayerPlacement { kv: Side::Host, ..LayerPlacement::all(Side::Device) };
    let streamed = LayerPlacement { weights: Residence::Streamed, ..resident };
    // A second chunk of a prompt, over pages of the first that the host keeps.
    let chunk = |slot| Group {
        first: 512,
        tokens: 512,
        phase: Phase::Prefill,
        wants: Wants::Last,
        ..decode(slot, 0, Kv::Host)
    };
    let n = 24;
    for every in [1, 2] {
        let layers = (0..n).map(|l| if l % every == 0 { streamed } else { resident }).collect();
        let placement = Placement { layers, ..Placement::all(Side::Device, n, 0) };
        for flow in [Flow::Serial, Flow::TwoLanes] {
            let mut iteration = Iteration::serial(vec![chunk(0)], true);
            iteration.flow = flow;
            if flow == Flow::TwoLanes {
                iteration.sub_batches.push(SubBatch::of(vec![chunk(1)]));
            }
            let batches = iteration.sub_batches.len() as f64;
            let program = lower(&placement, &iteration).unwrap();
            check(&program, &placement, &iteration).unwrap();
            for (weights, pages, compute) in
                [(6.0, 2.0, 1.0), (6.0, 2.0, 1.8), (2.0, 6.0, 1.8), (3.0, 3.0, 3.0), (1.0, 1.0, 4.0)]
            {
                let costs = |op: &Op| match op.kind {
                    Kind::Stream { .. } => weights,
                    Kind::PageIn { .. } | Kind::PageOut { .. } => pages,
                    kind if kind.product().is_some() => compute,
                    _ => 0.0,
                };
                let timeline = run(&program, &costs);
                let busy = |unit| timeline.busy(unit);
                let longest = busy(Unit::Gpu).max(busy(Unit::H2d)).max(busy(Unit::D2h));
                let case = format!("{flow:?}, every {every}: {weights} {pages} {compute}");
                // Nothing hides the first layer's copies, nor the last layer's computation.
                let ends = weights + batches * (2.0 * pages + 4.0 * compute);
                assert!(timeline.seconds() <= longest + ends, "{case}: {} of {longest}", timeline.seconds());
                println!("{case}: {:.3} of the longest", timeline.seconds() / longest);
            }
        }
    }
}

/// In lock step the host attends one sub-batch while the device computes the other (NEO): a layer takes what the slower takes,
/// not the sum.
#[test]
fn two_lanes_overlap_host_attention_with_the_other_sub_batch() {
    let placement = Placement::all(Side::Device, 8, 64);
    let batch = |slots: std::ops::Range<u32>| SubBatch::of(slots.map(|s| decode(s, 100, Kv::Host)).collect());
    let iteration = |flow| Iteration {
        sub_batches: vec![batch(0..4), batch(4..8)],
        moves: Vec::new(),
        flow,
        pick: true,
        top: false,
    };
    let costs = |op: &Op| match op.kind {
        Kind::Attend { .. } => 10.0,
        Kind::OutProj | Kind::FfnUp { .. } | Kind::FfnDown | Kind::Project { .. } => 2.5,
        _ => 0.0,
    };
    let time = |flow| {
        let iteration = iteration(flow);
        let program = lower(&placement, &iteration).unwrap();
        check(&program, &placement, &iteration).unwrap();
        run(&program, &costs).seconds()
    };
    let (lanes, serial) = (time(Flow::TwoLanes), time(Flow::Serial));
    // Host: 8 layers x 2 x 10; the device's 10 a sub-batch and layer hide but for the ends.
    assert!(lanes <= 160.0 + 2.0 * 10.0, "{lanes}");
    assert!(serial >= lanes, "{serial} {lanes}");
}

#[test]
fn what_cannot_run_is_refused_in_a_sentence() {
    let mut placement = Placement::all(Side::Device, 2, 8);
    placement.layers[1].decode = Policy::from_bits([false, true, false, false, false, false]);
    let iteration = Iteration::serial(vec![decode(0, 5, Kv::Device)], true);
    let message = lower(&placement, &iteration).unwrap_err().to_string();
    assert!(message.contains("scores and values on different sides"), "{message}");
    placement.layers[1].decode = Policy::ATTENTION_ON_HOST;
    let message = lower(&placement, &iteration).unwrap_err().to_string();
    assert!(message.contains("kept on the device"), "{message}");
    placement.layers[1].decode = Policy::all(Side::Host);
    let message = lower(&placement, &iteration).unwrap_err().to_string();
    assert!(message.contains("layer 1") || message.contains("kept on the device"), "{message}");
    let split = Kv::Split { boundary: 33, far: Far::Attend };
    let iteration = Iteration::serial(vec![decode(0, 50, split)], true);
    let message = lower(&Placement::all(Side::Device, 2, 8), &iteration).unwrap_err().to_string();
    assert!(message.contains("multiple of"), "{message}");
}

#[test]
fn programs_are_data() {
    let iteration = Iteration::serial(vec![decode(0, 5, Kv::Device)], true);
    let placement = Placement::boundary(2, 3, 8, 8);
    let text = serde_json::to_string(&placement).unwrap();
    assert_eq!(serde_json::from_str::<Placement>(&text).unwrap(), placement);
    let text = serde_json::to_string(&iteration).unwrap();
    assert_eq!(serde_json::from_str::<Iteration>(&text).unwrap(), iteration);
    let program = lower(&placement, &iteration).unwrap();
    assert!(serde_json::to_string(&program).unwrap().contains("out_proj"));
    assert_eq!(waits(&program).len(), program.ops.len());
}
