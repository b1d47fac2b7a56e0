//! Asynchronous overlap: any sequence of iterations with any cohorts, whenever they are ready, takes every row through every
//! sublayer once and in order; the device waits for nobody.

use std::collections::HashMap;
use std::iter::successors;

use proptest::prelude::*;
use tandem::program::virtual_machine::{Carried, run, run_from};
use tandem::program::{
    Flow, Group, Iteration, Kind, Kv, LayerPlacement, Op, ParkedRows, Placement, Policy, RequestId,
    Residence, Side, SubBatch, Unit, check, lower,
};

use super::{decode, in_order};

/// Attention of cohorts on the host, products on either side.
fn placements() -> impl Strategy<Value = Placement> {
    let weights = prop_oneof![Just(Residence::Device), Just(Residence::Streamed), Just(Residence::Both)];
    let layer = (weights, any::<bool>(), 0..6u8).prop_map(|(weights, host, products)| {
        let kv = if host { Side::Host } else { Side::Device };
        let decode = match (host, products) {
            (true, 1) if weights != Residence::Device => Policy::all(Side::Host),
            // All but the projection of queries, keys and values.
            (true, 2) if weights != Residence::Device => {
                Policy::from_bits([false, true, true, true, true, true])
            }
            // Experts behind the device's attention.
            (true, 3) if weights != Residence::Device => {
                Policy::from_bits([false, true, true, false, true, true])
            }
            // Half of a feed-forward.
            (true, 4) if weights != Residence::Device => {
                Policy::from_bits([false, true, true, false, false, true])
            }
            (true, _) => Policy::ATTENTION_ON_HOST,
            _ => Policy::all(Side::Device),
        };
        let device_experts = if (host, products, weights) == (true, 5, Residence::Both) { 3 } else { 0 };
        LayerPlacement { weights, prefill: decode, decode, kv, device_experts }
    });
    let end = || prop_oneof![3 => Just(Side::Device), 1 => Just(Side::Host)];
    (prop::collection::vec(layer, 1..6), end(), end()).prop_map(|(layers, embedding, head)| Placement {
        layers,
        embedding,
        head,
        ..Placement::all(Side::Device, 1, 64)
    })
}

/// What happens around an iteration.
#[derive(Debug, Clone)]
struct Turn {
    /// Rows of the device.
    rows: u32,
    /// Requests of a cohort that begins.
    begins: u32,
    /// A cohort that nobody looks at.
    forgotten: u8,
    /// Seconds of the host's attention for each row and layer, and of the device's operations.
    costs: (f64, f64),
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let turn = (0..3u32, 0..3u32, 0..6u8, 0.0..40.0f64, 0.1..2.0f64);
    let turn = turn.prop_map(|(rows, begins, forgotten, host, device)| Turn {
        rows,
        begins,
        forgotten,
        costs: (host, device),
    });
    prop::collection::vec(turn, 1..40)
}

fn cohort(slots: std::ops::Range<u32>, first: u32) -> Vec<Group> {
    slots.map(|slot| decode(slot, first + slot % 3, Kv::Host)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn rows_of_cohorts_pass_every_sublayer_once_and_in_order(
        placement in placements(), turns in turns(), bad in any::<prop::sample::Index>()
    ) {
        let (mut parked, mut carried) = (ParkedRows::default(), Carried::default());
        // Groups of each cohort, its layer, and the iterations in which it has advanced.
        let mut cohorts: Vec<(Vec<Group>, Option<u32>, u32)> = Vec::new();
        let (mut slot, mut clock) = (100, 0.0);
        let mut ready: HashMap<RequestId, f64> = HashMap::new();
        for turn in turns {
            let begins = if cohorts.len() < 4 { turn.begins } else { 0 };
            if begins > 0 {
                cohorts.push((cohort(slot..slot + begins, 40), None, 0));
                slot += begins;
            }
            let kv = |g: u32| decode(g, 70, Kv::Device);
            let mut sub_batches = vec![SubBatch::of((0..turn.rows).map(kv).collect())];
            let mut numbers = Vec::new();
            for (i, (groups, at, _)) in cohorts.iter().enumerate() {
                if i as u8 == turn.forgotten && at.is_some() {
                    continue;
                }
                numbers.push(i);
                sub_batches.push(SubBatch { groups: groups.clone(), at: *at });
            }
            let iteration = Iteration { sub_batches, moves: Vec::new(), flow: Flow::Async, pick: true, top: false };
            let program = lower(&placement, &iteration).unwrap();
            if let Err(fault) = check(&program, &placement, &iteration) {
                let ops: Vec<String> = program.ops.iter().enumerate()
                    .map(|(i, o)| format!("{i}: {} {:?} {:?} {:?} {:?}", o.sub_batch, o.unit, o.layer, o.kind, o.rows)).collect();
                prop_assert!(false, "{fault}\n{}", ops.join("\n"));
            }
            let (host, device) = turn.costs;
            let costs = |op: &Op| match (op.unit, op.kind) {
                (_, Kind::Join) => 0.0,
                (Unit::Host, Kind::Attend { .. }) => host * op.work.rows as f64,
                (Unit::Host, _) => 0.1,
                _ => device,
            };
            let advance = run_from(&program, &iteration, &costs, &carried);
            let timeline = &advance.timeline;
            in_order(&program, timeline)?;
            let seconds = timeline.seconds();
            // Nobody joins before it is ready, and nobody stays that was ready when the iteration began.
            for (b, batch) in iteration.cohorts().filter(|(_, batch)| batch.at.is_some()) {
                let at = ready[&batch.groups[0].request];
                let joined = advance.joined.contains(&b);
                prop_assert!(!joined || at <= clock + seconds + 1e-9);
                prop_assert!(joined || at > clock - 1e-9, "cohort {b} was ready at {at}, it is {clock}");
            }
            // The device waits for no attention: all that is not the host's, one after the other, is longer. Where the host computes
            // a layer's products for the device's rows, it has to; and where there is nothing else to do.
            let alone = turn.rows == 0 && iteration.cohorts().all(|(_, c)| c.at.is_some());
            if !alone && placement.layers.iter().all(|l| l.decode.side(tandem::program::Sublayer::Out) == Side::Device)
                && placement.layers.iter().all(|l| l.kv == Side::Device)
                && [placement.embedding, placement.head] == [Side::Device; 2] {
                let busy: f64 = timeline.spans.iter().filter(|s| s.unit != Unit::Host).map(|s| s.end - s.start).sum();
                prop_assert!(seconds <= busy + 1e-6, "{seconds} s of {busy} s");
            }
            let mut wrong = iteration.clone();
            if let [_, first, ..] = &mut wrong.sub_batches[..] {
                // Where it was before, or where it comes next.
                let stops = || successors(placement.next_stop(None), |&at| placement.next_stop(Some(at)));
                first.at = match first.at { Some(at) => stops().take_while(|&l| l < at).last(), None => stops().next() };
                let program = lower(&placement, &wrong).unwrap();
                let said = parked.clone().next(&program, &placement, &wrong, &advance.joined).unwrap_err();
                prop_assert!(said.what.contains("parked"), "{said}");
            }
            let mut lacks = program.clone();
            if !lacks.ops.is_empty() {
                let at = bad.index(lacks.ops.len());
                let gone = lacks.ops.remove(at);
                let all: Vec<u8> = (0..8).collect();
                let said = parked.clone().next(&lacks, &placement, &iteration, &all);
                prop_assert!(said.is_err(), "without {gone:?}");
            }
            parked.next(&program, &placement, &iteration, &advance.joined).unwrap();
            carried = advance.carried;
            clock += seconds;
            for (b, i) in (1u8..).zip(numbers) {
                let (groups, at, times) = &mut cohorts[i];
                if at.is_some() && !advance.joined.contains(&b) {
                    prop_assert_eq!(parked.at(groups[0].request), *at);
                    continue;
                }
                *at = placement.next_stop(*at);
                *times += 1;
                ready.insert(groups[0].request, clock + carried.ready(groups[0].request));
                groups.iter().for_each(|g| assert_eq!(parked.at(g.request), *at));
                if at.is_none() {
                    // A token: the next one, from the embedding on.
                    prop_assert_eq!(*times, placement.cohort_iterations());
                    *times = 0;
                    groups.iter_mut().for_each(|g| g.first += 1);
                }
            }
        }
    }
}

fn async_of(rows: u32, cohorts: Vec<SubBatch>) -> Iteration {
    let device = SubBatch::of((0..rows).map(|s| decode(s, 70, Kv::Device)).collect());
    let sub_batches = std::iter::once(device).chain(cohorts).collect();
    Iteration { sub_batches, moves: Vec::new(), flow: Flow::Async, pick: true, top: false }
}

/// A cohort advances by one layer an iteration as long as the host needs no longer for it (APEX §4.2), and each second
/// iteration when it needs a little longer.
#[test]
fn a_cohort_moves_one_layer_an_iteration_while_the_host_keeps_up() {
    let layers = 8;
    let placement = Placement::all(Side::Device, layers, 64);
    let tokens = |host: f64| {
        let costs = |op: &Op| match (op.unit, op.kind) {
            (Unit::Host, Kind::Attend { .. }) => host,
            (Unit::Gpu, Kind::OutProj | Kind::FfnUp { .. } | Kind::FfnDown | Kind::Project { .. }) => 1.0,
            _ => 0.0,
        };
        let (mut carried, mut at, mut seconds) = (Carried::default(), None, Vec::new());
        for _ in 0..2 * (layers + 1) {
            let iteration = async_of(4, vec![SubBatch { groups: cohort(10..14, 40), at }]);
            let program = lower(&placement, &iteration).unwrap();
            let advance = run_from(&program, &iteration, &costs, &carried);
            if at.is_none() || advance.joined == [1] {
                let next = at.map_or(0, |at: u32| at + 1);
                at = ((next as usize) < layers).then_some(next);
                if at.is_none() {
                    return (seconds.len() + 1, seconds);
                }
            }
            carried = advance.carried;
            seconds.push(advance.timeline.seconds());
        }
        (usize::MAX, seconds)
    };
    // 32 s an iteration of the device's own, 4 more of the cohort's layer.
    let (iterations, seconds) = tokens(30.0);
    assert_eq!(iterations, layers + 1);
    assert_eq!((seconds[0], seconds[1]), (33.0, 36.0), "a projection, a whole layer");
    // Whether it is done is asked when the device begins the layer: an iteration less a layer after it was published.
    assert_eq!(tokens(31.9).0, layers + 1);
    assert_eq!(tokens(32.1).0, 2 * layers + 1);
    let (iterations, seconds) = tokens(45.0);
    assert_eq!(iterations, 2 * layers + 1);
    assert!(seconds.iter().all(|&s| s <= 36.0), "a slow host does not hold the device: {seconds:?}");
}

/// Of several cohorts at different layers the host attends the one first that was published first.
#[test]
fn several_cohorts_share_the_host() {
    let placement = Placement::all(Side::Device, 6, 64);
    let cohorts = vec![SubBatch::parked(cohort(10..12, 40), 1), SubBatch::parked(cohort(20..23, 40), 4)];
    let iteration = async_of(2, cohorts);
    let program = lower(&placement, &iteration).unwrap();
    let costs = |op: &Op| match (op.unit, op.kind) {
        (Unit::Host, Kind::Attend { .. }) => 100.0 * op.work.rows as f64,
        (_, Kind::Join) => 0.0,
        _ => 1.0,
    };
    let advance = run_from(&program, &iteration, &costs, &Carried::default());
    assert_eq!(advance.joined, [1, 2]);
    let (a, b) = (&iteration.sub_batches[1].groups[0], &iteration.sub_batches[2].groups[0]);
    let (first, second) = (advance.carried.ready(a.request), advance.carried.ready(b.request));
    assert!(first > 0.0 && second >= first + 300.0, "{first} {second}");
    assert_eq!(advance.carried.host, second);
    // A late one does not hold the other.
    let late = Carried { host: 500.0, cohorts: vec![(a.request, 500.0)] };
    let advance = run_from(&program, &iteration, &costs, &late);
    assert_eq!(advance.joined, [2]);
    assert_eq!(advance.carried.ready(a.request), 500.0 - advance.timeline.seconds());
    assert_eq!(run(&program, &costs), run_from(&program, &iteration, &costs, &Carried::default()).timeline);
}

/// With nothing else to do, the device waits for the first cohort that is ready.
#[test]
fn an_iteration_of_parked_cohorts_alone_makes_progress() {
    let placement = Placement::all(Side::Device, 6, 64);
    let cohorts = vec![SubBatch::parked(cohort(10..12, 40), 5), SubBatch::parked(cohort(20..23, 40), 2)];
    let iteration = async_of(0, cohorts);
    let program = lower(&placement, &iteration).unwrap();
    let id = |slot| RequestId { slot, generation: 0 };
    let carried = Carried { host: 90.0, cohorts: vec![(id(10), 50.0), (id(20), 90.0)] };
    let advance = run_from(&program, &iteration, &|_: &Op| 1.0, &carried);
    assert_eq!(advance.joined, [1]);
    // From 50 on: join, collect, three products, head and pick.
    assert_eq!(advance.timeline.seconds(), 56.0);
    assert_eq!(advance.carried, Carried { host: 34.0, cohorts: vec![(id(20), 34.0)] });
}

#[test]
fn cohorts_that_cannot_be_are_refused() {
    let placement = Placement::all(Side::Device, 2, 8);
    let refused = |iteration: &Iteration, placement: &Placement, why: &str| {
        let said = lower(placement, iteration).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    };
    let device = SubBatch::of(vec![decode(7, 3, Kv::Device)]);
    refused(&async_of(1, vec![device]), &placement, "keys and values on the host");
    refused(&async_of(1, vec![SubBatch::parked(cohort(3..4, 9), 2)]), &placement, "layer 2 of 2");
    let mut parked = Iteration::serial(cohort(3..4, 9), true);
    parked.sub_batches[0].at = Some(1);
    refused(&parked, &placement, "no cohort");
    let mut elsewhere = placement.clone();
    elsewhere.layers[1].kv = Side::Host;
    let mut mixed = placement.clone();
    let policy = |bits| LayerPlacement {
        decode: Policy::from_bits(bits),
        weights: Residence::Both,
        kv: Side::Host,
        ..placement.layers[0]
    };
    mixed.layers[1] = policy([false, true, true, true, false, false]);
    refused(&async_of(1, vec![SubBatch::of(cohort(3..4, 9))]), &mixed, "all behind it is to be there");
    mixed.layers[1] = policy([true, true, true, false, false, false]);
    refused(&async_of(1, vec![SubBatch::of(cohort(3..4, 9))]), &mixed, "what is before the attention, too");
    let split = Placement::boundary(3, 4, 64, 64);
    assert_eq!(split.cohort_iterations(), 4, "embedding and two layers on the host, then layers 2 and 3");
    refused(&async_of(1, vec![SubBatch::parked(cohort(3..4, 9), 0)]), &split, "no cohort is parked");
    refused(&async_of(1, vec![SubBatch::of(cohort(3..4, 9))]), &elsewhere, "layer 1 is on the device");
}
