//! Sequences that live on either side, and change it when they are told: any home and any swap at any time give the model's
//! logits, memory that does not suffice is refused, and whatever fails, pages are conserved.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tandem::Error;
use tandem::device::Accelerator;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan};
use tandem::engine::{Engine, NewTokens, Options};
use tandem::program::{Far, Flow, Kv, MoveRequest, Placement, RequestId, Side, Wants};

use super::{Model, engine, kv_of, on_device, options, plain};
use crate::support::gpu;
use crate::support::sub_batches::{self, Moves};

/// `device` pages there, `far` pages on the host; steps of up to 24 rows in two sub-batches.
fn homes(sequences: usize, device: usize, far: usize, how: Far) -> Options {
    let o = options(200, sequences, 24, device, how);
    Options { far_pages: Some(far), sub_batches: 2, ..o }
}

/// A sequence that changes sides.
#[derive(Debug, Clone, Copy)]
enum Move {
    Whole(RequestId, Side),
    /// So many of its first pages to the host, the others to the device.
    Split(RequestId, usize),
}
use Move::{Split, Whole};

/// The moves beside a step.
fn beside(moves: &[Move]) -> Moves {
    let mut all = Moves::default();
    for m in moves {
        match *m {
            Whole(id, side) => all.whole.push((id, side)),
            Split(id, pages) => all.parts.push(part(id, pages)),
        }
    }
    all
}

fn part(request: RequestId, pages: usize) -> MoveRequest {
    MoveRequest { request, to: Side::Host, pages: 0..pages as u32 }
}

/// Makes a move without a step.
fn make(e: &mut Engine, m: Move) -> tandem::Result<()> {
    match m {
        Whole(id, side) => e.swap(id, side),
        Split(id, pages) => e.move_part(&part(id, pages)),
    }
}

/// Rows of several sequences, each a beginning of the same text; the first in sub-batch 0, the others in turn.
fn step(
    e: &mut Engine,
    model: &Model,
    rows: &[(RequestId, usize)],
    flow: Flow,
    moves: &[Move],
) -> tandem::Result<Result<(), String>> {
    let inputs: Vec<NewTokens<'_>> = rows
        .iter()
        .map(|&(seq, n)| {
            let at = e.len(seq);
            NewTokens { id: seq, tokens: &model.tokens[at..at + n], wants: Wants::Last }
        })
        .collect();
    let ends: Vec<usize> = rows.iter().map(|&(seq, n)| e.len(seq) + n - 1).collect();
    let split: Vec<u8> =
        (0..rows.len()).map(|i| if flow == Flow::TwoLanes { i as u8 % 2 } else { 0 }).collect();
    let got = sub_batches::forward(e, &inputs, &split, flow, &beside(moves))?;
    Ok(model.check(&got, &ends))
}

fn free(e: &Engine) -> [usize; 2] {
    [Side::Device, Side::Host].map(|side| e.kv_pages(side).free)
}

/// All on the device but keys and values of some; the same with the first blocks on the CPU (a layer split).
fn placements(n: usize) -> [Placement; 2] {
    [on_device(n), Placement::boundary(1 + n / 2, n, 0, 0)]
}

#[test]
fn a_sequence_lives_where_it_is_told_and_changes_sides() {
    let model = Model::new("tiny-qwen3", "q8_0", 160);
    for placement in placements(model.m.spec.n_layers) {
        let mut e = engine(&model.m, &homes(3, 6, 9, Far::Attend), &plain(), &placement).unwrap();
        assert_eq!(free(&e), [6, 9]);
        let (a, b) = (e.add_at(Side::Device).unwrap(), e.add_at(Side::Host).unwrap());
        let both = [(a, 12), (b, 12)];
        for flow in [Flow::Serial, Flow::TwoLanes, Flow::Serial, Flow::TwoLanes] {
            step(&mut e, &model, &both, flow, &[]).unwrap().unwrap();
        }
        assert_eq!((e.side(a), e.side(b)), (Some(Side::Device), Some(Side::Host)));
        assert_eq!((free(&e), e.kv(a), e.kv(b)), ([4, 7], Some(Kv::Device), Some(Kv::Host)));
        // Both change sides with a step of their own, then alone.
        let swaps = [Whole(a, Side::Host), Whole(b, Side::Device)];
        step(&mut e, &model, &[(a, 1), (b, 1)], Flow::TwoLanes, &swaps).unwrap().unwrap();
        assert_eq!((free(&e), e.side(a), e.side(b)), ([4, 7], Some(Side::Host), Some(Side::Device)));
        e.swap(a, Side::Device).unwrap();
        e.swap(a, Side::Device).unwrap();
        assert_eq!((free(&e), e.kv(a)), ([2, 9], Some(Kv::Device)));
        step(&mut e, &model, &[(a, 1), (b, 5)], Flow::Serial, &[]).unwrap().unwrap();
        // One on both sides, among others.
        make(&mut e, Split(b, 1)).unwrap();
        assert_eq!((free(&e), e.kv(b)), ([3, 8], Some(Kv::Split { boundary: 32, far: Far::Attend })));
        step(&mut e, &model, &[(a, 1), (b, 1)], Flow::TwoLanes, &[Whole(a, Side::Host)]).unwrap().unwrap();
        [a, b].into_iter().for_each(|s| e.remove(s));
        assert_eq!((free(&e), e.side(a)), ([6, 9], None));
    }
}

#[test]
fn what_cannot_be_is_refused_in_a_sentence_and_changes_nothing() {
    let model = Model::new("tiny-llama", "bf16", 128);
    let n = model.m.spec.n_layers;
    // Pages that move by themselves, and those that do not, are two kinds of engines.
    let mut by_itself =
        engine(&model.m, &options(96, 2, 24, 8, Far::Attend), &plain(), &on_device(n)).unwrap();
    let s = by_itself.add();
    let e = by_itself.swap(s, Side::Host).unwrap_err();
    assert!(matches!(&e, Error::Usage(t) if t.contains("move by themselves")), "{e}");
    let e = by_itself.add_at(Side::Host).unwrap_err();
    assert!(matches!(&e, Error::Usage(t) if t.contains("no pages for that")), "{e}");

    let mut e = engine(&model.m, &homes(2, 3, 2, Far::Attend), &plain(), &on_device(n)).unwrap();
    let (a, b) = (e.add_at(Side::Device).unwrap(), e.add_at(Side::Host).unwrap());
    step(&mut e, &model, &[(b, 24)], Flow::Serial, &[]).unwrap().unwrap();
    for _ in 0..3 {
        step(&mut e, &model, &[(a, 24)], Flow::Serial, &[]).unwrap().unwrap();
    }
    assert_eq!(free(&e), [0, 1]);
    for (swap, why) in [
        (Whole(a, Side::Host), "3 more pages"),
        (Whole(b, Side::Device), "1 more pages"),
        (Split(a, 3), "not all full"),
    ] {
        let error = make(&mut e, swap).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        let error = step(&mut e, &model, &[(b, 1)], Flow::Serial, &[swap]).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!((free(&e), e.len(a), e.len(b), e.side(a)), ([0, 1], 72, 24, Some(Side::Device)));
    }
    // A page that leaves makes room for one that comes, in one step.
    let swaps = [Split(a, 1), Whole(b, Side::Device)];
    step(&mut e, &model, &[(a, 1), (b, 1)], Flow::Serial, &swaps).unwrap().unwrap();
    assert_eq!(free(&e), [0, 1]);
    e.remove(a);
    let error = e.swap(a, Side::Host).unwrap_err().to_string();
    assert!(error.contains("has ended"), "{error}");
}

#[derive(Debug, Clone)]
enum Act {
    Add(usize, bool),
    Cut(usize, usize),
    Swap(usize, Option<usize>, bool),
    Step { rows: Vec<(usize, usize)>, lanes: bool, swaps: Vec<(usize, Option<usize>, bool)> },
}

fn act() -> impl Strategy<Value = Act> {
    let swap = || (0..4usize, prop::option::weighted(0.3, 0..4usize), any::<bool>());
    let tokens = prop_oneof![2 => Just(1usize), 2 => 1..24usize];
    prop_oneof![
        2 => (0..4usize, any::<bool>()).prop_map(|(s, host)| Act::Add(s, host)),
        1 => (0..4usize, 0..160usize).prop_map(|(s, n)| Act::Cut(s, n)),
        2 => swap().prop_map(|(s, n, host)| Act::Swap(s, n, host)),
        8 => (prop::collection::vec((0..4usize, tokens), 1..5), any::<bool>(), prop::collection::vec(swap(), 0..3))
            .prop_map(|(rows, lanes, swaps)| Act::Step { rows, lanes, swaps }),
    ]
}

fn move_of(seqs: &[RequestId; 4], (s, split, host): (usize, Option<usize>, bool)) -> Move {
    let side = if host { Side::Host } else { Side::Device };
    split.map_or(Whole(seqs[s], side), |pages| Split(seqs[s], pages))
}

#[test]
fn any_home_and_any_swap_at_any_time_give_the_models_logits() {
    for (name, dtype, cases) in
        [("tiny-qwen3", "q8_0", 48), ("tiny-gemma3", "q8_0", 16), ("tiny-mistral", "q8_0", 16)]
    {
        let accel = gpu::an_accelerator();
        let model = Model::with(name, dtype, 160, kv_of(name, &accel));
        let cases = gpu::cases(&accel, cases);
        let strategy =
            (any::<bool>(), any::<bool>(), 1..8usize, 1..12usize, prop::collection::vec(act(), 1..40));
        let mut runner = TestRunner::new(Config { cases, ..Config::default() });
        let run = |(split, streams, device, far, acts): (bool, bool, usize, usize, Vec<Act>)| {
            let how = if streams { Far::Stream } else { Far::Attend };
            let placement = &placements(model.m.spec.n_layers)[usize::from(split)];
            let o = Options { kv_dtype: model.kv, ..homes(4, device, far, how) };
            let mut e =
                engine(&model.m, &o, &accel, placement).map_err(|e| TestCaseError::fail(e.to_string()))?;
            let mut seqs = [Side::Device, Side::Host, Side::Device, Side::Host].map(|s| e.add_at(s).unwrap());
            for act in acts {
                let lens = seqs.map(|s| e.len(s));
                match act {
                    Act::Add(s, host) => {
                        e.remove(seqs[s]);
                        seqs[s] = e.add_at(if host { Side::Host } else { Side::Device }).unwrap();
                    }
                    Act::Cut(s, n) => e.truncate(seqs[s], n),
                    Act::Swap(s, split, host) => {
                        let swap = move_of(&seqs, (s, split, host));
                        let before = (e.kv(seqs[s]), free(&e));
                        match (make(&mut e, swap), swap) {
                            (Ok(()), Whole(id, side)) => prop_assert_eq!(e.side(id), Some(side)),
                            (Ok(()), Split(id, n)) => {
                                let kv = if n == 0 {
                                    Kv::Device
                                } else {
                                    Kv::Split { boundary: 32 * n as u32, far: how }
                                };
                                prop_assert_eq!(e.kv(id), Some(kv));
                            }
                            (Err(_), _) => prop_assert_eq!((e.kv(seqs[s]), free(&e)), before),
                        }
                    }
                    Act::Step { rows, lanes, swaps } => {
                        let mut all: Vec<(RequestId, usize)> = Vec::new();
                        let mut left = 24;
                        for (s, n) in rows {
                            let n = n.min(160 - e.len(seqs[s])).min(left);
                            if n > 0 && all.iter().all(|(seq, _)| *seq != seqs[s]) {
                                left -= n;
                                all.push((seqs[s], n));
                            }
                        }
                        let flow = if lanes { Flow::TwoLanes } else { Flow::Serial };
                        let swaps: Vec<Move> = swaps.into_iter().map(|s| move_of(&seqs, s)).collect();
                        match step(&mut e, &model, &all, flow, &swaps) {
                            Ok(right) => right.map_err(TestCaseError::fail)?,
                            Err(Error::Capacity(_) | Error::Usage(_)) => {
                                prop_assert_eq!(
                                    seqs.map(|s| e.len(s)),
                                    lens,
                                    "nothing is stored of a step that is refused"
                                );
                            }
                            Err(e) => return Err(TestCaseError::fail(e.to_string())),
                        }
                    }
                }
                // Every page is free or somebody's.
                let held = |kv: Option<Kv>, len: usize| {
                    let pages = len.div_ceil(32);
                    match kv.expect("live") {
                        Kv::Device => [pages, 0],
                        Kv::Host => [0, pages],
                        Kv::Split { boundary, .. } => {
                            [pages - boundary as usize / 32, boundary as usize / 32]
                        }
                    }
                };
                let used = seqs
                    .map(|s| held(e.kv(s), e.len(s)))
                    .iter()
                    .fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]]);
                prop_assert_eq!(
                    free(&e),
                    [device - used[0], far - used[1]],
                    "{:?}",
                    seqs.map(|s| (e.kv(s), e.len(s)))
                );
            }
            seqs.into_iter().for_each(|s| e.remove(s));
            prop_assert_eq!(free(&e), [device, far]);
            Ok(())
        };
        runner.run(&strategy, run).unwrap();
    }
}

/// Every launch refused in turn, with swaps under way: nothing is stored, sequences are where they were, and the step can be
/// repeated.
#[test]
fn a_step_that_fails_leaves_sequences_and_pages_where_they_were() {
    let model = Model::new("tiny-llama", "q8_0", 160);
    for far in [Far::Attend, Far::Stream] {
        let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).expect("it starts"));
        let accel: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(runtime.clone()));
        let mut e =
            engine(&model.m, &homes(3, 8, 8, far), &accel, &on_device(model.m.spec.n_layers)).unwrap();
        let seqs @ [a, b, c] = [Side::Device, Side::Host, Side::Device].map(|s| e.add_at(s).unwrap());
        let (mut refused, mut lanes) = (0, false);
        for (rows, swaps) in [
            (vec![(a, 20), (b, 4)], vec![]),
            (vec![(a, 12), (b, 12)], vec![Whole(a, Side::Host)]),
            (vec![(a, 1), (c, 20)], vec![Whole(b, Side::Device)]),
            (vec![(c, 20), (b, 1)], vec![Whole(a, Side::Device), Split(c, 0)]),
            (vec![(a, 1), (b, 1), (c, 1)], vec![Split(c, 1), Whole(b, Side::Host)]),
            (vec![(c, 1)], vec![Whole(c, Side::Host)]),
        ] {
            lanes = !lanes;
            let flow = if lanes { Flow::TwoLanes } else { Flow::Serial };
            for n in 1.. {
                runtime.set_faults(FaultPlan { refuse_launch: Some(n), ..FaultPlan::default() });
                let state = |e: &Engine| (seqs.map(|s| (e.len(s), e.kv(s))), free(e));
                let before = state(&e);
                match step(&mut e, &model, &rows, flow, &swaps) {
                    Ok(right) => {
                        right.unwrap_or_else(|e| panic!("{far:?}: {e}"));
                        break;
                    }
                    Err(what) => assert!(what.to_string().contains("refused"), "{far:?}: {what}"),
                }
                assert_eq!(state(&e), before, "{far:?}: launch {n}");
                refused += 1;
            }
        }
        runtime.set_faults(FaultPlan::default());
        assert!(refused > 80, "only {refused} launches were refused");
        step(&mut e, &model, &[(a, 1), (b, 1), (c, 1)], Flow::Serial, &[]).unwrap().unwrap();
        // Lost in a copy, which is one launch for all layers: no step more, and every page comes back.
        runtime.set_faults(FaultPlan { lost_at: Some(1), ..FaultPlan::default() });
        e.swap(a, Side::Host).expect_err("the device is lost");
        e.swap(b, Side::Device).expect_err("the device is lost");
        seqs.into_iter().for_each(|s| e.remove(s));
        assert_eq!(free(&e), [8, 8]);
    }
}
