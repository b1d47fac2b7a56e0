//! Random interleavings of many requests for as long as one likes, the same as in `tests/interleavings.rs`: arrivals,
//! cancellations, steps, swaps and faults by every strategy, on a device in memory of a few pages. Each request must get the
//! tokens of running alone. A failure prints its seed, which runs it again:
//!
//! ```console
//! $ cargo run --release --example soak -- --minutes 10
//! $ cargo run --release --example soak -- --seed 1234            # one run, told act by act if it fails
//! ```
//!
//! `--threads N` soaks on as many engines at a time (2), `--from S` begins at another seed, `--strategy NAME` keeps to one.

#[path = "../tests/interleave/mod.rs"]
mod interleave;

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use interleave::{STRATEGIES, Script, Tally, Watchdog, World};

struct Args {
    minutes: f64,
    seed: Option<u64>,
    from: u64,
    threads: usize,
    strategy: Option<String>,
}

fn args() -> Result<Args, String> {
    let mut args = Args { minutes: 1.0, seed: None, from: 0, threads: 2, strategy: None };
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
            "--strategy" if STRATEGIES.contains(&value.as_str()) => args.strategy = Some(value),
            "--strategy" => return Err(format!("--strategy {value}: one of {}", STRATEGIES.join(", "))),
            _ => {
                return Err(format!("{flag}: one of --minutes, --seed, --from, --threads, --strategy"));
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
    if let Some(seed) = args.seed {
        let watchdog = Watchdog::new(Duration::from_secs(120));
        watchdog.begin(seed);
        let script = Script::of(seed, &strategies, usize::MAX);
        println!("{script:#?}");
        return match World::new().run(&script) {
            Ok(tally) => {
                println!("{tally:?}");
                ExitCode::SUCCESS
            }
            Err(problem) => {
                eprintln!("soak: seed {seed}: {problem}");
                ExitCode::FAILURE
            }
        };
    }
    let (next, all) = (AtomicU64::new(args.from), Mutex::new(Tally::default()));
    let failure: Mutex<Option<String>> = Mutex::new(None);
    let begun = Instant::now();
    let until = begun + Duration::from_secs_f64(60.0 * args.minutes);
    let (all, failure, strategies) = (&all, &failure, &strategies);
    std::thread::scope(|threads| {
        for _ in 0..args.threads {
            threads.spawn(|| {
                let watchdog = Watchdog::new(Duration::from_secs(120));
                let mut world = World::new();
                while Instant::now() < until && failure.lock().unwrap().is_none() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    watchdog.begin(seed);
                    match world.run(&Script::of(seed, strategies, usize::MAX)) {
                        Ok(tally) => all.lock().unwrap().add(&tally),
                        Err(problem) => {
                            failure.lock().unwrap().get_or_insert(format!("seed {seed}: {problem}"));
                        }
                    }
                }
            });
        }
        threads.spawn(|| {
            while Instant::now() < until && failure.lock().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(500).min(until - Instant::now().min(until)));
                tell(begun.elapsed(), &all.lock().unwrap());
            }
        });
    });
    eprintln!();
    match failure.lock().unwrap().take() {
        None => {
            println!("{:?} in {:.0} s, none wrong", all.lock().unwrap(), begun.elapsed().as_secs_f64());
            ExitCode::SUCCESS
        }
        Some(problem) => {
            eprintln!("soak: {problem}\nsoak: run it again with --seed");
            ExitCode::FAILURE
        }
    }
}

/// One line that is written over and over.
fn tell(time: Duration, t: &Tally) {
    let seconds = time.as_secs_f64();
    let Tally { scripts, steps, tokens, swaps, cancelled, failed, finished } = t;
    eprint!(
        "\r{seconds:6.0} s  {scripts} interleavings ({:.0}/s), {steps} steps, {tokens} tokens, {swaps} swaps; {finished} requests \
         finished, {cancelled} cancelled, {failed} failed by faults ",
        *scripts as f64 / seconds
    );
}
