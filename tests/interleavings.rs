//! Many requests, interleaved at random: see the module.

mod interleave;

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use interleave::{STRATEGIES, Script, Setup, Tally, Watchdog, World};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tandem::program::Far;

/// Runs scripts of seeds on any engine, as many as `TANDEM_INTERLEAVINGS` says.
#[test]
fn any_interleaving_gives_each_request_the_tokens_of_running_alone() {
    let watchdog = Watchdog::new(Duration::from_secs(120));
    let world = RefCell::new(World::new());
    let cases = std::env::var("TANDEM_INTERLEAVINGS").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
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

/// Weights that do not fit and keys and values that do not fit: lock step (NEO) over a layer split (HELM).
#[test]
fn lock_step_over_a_layer_split_gives_the_tokens_of_running_alone() {
    let (world, tally) = combination("anything", 40, |s| s.on_host = 2);
    at_least(&world.counts.two_lanes, 100);
    at_least(&world.counts.both_sides, 100);
    assert_eq!(
        world.counts.asynchronous.load(Ordering::Relaxed),
        0,
        "cohorts want all products on the device"
    );
    assert!(tally.swaps > 50 && tally.finished > 100, "{tally:?}");
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
    let (world, tally) = combination("anything", 40, |s| s.on_host = 0);
    at_least(&world.counts.asynchronous, 100);
    assert!(tally.finished > 100 && tally.cancelled > 5, "{tally:?}");
}
