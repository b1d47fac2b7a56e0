//! Random interleavings of many requests for as long as one likes, the same as in `tests/engine/interleavings/`: arrivals,
//! cancellations, steps, swaps and faults by every strategy, on a device in memory of a few pages. Each request must get the
//! tokens of running alone. A failure prints its seed, which runs it again, event by event:
//!
//! ```console
//! $ cargo run --release --example soak -- --minutes 10
//! $ cargo run --release --example soak -- --seed 1234            # one run, told act by act if it fails
//! ```
//!
//! `--forget-waits 7` breaks the device, which then forgets every seventh wait of a lane for an event: shows what a failure looks like.
//!
//! Lanes act in turn, in orders that seeds make; `--lanes threads` soaks on lanes with threads, whose orders come by chance (a seed is
//! then its script, not its order). `--threads N` soaks on as many engines at a time (2), `--from S` begins at another seed, `--strategy NAME` keeps to one.

#[path = "../tests/engine/interleave/mod.rs"]
mod interleave;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use interleave::{Counts, STRATEGIES, Script, Tally, Watchdog, World, many, shortest};

struct Args {
    minutes: f64,
    seed: Option<u64>,
    from: u64,
    threads: usize,
    strategy: Option<String>,
    in_turn: bool,
    forget_waits: Option<u64>,
}

fn args() -> Result<Args, String> {
    let mut args = Args {
        minutes: 1.0,
        seed: None,
        from: 0,
        threads: 2,
        strategy: None,
        in_turn: true,
        forget_waits: None,
    };
    let mut given = std::env::args().skip(1);
    while let Some(flag) = given.next() {
        let value = given.next().ok_or_else(|| format!("{flag} wants a value"))?;
        let bad = |_| format!("{flag} {value}: not a number");
        match flag.as_str() {
            "--minutes" => {
                args.minutes = value.parse().map_err(|_| format!("{flag} {value}: not a number"))?
            }
            "--seed" => args.seed = Some(value.parse().map_err(bad)?),
            "--from" => args.from = value.parse().map_err(bad)?,
            "--threads" => args.threads = value.parse().map_err(bad)?,
            "--forget-waits" => args.forget_waits = Some(value.parse().map_err(bad)?).filter(|&n| n > 0),
            "--lanes" if ["turns", "threads"].contains(&value.as_str()) => args.in_turn = value == "turns",
            "--lanes" => return Err(format!("--lanes {value}: turns or threads")),
            "--strategy" if STRATEGIES.contains(&value.as_str()) => args.strategy = Some(value),
            "--strategy" => return Err(format!("--strategy {value}: one of {}", STRATEGIES.join(", "))),
            _ => {
                return Err(format!(
                    "{flag}: one of --minutes, --seed, --from, --threads, --lanes, --forget-waits, --strategy"
                ));
            }
        }
    }
    if args.threads == 0 || !(args.minutes > 0.0 && args.minutes.is_finite()) {
        return Err("at least one thread and some time are needed".into());
    }
    Ok(args)
}

fn main() -> ExitCode {
    let args = match args() {
        Ok(args) => args,
        Err(problem) => {
            eprintln!("soak: {problem}");
            return ExitCode::from(2);
        }
    };
    let strategies: Vec<&str> = match &args.strategy {
        Some(name) => vec![name],
        None => STRATEGIES.to_vec(),
    };
    match args.seed {
        Some(seed) => again(&args, seed, &strategies),
        None => soak(&args, &strategies),
    }
}

/// The run of one seed.
fn again(args: &Args, seed: u64, strategies: &[&str]) -> ExitCode {
    let watchdog = Watchdog::new(Duration::from_secs(120));
    watchdog.begin(seed);
    let mut world = World::new();
    world.forget_waits = args.forget_waits;
    let (script, done) = match args.in_turn {
        true => {
            (Script::in_turn(seed, strategies, usize::MAX), world.replay_caught(seed, strategies, usize::MAX))
        }
        false => {
            let script = Script::of(seed, strategies, usize::MAX);
            let done = world.run_caught(&script);
            (script, done)
        }
    };
    println!("{script:#?}");
    match done {
        Ok(tally) => {
            println!("{tally:?}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("soak: seed {seed}: {problem}");
            if args.in_turn {
                eprintln!("soak: {}", shortest(seed, &problem, strategies, args.forget_waits));
            }
            ExitCode::FAILURE
        }
    }
}

fn soak(args: &Args, strategies: &[&str]) -> ExitCode {
    let all = Mutex::new(Tally::default());
    let (begun, over) = (Instant::now(), AtomicBool::new(false));
    let until = begun + Duration::from_secs_f64(60.0 * args.minutes);
    let told = |done: &Tally| all.lock().unwrap().add(done);
    let done = std::thread::scope(|threads| {
        threads.spawn(|| {
            // A line that is written over on a terminal, a line every ten seconds elsewhere.
            let terminal = std::io::stderr().is_terminal();
            let mut next = if terminal { 0.0 } else { 10.0 };
            while Instant::now() < until && !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(500));
                let time = begun.elapsed();
                if time.as_secs_f64() >= next {
                    tell(time, &all.lock().unwrap(), terminal);
                    next += if terminal { 0.0 } else { 10.0 };
                }
            }
        });
        let goes_on = |_| Instant::now() < until;
        let done = match args.in_turn {
            true => many(args.from, args.threads, strategies, args.forget_waits, &goes_on, &told),
            false => threaded(args, strategies, &goes_on, &told),
        };
        over.store(true, Ordering::Relaxed);
        done
    });
    eprintln!();
    match done {
        Ok(counts) => {
            println!("{:?} in {:.0} s, none wrong", all.lock().unwrap(), begun.elapsed().as_secs_f64());
            println!("{:?}", Counts::sum(&counts));
            ExitCode::SUCCESS
        }
        Err((seed, problem)) => {
            eprintln!("soak: seed {seed}: {problem}\nsoak: run it again with --seed {seed}");
            ExitCode::FAILURE
        }
    }
}

/// The same on lanes with threads.
fn threaded(
    args: &Args,
    strategies: &[&str],
    goes_on: &(dyn Fn(u64) -> bool + Sync),
    told: &(dyn Fn(&Tally) + Sync),
) -> Result<Vec<Arc<Counts>>, (u64, String)> {
    let (next, failure, counts) = (AtomicU64::new(args.from), Mutex::new(None), Mutex::new(Vec::new()));
    std::thread::scope(|threads| {
        for _ in 0..args.threads {
            threads.spawn(|| {
                let (watchdog, mut world) = (Watchdog::new(Duration::from_secs(120)), World::new());
                world.forget_waits = args.forget_waits;
                counts.lock().unwrap().push(world.counts.clone());
                while goes_on(0) && failure.lock().unwrap().is_none() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    watchdog.begin(seed);
                    match world.run_caught(&Script::of(seed, strategies, usize::MAX)) {
                        Ok(done) => told(&done),
                        Err(problem) => {
                            failure.lock().unwrap().get_or_insert((seed, problem));
                        }
                    }
                }
            });
        }
    });
    failure.into_inner().unwrap().map_or_else(|| Ok(counts.into_inner().unwrap()), Err)
}

/// One line of progress; on a terminal the next one is written over it.
fn tell(time: Duration, t: &Tally, terminal: bool) {
    let seconds = time.as_secs_f64();
    let Tally { scripts, steps, tokens, swaps, cancelled, failed, finished, .. } = t;
    let (begin, end) = if terminal { ("\r", "") } else { ("", "\n") };
    eprint!(
        "{begin}{seconds:6.0} s  {scripts} interleavings ({:.0}/s), {steps} steps, {tokens} tokens, {swaps} swaps; {finished} requests \
         finished, {cancelled} cancelled, {failed} failed by faults {end}",
        *scripts as f64 / seconds
    );
}
