//! Many requests, interleaved at random: see the module.

mod faults;

use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::interleave::{BATCH, Counts, STRATEGIES, Script, Setup, Tally, Watchdog, World, many, shortest};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tandem::program::Far;

/// As many as a variable of the environment says.
fn count(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(otherwise)
}

/// Runs scripts of seeds on engines whose lanes act in turn, as many as `TANDEM_INTERLEAVINGS` says: each seed is an order of events.
#[test]
fn any_order_of_events_gives_each_request_the_tokens_of_running_alone() {
    let n = count("TANDEM_INTERLEAVINGS", 2_000);
    let from = count("TANDEM_INTERLEAVINGS_FROM", 0);
    let all = Mutex::new(Tally::default());
    let told = |done: &Tally| all.lock().unwrap().add(done);
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get().min(8));
    let counts = many(from, threads, &STRATEGIES, None, &|seed| seed < from + n, &told)
        .unwrap_or_else(|(seed, problem)| panic!("{}", shortest(seed, &problem, &STRATEGIES, None)));
    let (tally, counts) = (all.into_inner().unwrap(), Counts::sum(&counts));
    println!("{tally:?}\n{counts:?}");
    let of = |n: &AtomicUsize| n.load(Ordering::Relaxed);
    for (what, cancelled) in Counts::STATES.iter().zip(&counts.cancelled) {
        assert!(
            of(cancelled) >= n as usize / 1000,
            "cancelled while {what}: {} of {n} scripts",
            of(cancelled)
        );
    }
    // Of every kind there were enough, whatever the seeds.
    let least = n as usize / 10;
    for (what, seen) in [
        ("both lanes", of(&counts.two_lanes)),
        ("cohorts", of(&counts.asynchronous)),
        ("cohorts over a layer split", of(&counts.asynchronous_split)),
        ("cohorts that stayed parked", of(&counts.late)),
        ("rows on the copy lanes", of(&counts.copy_lanes)),
        ("rows of both sides", of(&counts.both_sides)),
        ("splits", of(&counts.splits)),
        ("swaps", tally.swaps),
        ("cancelled", tally.cancelled),
        ("failed by faults", 10 * tally.failed),
    ] {
        assert!(seen >= least, "{what}: {seen} of {n} scripts");
    }
}

/// A seed says all: the same events in the same order, and so the same steps.
#[test]
fn a_seed_runs_the_same_way_again() {
    let runs = [(); 2].map(|()| {
        let mut world = World::new();
        let seeds = (0..BATCH).chain(5 * BATCH..5 * BATCH + 20).chain(9 * BATCH..9 * BATCH + 20);
        seeds
            .map(|seed| world.run(&Script::in_turn(seed, &STRATEGIES, usize::MAX)).expect("it runs"))
            .collect::<Vec<Tally>>()
    });
    for (i, (first, again)) in runs[0].iter().zip(&runs[1]).enumerate() {
        assert_eq!(format!("{first:?}"), format!("{again:?}"), "script {i}");
    }
    assert!(runs[0].iter().all(|t| t.turns > 0));
}

/// What the others are for is found: lanes that forget to wait. It is found again by its seed, and without the fault there is nothing.
#[test]
fn waits_that_are_forgotten_are_found_and_found_again_from_the_seed() {
    let world = |forget_waits| {
        let mut world = World::new();
        world.forget_waits = forget_waits;
        world
    };
    for forget_waits in [Some(1), Some(7)] {
        let mut at = world(forget_waits);
        let mut run = |seed| at.run_caught(&Script::in_turn(seed, &STRATEGIES, usize::MAX));
        let found = (0..20 * BATCH).find_map(|seed| Some((seed, run(seed).err()?)));
        let (seed, problem) = found.expect("somebody's tokens are wrong");
        let again = world(forget_waits).replay_caught(seed, &STRATEGIES, usize::MAX);
        assert_eq!(again.unwrap_err(), problem, "seed {seed}");
        let short = shortest(seed, &problem, &STRATEGIES, forget_waits);
        assert!(short.contains("acts: "), "{short}");
        world(None).replay_caught(seed, &STRATEGIES, usize::MAX).unwrap();
    }
}

/// Runs scripts on lanes with threads, as many as `TANDEM_THREADED_INTERLEAVINGS` says.
#[test]
fn any_interleaving_of_threads_gives_each_request_the_tokens_of_running_alone() {
    let watchdog = Watchdog::new(Duration::from_secs(120));
    let world = RefCell::new(World::new());
    let cases = count("TANDEM_THREADED_INTERLEAVINGS", 300) as u32;
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 60, ..Config::default() };
    let run = |(seed, most): (u64, usize)| {
        let script = Script::of(seed, &STRATEGIES, most);
        watchdog.begin(seed);
        let done = world.borrow_mut().run(&script);
        done.map(|_| ()).map_err(|e| TestCaseError::fail(format!("{e}\nof {script:?}")))
    };
    // A failure shrinks to the fewest acts of its seed.
    TestRunner::new(config).run(&(any::<u64>(), 1..=41usize), run).unwrap();
}

/// Runs `n` scripts by one strategy, on engines that `setup` makes of the random ones.
fn combination(strategy: &str, n: u64, setup: impl Fn(&mut Setup)) -> (World, Tally) {
    let watchdog = Watchdog::new(Duration::from_secs(120));
    let (mut world, mut all) = (World::new(), Tally::default());
    for seed in 0..n {
        let mut script = Script::of(seed, &[strategy], usize::MAX);
        setup(&mut script.setup);
        watchdog.begin(seed);
        let tally = world.run(&script).unwrap_or_else(|e| panic!("seed {seed}: {e}\nof {script:?}"));
        all.add(&tally);
    }
    (world, all)
}

#[track_caller]
fn at_least(what: &AtomicUsize, least: usize) {
    let n = what.load(Ordering::Relaxed);
    assert!(n >= least, "only {n} times, wanted {least}");
}

/// Weights that do not fit and keys and values that do not fit: lock step (NEO) and cohorts (APEX) over a layer split (HELM), with the
/// embedding alone on the CPU, and with a block; with a block between the device's; with the last and the head.
#[test]
fn both_flows_over_a_layer_split_give_the_tokens_of_running_alone() {
    for on_host in [0b1, 0b11, 0b100, 0b1_1000] {
        let (world, tally) = combination("anything", 40, |s| s.on_host = on_host);
        at_least(&world.counts.two_lanes, 60);
        at_least(&world.counts.both_sides, 60);
        at_least(&world.counts.asynchronous, 60);
        assert!(tally.swaps > 40 && tally.finished > 80, "{tally:?}");
    }
}

/// Keys and values of one request on both sides, attended on both or streamed, in batches with others.
#[test]
fn a_request_on_both_sides_within_a_batch_of_others_has_the_tokens_of_running_alone() {
    for far in [Far::Attend, Far::Stream] {
        let (world, tally) =
            combination("anything", 25, |s| (s.far, s.device_pages, s.far_pages) = (far, 5, 8));
        at_least(&world.counts.splits, 50);
        at_least(&world.counts.two_lanes, 30);
        assert!(tally.finished > 60, "{tally:?}");
    }
}

/// Cohorts beside the device's rows (APEX), with members that are cancelled, splits, and steps of other flows between.
#[test]
fn cohorts_among_other_flows_have_the_tokens_of_running_alone() {
    let (world, tally) = combination("anything", 40, |s| (s.on_host, s.apart) = (0, 0));
    at_least(&world.counts.asynchronous, 100);
    assert!(tally.finished > 100 && tally.cancelled > 5, "{tally:?}");
}

/// Cohorts where the device waits for feed-forwards of the host, as for experts: of all blocks, of one, and behind a block of the host's.
#[test]
fn cohorts_behind_feed_forwards_of_the_host_have_the_tokens_of_running_alone() {
    for (on_host, apart) in [(0, 0b111), (0, 0b10), (0b11, 0b110)] {
        let (world, tally) = combination("anything", 40, |s| (s.on_host, s.apart) = (on_host, apart));
        at_least(&world.counts.asynchronous_split, 60);
        at_least(&world.counts.two_lanes, 40);
        assert!(tally.finished > 80 && tally.cancelled > 5, "{tally:?}");
    }
}
