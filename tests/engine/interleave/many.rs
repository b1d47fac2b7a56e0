//! Many scripts on lanes that act in turn, several at a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{BATCH, Counts, Script, Tally, Watchdog, World};

/// Runs batches of scripts from seed `from` on by as many threads as are given, as long as `goes_on` says so. `told` gets what each batch did.
///
/// # Errors
/// The first seed that failed, and why.
pub fn many(
    from: u64,
    threads: usize,
    strategies: &[&str],
    forget_waits: Option<u64>,
    goes_on: &(dyn Fn(u64) -> bool + Sync),
    told: &(dyn Fn(&Tally) + Sync),
) -> Result<Vec<Arc<Counts>>, (u64, String)> {
    let (next, failure) = (AtomicU64::new(from / BATCH), Mutex::new(None));
    let counts = Mutex::new(Vec::new());
    std::thread::scope(|all| {
        for _ in 0..threads {
            all.spawn(|| {
                let (watchdog, mut world) = (Watchdog::new(Duration::from_secs(120)), World::new());
                world.forget_waits = forget_waits;
                counts.lock().unwrap().push(world.counts.clone());
                loop {
                    let first = next.fetch_add(1, Ordering::Relaxed) * BATCH;
                    if failure.lock().unwrap().is_some() || !goes_on(first) {
                        return;
                    }
                    let mut tally = Tally::default();
                    for seed in first..first + BATCH {
                        watchdog.begin(seed);
                        match world.run_caught(&Script::in_turn(seed, strategies, usize::MAX)) {
                            Ok(done) => tally.add(&done),
                            Err(problem) => {
                                failure.lock().unwrap().get_or_insert((seed, problem));
                                return;
                            }
                        }
                    }
                    told(&tally);
                }
            });
        }
    });
    match failure.into_inner().unwrap() {
        Some(failure) => Err(failure),
        None => Ok(counts.into_inner().unwrap()),
    }
}

/// A failure with the fewest acts of its seed's script that still fail, as a sentence.
pub fn shortest(seed: u64, problem: &str, strategies: &[&str], forget_waits: Option<u64>) -> String {
    let whole = Script::in_turn(seed, strategies, usize::MAX);
    let fails = |most: usize| {
        let mut world = World::new();
        world.forget_waits = forget_waits;
        world.replay_caught(seed, strategies, most).err()
    };
    for most in 0..=whole.acts.len() {
        if let Some(problem) = fails(most) {
            let script = Script::in_turn(seed, strategies, most);
            return format!("seed {seed}, the first {most} acts: {problem}\nof {script:?}");
        }
    }
    format!("seed {seed}: {problem}; when run again it does not fail")
}
