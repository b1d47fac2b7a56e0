//! Faults at every place where they can be, and what no request should be: requests fail one by one with a reason, the rest go on, pages
//! come back, the process lives.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tandem::device::emulated::FaultPlan;
use tandem::engine::{Batcher, Event, Finish, Service, Shutdown};
use tandem::program::Far;
use tandem::sched::by_name;

use crate::interleave::{Act, Anything, Costs, Fault, Lanes, Script, Setup, Tally, World};

fn setup(lanes: Lanes) -> Setup {
    Setup {
        windows: false,
        on_host: 0,
        apart: 0,
        sequences: 5,
        rows: 16,
        sub_batches: 3,
        device_pages: 5,
        far_pages: 8,
        far: Far::Attend,
        lanes,
        copy_lane_rows: 1,
    }
}

/// Eight requests, a fault in the midst of them, and three more behind it.
fn script(seed: u64, strategy: &str, fault: Fault, (on_host, apart): (u8, u8)) -> Script {
    let mut acts = vec![Act::Burst(8)];
    acts.extend([Act::Step; 4]);
    acts.push(Act::Fault(fault));
    acts.extend([Act::Step; 6]);
    acts.extend([1, 7, 12].map(Act::Submit));
    Script { seed, setup: Setup { on_host, apart, ..setup(Lanes::InTurn) }, strategy: strategy.into(), acts }
}

/// The fault at every place up to `n`, every `step`-th. Returns what happened in all, and the reasons given.
fn everywhere(n: u64, step: usize, fault: impl Fn(u64) -> Fault) -> (Tally, BTreeSet<String>) {
    let (mut world, mut all, mut reasons) = (World::new(), Tally::default(), BTreeSet::new());
    for strategy in ["anything", "neo", "apex"] {
        for at in (1..=n).step_by(step) {
            // In turn: all on the device, a block on the CPU before the device's, one between them, all feed-forwards.
            let units = [(0, 0), (0b11, 0), (0b100, 0), (0, 0b111)][at as usize / step % 4];
            let done = world
                .run_caught(&script(at, strategy, fault(at), units))
                .unwrap_or_else(|e| panic!("{strategy}, {:?}, units {units:?}: {e}", fault(at)));
            all.add(&done);
            reasons.extend(world.reasons.iter().cloned());
        }
    }
    (all, reasons)
}

fn some(reasons: &BTreeSet<String>, what: &str) {
    assert!(reasons.iter().any(|r| r.contains(what)), "nobody was told of {what:?}: {reasons:#?}");
}

#[test]
fn a_device_lost_at_any_operation_ends_each_request_with_a_reason() {
    let (tally, reasons) = everywhere(600, 2, Fault::Lost);
    assert!(tally.failed > 3000, "{tally:?}");
    // In the midst of an iteration, and of moves of pages both ways.
    for what in [
        "lost at operation ffn_up",
        "lost at operation gather_pages",
        "lost at operation scatter_pages",
        "lost at copy",
    ] {
        some(&reasons, what);
    }
}

#[test]
fn a_copy_that_never_ends_ends_each_request_with_a_reason() {
    let (tally, reasons) = everywhere(120, 1, Fault::Endless);
    assert!(tally.failed > 1000, "{tally:?}");
    some(&reasons, "never ends");
}

#[test]
fn a_panic_of_the_host_anywhere_fails_no_other_request() {
    let (tally, reasons) = everywhere(200, 1, Fault::Panic);
    // A step is made again request by request: a panic that does not come again ends nobody but who was alone in the step.
    assert!(tally.failed < tally.scripts / 4 && tally.finished > 8 * tally.scripts, "{tally:?}");
    assert!(reasons.iter().all(|r| r.contains("panicked: a fault was injected")), "{reasons:?}");
}

#[test]
fn a_launch_refused_anywhere_fails_no_other_request() {
    let (tally, _) = everywhere(400, 2, Fault::Refused);
    assert!(tally.failed < tally.scripts / 4 && tally.finished > 8 * tally.scripts, "{tally:?}");
}

/// On lanes with threads, behind a service: the wait is bounded by the watchdog.
#[test]
fn a_copy_that_never_ends_ends_all_streams_in_time_and_the_process_lives() {
    let world = World::new();
    for strategy in ["anything", "neo", "apex"] {
        let (runtime, engine) = world.engine_with(&setup(Lanes::Threads(None)), Duration::from_millis(400));
        let by: Box<dyn tandem::sched::Strategy> = match strategy {
            "anything" => Box::new(Anything::new(3)),
            name => by_name(name).expect("a strategy"),
        };
        let service = Service::start(Batcher::with(engine, by, Box::new(Costs::of(3)))).unwrap();
        let client = service.client();
        let streams: Vec<_> = (0..12).map(|i| client.submit(world.request(i)).unwrap().1).collect();
        runtime.set_faults(FaultPlan { endless_copy: Some(9), ..FaultPlan::default() });
        let begun = Instant::now();
        let mut failed = 0;
        for stream in streams {
            // A stream whose service has ended says why.
            if let Some(Event::End(Finish::Failed(why))) = stream.last() {
                let why = why.to_string();
                assert!(
                    why.contains("has not ended after")
                        || why.contains("unavailable")
                        || why.contains("lost"),
                    "{why}"
                );
                failed += 1;
            }
        }
        assert!(failed > 0 && begun.elapsed() < Duration::from_secs(60), "{failed} in {:?}", begun.elapsed());
        assert!(client.submit(world.request(0)).is_err(), "nothing is served any more");
        assert!(service.shutdown(Shutdown::Cancel).is_err());
    }
}

#[test]
fn a_thousand_requests_at_once_all_get_their_own_answers() {
    let mut world = World::new();
    for (i, strategy) in ["gpu-only", "fastdecode", "neo", "apex", "auto"].into_iter().enumerate() {
        let acts = vec![Act::Burst(1000), Act::Bad(0), Act::Bad(2)];
        let script = Script { seed: i as u64, setup: setup(Lanes::InTurn), strategy: strategy.into(), acts };
        let tally = world.run_caught(&script).unwrap_or_else(|e| panic!("{strategy}: {e}"));
        assert_eq!((tally.finished, tally.failed), (1000, 0), "{strategy}");
    }
}

#[test]
fn what_no_engine_can_serve_is_refused_with_the_numbers() {
    let world = World::new();
    let small = Setup { device_pages: 1, far_pages: 2, ..setup(Lanes::InTurn) };
    let (_, engine) = world.engine_with(&small, Duration::from_secs(600));
    let mut all = Batcher::with(engine, by_name("apex").unwrap(), Box::new(Costs::of(1)));
    let refused = |all: &mut Batcher, prompt: usize, max_tokens: usize| {
        let request = tandem::engine::Request { prompt: vec![1; prompt], max_tokens, ..world.request(0) };
        all.submit(request).expect_err("it is refused").to_string()
    };
    let empty = refused(&mut all, 0, 4);
    assert!(empty.contains("empty"), "{empty}");
    let long = refused(&mut all, 97, 1);
    assert!(long.contains("97") && long.contains("96"), "{long}");
    // Three pages; one side holds it all.
    let wide = refused(&mut all, 60, 30);
    assert!(wide.contains("needs 3 pages") && wide.contains("1 on the device and 2 on the host"), "{wide}");
    // Not what another strategy could serve either, and this one never would: it is told at once.
    let small = Setup { device_pages: 3, far_pages: 2, ..setup(Lanes::InTurn) };
    let (_, engine) = world.engine_with(&small, Duration::from_secs(600));
    let mut host_only = Batcher::with(engine, by_name("fastdecode").unwrap(), Box::new(Costs::of(1)));
    let host = refused(&mut host_only, 60, 30);
    assert!(host.contains("of which strategy fastdecode gives it 2"), "{host}");
    assert!(all.is_idle() && host_only.is_idle());
    // What fits is served.
    let (_, events) = all.submit(world.request(3)).unwrap();
    all.run();
    assert!(matches!(events.try_iter().last(), Some(Event::End(Finish::Stop | Finish::Length))));
}
