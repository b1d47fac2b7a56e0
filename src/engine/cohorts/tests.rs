//! Cohorts beside the device's rows, on the emulated device with plain functions and a host with random delays: every
//! sequence gives the same tokens as alone, whatever fails, is late or is cancelled, and no page is lost.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan, Speed};
use crate::engine::{NewTokens, Options, Outcome, TokenSource};
use crate::model::{LoadedModel, load};
use crate::program::{
    Flow, Group, Iteration, LayerPlacement, Placement, Policy, RequestId, Residence, Side, Wants,
};
use crate::simd::Isa;
use crate::simd::linear::Mode;

const LAYERS: usize = 3;
/// Tokens that each sequence generates.
const N: usize = 5;

fn model() -> LoadedModel {
    load(&format!("synth:tiny-llama,dtype=q8_0,seed=3,layers={LAYERS}")).unwrap()
}

fn options() -> Options {
    let mut o = Options::new(Isa::Reference, 96);
    (o.threads, o.sequences, o.sub_batches, o.chunk) = (Some(1), 8, 3, 24);
    (o.kv_pages, o.far_pages) = (Some(12), Some(16));
    o
}

fn engine(m: &LoadedModel, o: &Options, jitter: Option<u64>) -> (Engine, Arc<EmulatedRuntime>) {
    over(m, o, jitter, Placement::all(Side::Device, LAYERS, 0))
}

fn over(
    m: &LoadedModel,
    o: &Options,
    jitter: Option<u64>,
    placement: Placement,
) -> (Engine, Arc<EmulatedRuntime>) {
    let options = EmulatedOptions { jitter, ..EmulatedOptions::default() };
    let runtime = Arc::new(EmulatedRuntime::new(options).unwrap());
    let accel = Arc::new(EmulatedAccelerator::new(runtime.clone()));
    let e = Engine::placed(m.spec.clone(), &m.weights, o, accel, "test", "test", placement, &|_| ());
    (e.unwrap(), runtime)
}

fn prompt(i: usize) -> Vec<u32> {
    (0..3 + 7 * i as u32 % 20).map(|t| (t * t * 31 + t * 7 + 5 * i as u32) % 251).collect()
}

/// A sequence and what it has generated.
struct Live {
    seq: RequestId,
    host: bool,
    tokens: Vec<u32>,
    done: bool,
}

/// Runs the prompts on the device one after the other, which gives each sequence its first token.
fn start(e: &mut Engine, homes: &[bool]) -> Vec<Live> {
    let one = |(i, &host): (usize, &bool)| {
        let seq = e.add_at(if host { Side::Host } else { Side::Device }).unwrap();
        let prompt = prompt(i);
        let first =
            e.forward_greedy(&[NewTokens { id: seq, tokens: &prompt, wants: Wants::Last }]).unwrap()[0];
        Live { seq, host, tokens: vec![first], done: false }
    };
    homes.iter().enumerate().map(one).collect()
}

/// The tokens that each sequence gives alone.
fn alone(m: &LoadedModel, homes: &[bool]) -> Vec<Vec<u32>> {
    alone_by(m, &options(), homes)
}

fn alone_by(m: &LoadedModel, o: &Options, homes: &[bool]) -> Vec<Vec<u32>> {
    let (mut e, _) = engine(m, o, None);
    let all = start(&mut e, homes);
    let one = |(i, mut live): (usize, Live)| {
        for _ in 1..N {
            let last = [*live.tokens.last().unwrap()];
            let input = NewTokens { id: live.seq, tokens: &last, wants: Wants::Last };
            live.tokens.push(e.forward_greedy(&[input]).unwrap()[0]);
        }
        assert_eq!(live.tokens.len(), N, "sequence {i}");
        live.tokens
    };
    all.into_iter().enumerate().map(one).collect()
}

/// Runs a step: every sequence of the device has a row, and those of the host begin in cohorts of up to `size` if there
/// is room.
fn step(e: &mut Engine, live: &mut [Live], size: usize) -> Result<Outcome> {
    step_by(e, live, size, false)
}

/// The tokens of rows from which others are drawn.
struct Drawn<'a>(Vec<(RequestId, &'a [u32])>);

impl TokenSource for Drawn<'_> {
    fn tokens(&self, group: &Group) -> &[u32] {
        self.0.iter().find(|(id, _)| *id == group.request).map_or(&[], |(_, tokens)| tokens)
    }

    fn top_factor(&self, _: RequestId) -> Option<f32> {
        Some(0.7)
    }
}

/// The token of a row: the likeliest one of those that came from the device, where its logits have stayed.
fn likeliest(e: &mut Engine, row: usize) -> u32 {
    let (best, token) = e.top(row).expect("of every row with a result").likeliest[0];
    assert_eq!(e.logits_row(row).unwrap()[token as usize], best, "row {row}");
    token
}

/// [`step`]; with `tops`, tokens are taken as if they were drawn.
fn step_by(e: &mut Engine, live: &mut [Live], size: usize, tops: bool) -> Result<Outcome> {
    let lasts: Vec<[u32; 1]> = live.iter().map(|l| [*l.tokens.last().unwrap()]).collect();
    let wants = |l: &Live| !l.done && l.tokens.len() < N;
    let input = |i: usize| NewTokens { id: live[i].seq, tokens: &lasts[i], wants: Wants::Last };
    let own: Vec<usize> = (0..live.len()).filter(|&i| wants(&live[i]) && !live[i].host).collect();
    let waiting: Vec<usize> = (0..live.len())
        .filter(|&i| wants(&live[i]) && live[i].host && e.parked(live[i].seq).is_none())
        .collect();
    let device: Vec<NewTokens<'_>> = own.iter().map(|&i| input(i)).collect();
    let begin: Vec<Vec<NewTokens<'_>>> = waiting
        .chunks(size)
        .take(e.cohorts_free())
        .map(|cohort| cohort.iter().map(|&i| input(i)).collect())
        .collect();
    let batches: Vec<&[NewTokens<'_>]> =
        [&device[..]].into_iter().chain(begin.iter().map(Vec::as_slice)).collect();
    let outcome = if tops {
        let rows = Drawn(batches.iter().copied().flatten().map(|r| (r.id, r.tokens)).collect());
        let iteration = Iteration { top: true, ..e.iteration(&batches, Flow::Async) };
        e.run(&iteration, &[], &rows)?
    } else {
        e.run_rows(&batches, Flow::Async, &[], |i| i.pick = true)?
    };
    let mut token = |row: usize| if tops { likeliest(e, row) } else { e.picks()[row].unwrap() };
    for (row, i) in own.into_iter().enumerate() {
        live[i].tokens.push(token(row));
    }
    for cohort in &outcome.cohorts {
        for (row, group) in cohort.rows.iter().cloned().flatten().zip(&cohort.groups) {
            let of = live.iter_mut().find(|l| l.seq == group.request).unwrap();
            of.tokens.push(token(row));
        }
    }
    Ok(outcome)
}

fn ended(live: &[Live]) -> bool {
    live.iter().all(|l| l.done || l.tokens.len() == N)
}

fn free(e: &Engine) -> [usize; 2] {
    [Side::Device, Side::Host].map(|side| e.kv_pages(side).free)
}

/// Rows from which tokens are drawn, of cohorts as of the device: the likeliest tokens come, and the logits stay on the device.
#[test]
fn no_vocabulary_is_copied_for_rows_of_cohorts() {
    let m = model();
    let homes = [false, true, true, false, true];
    let want = alone(&m, &homes);
    for size in [1, 2] {
        let (mut e, _) = engine(&m, &options(), None);
        let mut live = start(&mut e, &homes);
        let mut of_cohorts = 0;
        for _ in 0..200 {
            let outcome = step_by(&mut e, &mut live, size, true).unwrap();
            of_cohorts +=
                outcome.cohorts.iter().filter_map(|c| c.rows.clone()).map(|r| r.len()).sum::<usize>();
            if ended(&live) {
                break;
            }
        }
        assert_eq!(live.into_iter().map(|l| l.tokens).collect::<Vec<_>>(), want);
        assert_eq!(of_cohorts, 3 * (N - 1), "cohorts of {size}");
    }
}

#[test]
fn tokens_are_those_of_running_alone_however_late_the_host_is() {
    let m = model();
    for (homes, size) in [
        (&[false, true, true, false, true, true, true][..], 2),
        (&[true, true, true], 3),
        (&[true], 1),
        (&[false, true, true, true, true], 1),
    ] {
        let want = alone(&m, homes);
        let (mut parked, mut stayed) = (0, 0);
        for seed in 0..12 {
            let (mut e, _) = engine(&m, &options(), (seed % 3 == 0).then_some(seed));
            let all = free(&e);
            let mut live = start(&mut e, homes);
            e.machine.slow_host(seed);
            for steps in 0.. {
                assert!(
                    steps < 4000,
                    "no end: {:?}",
                    live.iter().map(|l| l.tokens.len()).collect::<Vec<_>>()
                );
                let advanced = step(&mut e, &mut live, size).unwrap();
                parked += advanced.cohorts.iter().filter(|c| c.at.is_some()).count();
                stayed += advanced.cohorts.iter().filter(|c| !c.advanced).count();
                if ended(&live) {
                    break;
                }
            }
            for (i, (l, want)) in live.iter().zip(&want).enumerate() {
                assert_eq!(&l.tokens, want, "sequence {i} of {homes:?}, seed {seed}");
            }
            live.iter().for_each(|l| e.remove(l.seq));
            assert_eq!(free(&e), all, "pages");
        }
        assert!(parked > 0);
        assert!(stayed > 0 || homes.iter().all(|&h| h), "the host was never late beside the device");
    }
}

/// If a job of the host panics, or the device refuses a launch, the cohort starts its token over and the others go on.
#[test]
fn failures_are_a_cohorts_own_and_leave_nothing_behind() {
    let m = model();
    let homes = [false, true, true, true];
    let want = alone(&m, &homes);
    for n in 0..40 {
        let (mut e, runtime) = engine(&m, &options(), None);
        let all = free(&e);
        let mut live = start(&mut e, &homes);
        let device = n % 2 == 1;
        match device {
            true => runtime.set_faults(FaultPlan { refuse_launch: Some(n), ..FaultPlan::default() }),
            false => e.machine.panic_host(n as usize / 2),
        }
        let mut failed = Vec::new();
        for steps in 0.. {
            assert!(steps < 4000, "no end");
            match step(&mut e, &mut live, 2) {
                Ok(advanced) => failed.extend(advanced.cohorts.into_iter().filter_map(|c| c.failed)),
                Err(error) => {
                    assert!(device, "{error}");
                    runtime.set_faults(FaultPlan::default());
                }
            }
            if ended(&live) {
                break;
            }
        }
        if !device {
            assert_eq!(failed.len(), 1, "of a panic at operation {}: {failed:?}", n / 2);
            assert!(failed[0].to_string().contains("panicked"), "{failed:?}");
        }
        for (l, want) in live.iter().zip(&want) {
            assert_eq!(&l.tokens, want, "failure {n}");
        }
        live.iter().for_each(|l| e.remove(l.seq));
        assert_eq!(free(&e), all, "pages");
    }
}

/// Sequences that end while they are parked, at any time.
#[test]
fn a_parked_sequence_can_be_removed_at_any_time() {
    let m = model();
    let homes = [false, true, true, true, true];
    let want = alone(&m, &homes);
    for n in 0..14 {
        let (mut e, _) = engine(&m, &options(), None);
        let all = free(&e);
        let mut live = start(&mut e, &homes);
        e.machine.slow_host(n);
        let mut steps = 0;
        while !ended(&live) {
            steps += 1;
            assert!(steps < 4000, "no end");
            step(&mut e, &mut live, 3).unwrap();
            if steps == n {
                let gone = live[2].seq;
                let was = e.parked(gone);
                e.remove(gone);
                live[2].done = true;
                assert_eq!(e.parked(gone), None);
                assert_eq!(e.cohorts().iter().filter(|(seqs, _)| seqs.contains(&gone)).count(), 0, "{was:?}");
            }
        }
        for (i, (l, want)) in live.iter().zip(&want).enumerate().filter(|(_, (l, _))| !l.done) {
            assert_eq!(&l.tokens, want, "sequence {i}, removed in step {n}");
        }
        live.iter().for_each(|l| e.remove(l.seq));
        assert_eq!(free(&e), all, "pages");
    }
}

/// If a cohort is given up before the host begins it, the device can use its pages at once: its jobs are still in the
/// lane but will not run. While the host attends a cohort, the emulator refuses the device its pages.
#[test]
fn pages_of_a_cohort_that_was_given_up_can_be_used_at_once() {
    let m = model();
    let homes = [false, true, true];
    for seed in 0..4 {
        let mut o = options();
        // The host has room for both cohorts and nothing else.
        o.far_pages = Some(8);
        let options = EmulatedOptions {
            jitter: (seed > 1).then_some(seed),
            speed: Speed { host_factor: 5000.0, ..Speed::default() },
            ..EmulatedOptions::default()
        };
        let runtime = Arc::new(EmulatedRuntime::new(options).unwrap());
        let accel = Arc::new(EmulatedAccelerator::new(runtime));
        let placement = Placement::all(Side::Device, LAYERS, 0);
        let mut e = Engine::placed(m.spec.clone(), &m.weights, &o, accel, "test", "test", placement, &|_| ())
            .unwrap();
        let mut live = start(&mut e, &homes);
        // The first cohort's attention takes long, and the second one's jobs wait for it.
        live[2].done = true;
        step(&mut e, &mut live, 1).unwrap();
        live[2].done = false;
        step(&mut e, &mut live, 1).unwrap();
        assert_eq!(e.cohorts().len(), 2);
        e.remove(live[2].seq);
        let pages = e.kv_pages(Side::Host).free;
        // Copies to the host, to the pages that were freed.
        e.swap(live[0].seq, Side::Host).unwrap();
        assert!(e.kv_pages(Side::Host).free < pages);
        e.remove(live[1].seq);
        e.swap(live[0].seq, Side::Device).unwrap();
        let row = [*live[0].tokens.last().unwrap()];
        e.forward_greedy(&[NewTokens { id: live[0].seq, tokens: &row, wants: Wants::Last }]).unwrap();
    }
}

/// In deterministic mode a cohort always joins in the next step, so the number of steps is the same whether it is late
/// or not.
#[test]
fn a_fixed_lag_does_not_depend_on_time() {
    let m = model();
    let homes = [false, true, true];
    let want = alone(&m, &homes);
    for seed in 0..6 {
        let (mut e, _) = engine(&m, &Options { mode: Mode::Deterministic, ..options() }, None);
        let mut live = start(&mut e, &homes);
        e.machine.slow_host(seed);
        let mut steps = 0;
        while !ended(&live) {
            steps += 1;
            let advanced = step(&mut e, &mut live, 2).unwrap();
            assert!(advanced.cohorts.iter().all(|c| c.advanced));
        }
        assert_eq!(steps, (N - 1) * (LAYERS + 1));
        assert!(live.iter().zip(&want).all(|(l, want)| &l.tokens == want));
    }
}

/// The wait for a fixed lag is bounded: if the host takes longer, the step fails. The cohort stays parked, and gives
/// the same tokens once a step waits longer.
#[test]
fn a_fixed_lag_waits_only_so_long() {
    let m = model();
    let homes = [false, true, true];
    let o = Options { mode: Mode::Deterministic, ..options() };
    let want = alone_by(&m, &o, &homes);
    let (mut e, _) = engine(&m, &o, None);
    let all = free(&e);
    let mut live = start(&mut e, &homes);
    step(&mut e, &mut live, 2).unwrap();
    // Longer than the device's lanes take for a layer on a computer that does much else.
    e.machine.delay_host(Duration::from_millis(250));
    e.machine.have_patience(Duration::from_micros(1));
    let mut failures = 0;
    // A failed step is tried again; the host can be late with twelve attentions.
    while failures < 3 && !ended(&live) {
        if let Err(error) = step(&mut e, &mut live, 2) {
            let error = error.to_string();
            assert!(error.contains("takes more than 1µs"), "{error}");
            failures += 1;
        }
    }
    assert!(failures > 0, "the host was always fast enough");
    e.machine.delay_host(Duration::ZERO);
    e.machine.have_patience(Duration::from_secs(60));
    while !ended(&live) {
        step(&mut e, &mut live, 2).unwrap();
    }
    assert!(live.iter().zip(&want).all(|(l, want)| &l.tokens == want));
    live.iter().for_each(|l| e.remove(l.seq));
    assert_eq!(free(&e), all, "pages");
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let m = model();
    let (mut e, _) = engine(&m, &options(), None);
    let mut live = start(&mut e, &[false, true, true, true]);
    step(&mut e, &mut live, 1).unwrap();
    let before = (free(&e), e.cohorts());
    assert_eq!((before.1.len(), e.cohorts_free()), (2, 0));
    let (parked, waiting, device) = (live[1].seq, live[3].seq, live[0].seq);
    let tokens = [7];
    let row = |seq| NewTokens { id: seq, tokens: &tokens, wants: Wants::Last };
    let said = |e: &mut Engine, batches: &[&[NewTokens<'_>]], why: &str| {
        let error = e.run_rows(batches, Flow::Async, &[], |i| i.pick = true).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    said(&mut e, &[&[], &[row(waiting)]], "there is room for 0");
    said(&mut e, &[&[row(parked)]], "parked at layer 0");
    let error = e.forward(&[row(parked)]).unwrap_err().to_string();
    assert!(error.contains("parked at layer 0"), "{error}");
    let error = e.swap(parked, Side::Device).unwrap_err().to_string();
    assert!(error.contains("parked at layer 0"), "{error}");
    // Steps of other kinds work, except with parked sequences.
    e.forward(&[row(device), row(waiting)]).unwrap();
    let batches: [&[NewTokens<'_>]; 2] = [&[row(device)], &[row(waiting)]];
    let error = e.run_rows(&batches, Flow::TwoLanes, &[], |_| ()).unwrap_err().to_string();
    assert!(error.contains("sub-batch 1 is parked"), "{error}");
    assert_eq!(e.cohorts(), before.1);
    live.iter().for_each(|l| e.remove(l.seq));
    let seq = e.add_at(Side::Device).unwrap();
    said(&mut e, &[&[], &[row(seq)]], "live on the host");
    said(&mut e, &[&[], &[]], "no sequence");
}

/// Weights on both sides: HELM's boundary, LIA's pinned layers before the host's, layers of the host between, a projection on the
/// device before the rest on the host, and embedding and head on either side.
fn splits() -> Vec<(&'static str, Placement)> {
    let on = |layer: usize| {
        let mut placement = Placement::all(Side::Device, LAYERS, 0);
        placement.layers[layer] = LayerPlacement::all(Side::Host);
        placement
    };
    let mut projects = on(1);
    projects.layers[1].weights = Residence::Both;
    projects.layers[1].decode = Policy::from_bits([false, true, true, true, true, true]);
    let head = Placement { head: Side::Host, ..on(0) };
    let ends = Placement { embedding: Side::Host, head: Side::Host, ..on(2) };
    vec![
        ("embedding", Placement::boundary(1, LAYERS, 0, 0)),
        ("boundary 2", Placement::boundary(2, LAYERS, 0, 0)),
        ("boundary 3", Placement::boundary(3, LAYERS, 0, 0)),
        ("pinned", on(2)),
        ("between", on(1)),
        ("projects", projects),
        ("head", head),
        ("ends", ends),
    ]
}

/// Over weights on both sides, tokens are those of running alone, with a host that is late or not, and pages come back.
#[test]
fn cohorts_over_a_layer_split_have_the_tokens_of_running_alone() {
    let m = model();
    let homes = [false, true, true, false, true, true];
    // Results are equal bit by bit, wherever they are computed.
    let o = Options { mode: Mode::Deterministic, ..options() };
    let want = alone_by(&m, &o, &homes);
    for (name, placement) in splits() {
        for seed in 0..8 {
            let (mut e, _) = over(&m, &o, (seed % 3 == 0).then_some(seed), placement.clone());
            assert!(e.overlaps(), "{name}");
            if seed % 4 != 3 {
                e.machine.let_cohorts_be_late();
            }
            let all = free(&e);
            let mut live = start(&mut e, &homes);
            e.machine.slow_host(seed);
            let (mut steps, mut advances) = (0, 0);
            while !ended(&live) {
                steps += 1;
                assert!(steps < 4000, "{name}: no end");
                let advanced = step(&mut e, &mut live, 2).unwrap();
                advances += advanced.cohorts.iter().filter(|c| c.advanced).count();
            }
            // Two cohorts, each with this many advances per token.
            let least = 2 * (N - 1) * placement.cohort_iterations() as usize;
            assert_eq!(advances, least, "{name}");
            for (i, (l, want)) in live.iter().zip(&want).enumerate() {
                assert_eq!(&l.tokens, want, "sequence {i}, {name}, seed {seed}");
            }
            live.iter().for_each(|l| e.remove(l.seq));
            assert_eq!(free(&e), all, "pages, {name}");
        }
    }
}

/// With a layer split, too, failures and removals affect only their cohort.
#[test]
fn failures_over_a_layer_split_leave_nothing_behind() {
    let m = model();
    let homes = [false, true, true, true];
    let o = Options { mode: Mode::Deterministic, ..options() };
    let want = alone_by(&m, &o, &homes);
    for (name, placement) in splits() {
        for n in 0..16 {
            let (mut e, runtime) = over(&m, &o, None, placement.clone());
            e.machine.let_cohorts_be_late();
            let all = free(&e);
            let mut live = start(&mut e, &homes);
            e.machine.slow_host(n);
            match n % 2 {
                0 => e.machine.panic_host(2 * n as usize),
                _ => runtime.set_faults(FaultPlan { refuse_launch: Some(2 * n), ..FaultPlan::default() }),
            }
            let mut steps = 0;
            while !ended(&live) {
                steps += 1;
                assert!(steps < 4000, "{name}: no end");
                // A panic in one of the step's own jobs fails the step.
                if let Err(error) = step(&mut e, &mut live, 2) {
                    let error = error.to_string();
                    assert!(error.contains("panicked") || n % 2 == 1, "{name}: {error}");
                    runtime.set_faults(FaultPlan::default());
                }
                if steps == n as usize {
                    e.remove(live[2].seq);
                    live[2].done = true;
                }
            }
            for (i, (l, want)) in live.iter().zip(&want).enumerate().filter(|(_, (l, _))| !l.done) {
                assert_eq!(&l.tokens, want, "sequence {i}, {name}, failure {n}");
            }
            live.iter().for_each(|l| e.remove(l.seq));
            assert_eq!(free(&e), all, "pages, {name}");
        }
    }
}
