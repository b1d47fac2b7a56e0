//! Devices of any size: what a plan accepts is loaded and runs, through `src/device/cuda` on the stand-in for the driver, and its tokens are
//! the CPU's; what it does not accept lacks memory, in numbers. Thousands of them: a process has one device after another
//! (`fake_set_memory`), and afterwards nothing of it may be in use.
//!
//! `tests/cli/random_memories.rs` has a few by the command line, a process each.

mod case;
mod judge;

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::fake_driver::{Cases, executes, function};
use case::{Case, Outcome};
use judge::Judge;

const CASES: Cases = Cases::of(module_path!());

/// Cases of a process.
const SHARE: usize = 100;

/// Of the first 10 000, one of each kind that failed: plans that counted on the last granule, a mixture behind a near tie of experts, and
/// `gpu-only` with fewer pages than a request takes.
const ONCE_FAILED: [u64; 5] = [138, 210, 255, 1721, 7458];

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name)
        .ok()
        .map_or(otherwise, |n| n.parse().unwrap_or_else(|_| panic!("{name}={n}: not a number")))
}

/// Puts another device in the place of the stand-in's: the bytes of the last one that are still in use.
fn set_memory(bytes: u64, context: u64) -> usize {
    // SAFETY: the function has this signature.
    let set = unsafe { function::<extern "C" fn(usize, usize) -> usize>("fake_set_memory") };
    set(bytes as usize, context as usize)
}

/// One process: the cases whose numbers `FAKE_CASE` has. A line for each, and no failure hides the next one.
#[test]
#[ignore = "run by the other, in a process of its own"]
fn inside() {
    let numbers = std::env::var("FAKE_CASE").expect("the other test sets FAKE_CASE");
    let (mut models, mut failures) = (HashMap::new(), Vec::new());
    for number in numbers.split(',').map(|n| n.parse().expect("a number")) {
        let case = Case::of(number);
        let judge = models.entry(case.model()).or_insert_with_key(|name| Judge::of(name));
        let begun = std::time::Instant::now();
        assert_eq!(set_memory(case.memory, case.context), 0, "bytes of the case before {number} are in use");
        let outcome = catch_unwind(AssertUnwindSafe(|| case.run(judge)))
            .unwrap_or_else(|_| Outcome::Failed("it panicked".to_owned()));
        println!("case {number}: {}: {outcome}, {} ms", case.kind, begun.elapsed().as_millis());
        if let Outcome::Failed(why) = outcome {
            failures.push(format!("case {number}, {case:?}: {why}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// `TANDEM_MEMORY_CASES` for more of them.
#[test]
fn accepted_plans_load_and_run_with_the_cpus_tokens() {
    let (cases, first) = (number("TANDEM_MEMORY_CASES", 200), number("TANDEM_MEMORY_FIRST", 0));
    if !executes() {
        return;
    }
    let numbers: Vec<u64> = ONCE_FAILED.into_iter().chain(first..first + cases).collect();
    let (shares, next) = (numbers.chunks(SHARE), AtomicUsize::new(0));
    let (outcomes, failures) = (Mutex::new(BTreeMap::<String, usize>::new()), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(share) = shares.clone().nth(at) else { return };
            let these = share.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            // As late as it may, or by chance.
            let order = if at.is_multiple_of(2) { "late".to_owned() } else { format!("calls:{at}") };
            let env = [("FAKE_ORDER", &*order), ("FAKE_CHECKS", "0"), ("FAKE_PLAIN", "1")];
            let Some((succeeded, text)) = CASES.tried(&these, &env) else { return };
            // Behind the name of the test, too, since libtest begins a line with it.
            let lines = text.lines().filter_map(|l| l.split_once("case ")?.1.split_once(": "));
            let lines = lines.filter(|(number, _)| number.parse::<u64>().is_ok());
            let mut all = outcomes.lock().unwrap();
            lines
                .filter_map(|(_, l)| l.rsplit_once(", "))
                .for_each(|(what, _)| *all.entry(what.to_owned()).or_default() += 1);
            if !succeeded || text.contains("fake driver: gave back") || text.contains("fake driver: leaked") {
                failures.lock().unwrap().push(text);
            }
        }
    };
    std::thread::scope(|s| (0..2).for_each(|_| drop(s.spawn(work))));
    let outcomes = outcomes.into_inner().unwrap();
    println!("{outcomes:#?}");
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert_eq!(outcomes.values().sum::<usize>(), numbers.len());
    if cases >= 200 {
        let of =
            |what: &str| outcomes.iter().filter(|(k, _)| k.contains(what)).map(|(_, n)| n).sum::<usize>();
        for (what, least) in [
            ("on cuda:0", 20),
            ("on both", 15),
            ("on cpu", 1),
            ("requests: on", 5),
            ("mixture: on", 8),
            ("refused", 8),
        ] {
            assert!(of(what) * 100 >= numbers.len() * least, "{what}: {}, not {least}%", of(what));
        }
    }
}
