use proptest::prelude::*;

use super::report::Quantiles;
use super::*;
use crate::Error;
use crate::cache::PAGE_TOKENS;
use crate::model::synth;
use crate::plan::{Hardware, Predictor, Sizes, hardware};
use crate::program::{Flow, Group, Iteration, Kv, Phase, Placement, RequestId, Side, SubBatch, Wants};
use crate::sched::{Continuous, Decision, Limits, Predict, Queues, Strategy, Targets};
use crate::workload::Arrival;

/// Without pages.
fn options() -> Options {
    Options {
        rows: 512,
        sub_batches: 2,
        sequences: 64,
        capacity: PageCapacity { device_pages: 0, host_pages: 0 },
        targets: Targets::NONE,
        most_answer: None,
        learns_lengths: true,
    }
}

struct Machine {
    hardware: Hardware,
    sizes: Sizes,
}

impl Machine {
    fn new() -> Machine {
        let sizes = Sizes::of_spec(&synth::spec("llama-2-7b").unwrap());
        Machine { hardware: hardware::named("t4-xeon").unwrap(), sizes }
    }

    fn with<T>(&self, device_pages: usize, run: impl FnOnce(&Predictor, &Options) -> T) -> T {
        let capacity = PageCapacity { device_pages, host_pages: 2000 };
        let placement =
            Placement { host_pages: 2000, ..Placement::all(Side::Device, self.sizes.layers(), device_pages) };
        let predicted = Predictor::new(self.hardware.clone(), self.sizes.clone(), placement);
        run(&predicted, &Options { capacity, ..options() })
    }

    fn run(&self, requests: &[Arrival], device_pages: usize) -> Report {
        self.with(device_pages, |predicted, options| {
            // Continuous batching is of one side.
            let options = Options { capacity: PageCapacity { device_pages, host_pages: 0 }, ..*options };
            simulate(requests, &mut Continuous::default(), predicted, &options, &mut |_| ()).unwrap()
        })
    }
}

fn request(at: f64, input: u32, output: u32) -> Arrival {
    Arrival { at, input, output }
}

#[test]
fn a_request_alone_takes_its_iterations() {
    let machine = Machine::new();
    let report = machine.run(&[request(3.0, 100, 4)], 100);
    let seconds = machine.with(100, |predicted, _| {
        let group = |first, tokens, phase| Group {
            request: RequestId { slot: 0, generation: 0 },
            phase,
            first,
            tokens,
            kv: Kv::Device,
            wants: Wants::Last,
        };
        let mut steps = vec![group(0, 100, Phase::Prefill)];
        steps.extend((100..103).map(|first| group(first, 1, Phase::Decode)));
        steps.into_iter().map(|g| predicted.iteration(&Iteration::serial(vec![g], false))).collect::<Vec<_>>()
    });
    let near = |a: Option<f64>, b: f64| assert!((a.unwrap() - b).abs() < 1e-9 * b, "{a:?} for {b}");
    near(report.ttft_s.p50, seconds[0]);
    near(report.tpot_s.gpu.p99, seconds[1..].iter().sum::<f64>() / 3.0);
    near(Some(report.makespan_s), 3.0 + seconds.iter().sum::<f64>());
    assert_eq!(report.tpot_s.host, Quantiles::default());
    assert_eq!((report.iterations, report.requests.finished, report.requests.failed), (4, 1, 0));
}

#[test]
fn a_request_that_fits_nowhere_fails_and_the_rest_go_on() {
    let machine = Machine::new();
    let long = 4000 * PAGE_TOKENS as u32;
    let report = machine.run(&[request(0.0, 50, 5), request(0.0, long, 5), request(1.0, 60, 1)], 20);
    assert_eq!((report.requests.finished, report.requests.failed), (2, 1));
    let (why, n) = &report.requests.reasons[0];
    assert!(*n == 1 && why.contains("pages of keys and values"), "{why}");
}

#[test]
fn an_offline_batch_keeps_the_gpu_busy_and_an_idle_hour_does_not() {
    let machine = Machine::new();
    let batch: Vec<Arrival> = (0..40).map(|_| request(0.0, 64, 32)).collect();
    let report = machine.run(&batch, 1000);
    assert!(report.gpu_busy > 0.97 && report.cpu_busy == 0.0, "{report:?}");
    assert!((report.throughput_tok_s * report.makespan_s - 40.0 * 32.0).abs() < 1e-6);
    let idle = machine.run(&[request(0.0, 64, 32), request(3600.0, 64, 32)], 1000);
    assert!(idle.gpu_busy < 0.01 && idle.gpu_bubbles < 0.01 && idle.makespan_s > 3600.0);
    assert!(idle.ttft_s.p99.unwrap() < 1.0, "nobody waits for the clock");
}

fn cohort(tokens: u32, at: Option<u32>) -> SubBatch {
    let group = |slot| Group {
        request: RequestId { slot, generation: 0 },
        phase: Phase::Decode,
        first: tokens,
        tokens: 1,
        kv: Kv::Host,
        wants: Wants::Last,
    };
    SubBatch { groups: (100..150).map(group).collect(), at }
}

/// A cohort advances by a layer an iteration; one that is slightly over an iteration advances in every other.
#[test]
fn a_cohort_over_the_window_loses_a_whole_iteration() {
    let machine = Machine::new();
    machine.with(1000, |predicted, _| {
        let resident = Group {
            request: RequestId { slot: 0, generation: 0 },
            kv: Kv::Device,
            ..cohort(300, None).groups[0]
        };
        let alone = predicted.iteration(&Iteration::serial(vec![resident], false));
        let one = cohorts::attention(predicted, &cohort(100, None).groups, 1) / 100.0;
        let laps = |tokens: u32| {
            let mut clock = SimClock::new(predicted);
            let (mut now, mut at, mut laps) = (0.0, None, Vec::new());
            for _ in 0..12 {
                let sub_batches = vec![SubBatch { groups: vec![resident], at: None }, cohort(tokens, at)];
                let iteration =
                    Iteration { sub_batches, moves: Vec::new(), flow: Flow::Async, pick: false, top: false };
                let lap = clock.run(&iteration, now).unwrap();
                assert!(
                    lap.seconds >= alone && lap.seconds < 1.2 * alone,
                    "the device does not wait: {lap:?}"
                );
                (now, at) = (now + lap.seconds, lap.parked[1]);
                laps.push(lap.advanced);
            }
            (laps.iter().sum::<u32>(), at)
        };
        // What the window of an iteration holds: from behind a layer to the next one's beginning, in the next iteration.
        let window = (alone / one) as u32;
        assert_eq!(laps(window / 2), (12, Some(11)));
        let (advanced, at) = laps(window * 5 / 4);
        assert!((6..=7).contains(&advanced), "{advanced}, parked at {at:?}");
    });
}

/// Every layer's attention of the last token, then the token: layers + 1 iterations.
#[test]
fn a_cohort_without_company_waits_for_the_host_alone() {
    let machine = Machine::new();
    machine.with(1000, |predicted, _| {
        let mut clock = SimClock::new(predicted);
        let (mut now, mut at, mut n) = (0.0, None, 0);
        loop {
            let sub_batches = vec![SubBatch::default(), cohort(500, at)];
            let iteration =
                Iteration { sub_batches, moves: Vec::new(), flow: Flow::Async, pick: false, top: false };
            let lap = clock.run(&iteration, now).unwrap();
            assert!(lap.advanced == 1 && lap.seconds > 0.0);
            (now, at, n) = (now + lap.seconds, lap.parked[1], n + 1);
            if at.is_none() {
                break;
            }
        }
        assert_eq!(n, machine.sizes.layers() + 1);
        let attention =
            cohorts::attention(predicted, &cohort(500, None).groups, 0) * machine.sizes.layers() as f64;
        assert!(now > attention && now < 1.6 * attention + 0.2, "{now} {attention}");
    });
}

/// Decides what cannot be.
struct Wrong(fn(&Queues) -> Group);

impl Strategy for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }
    fn plan(&mut self, queues: &Queues, _: &Limits, _: &dyn Predict) -> Decision {
        let admit = queues.waiting().map(|j| (j.id, Side::Device)).collect();
        let iteration = Iteration::serial(vec![(self.0)(queues)], false);
        Decision { admit, passed: Vec::new(), swaps: Vec::new(), iteration }
    }
}

#[test]
fn decisions_that_cannot_be_are_errors() {
    let machine = Machine::new();
    fn first(queues: &Queues) -> Group {
        queues.waiting().next().unwrap().group(50, Side::Device)
    }
    let cases: [(fn(&Queues) -> Group, &str); 3] = [
        (
            |q| Group { request: RequestId { slot: 9, generation: 0 }, ..first(q) },
            "request 9, which does not run",
        ),
        (|q| Group { first: 7, ..first(q) }, "rows 7..57 of request 0, which has 0 tokens"),
        (first, "2 pages of 32 tokens on the device's side, which has 1"),
    ];
    for (wrong, want) in cases {
        let error = machine.with(1, |predicted, options| {
            let options = Options { capacity: PageCapacity { device_pages: 1, host_pages: 9 }, ..*options };
            simulate(&[request(0.0, 50, 2)], &mut Wrong(wrong), predicted, &options, &mut |_| ()).unwrap_err()
        });
        assert!(matches!(&error, Error::Run(said) if said.contains(want)), "{error}");
    }
}

/// Decides nothing.
struct Idle;

impl Strategy for Idle {
    fn name(&self) -> &'static str {
        "idle"
    }
    fn plan(&mut self, _: &Queues, _: &Limits, _: &dyn Predict) -> Decision {
        let iteration = Iteration { sub_batches: Vec::new(), ..Iteration::serial(Vec::new(), false) };
        Decision { admit: Vec::new(), passed: Vec::new(), swaps: Vec::new(), iteration }
    }
}

#[test]
fn a_strategy_that_decides_nothing_ends() {
    Machine::new().with(10, |predicted, options| {
        let requests: Vec<Arrival> = (0..700).map(|i| request(f64::from(i), 5, 2)).collect();
        let mut over = 0;
        let report = simulate(&requests, &mut Idle, predicted, options, &mut |n| over = n).unwrap();
        assert_eq!((report.requests.failed, over, report.makespan_s), (700, 700, 0.0));
    });
}

#[test]
fn quantiles_are_of_the_nearest_rank() {
    let q = |n: u32| Quantiles::of((1..=n).rev().map(f64::from).collect());
    assert_eq!(q(0), Quantiles::default());
    assert_eq!(q(1), Quantiles { p50: Some(1.0), p90: Some(1.0), p99: Some(1.0) });
    assert_eq!(q(100), Quantiles { p50: Some(50.0), p90: Some(90.0), p99: Some(99.0) });
    assert_eq!(q(1000), Quantiles { p50: Some(500.0), p90: Some(900.0), p99: Some(990.0) });
}

#[test]
fn capacity_is_what_is_left_beside_the_weights() {
    let machine = Machine::new();
    let whole = Placement::all(Side::Device, machine.sizes.layers(), 0);
    let of = |hardware: &Hardware, room: &Room| PageCapacity::of(hardware, &machine.sizes, room, &whole);
    let room = Room { rows: 2048, sequences: 256, context: 1024, gpu_memory: None, host_memory: None };
    let all = of(&machine.hardware, &room).unwrap();
    // 15.5 GB, 13.5 of weights, some hundred MB of activations; 16.8 MB a page.
    assert!((60..120).contains(&all.device_pages), "{all:?}");
    assert!((9000..10_800).contains(&all.host_pages), "{all:?}");
    let small = Room { host_memory: Some(1 << 30), ..room };
    assert!(of(&machine.hardware, &small).unwrap().host_pages < 64);
    let none = Room { gpu_memory: Some(8 << 30), ..room };
    let error = of(&machine.hardware, &none).unwrap_err().to_string();
    assert!(
        error.contains("llama-2-7b on t4-xeon: weights and activations take") && error.contains("8.59 GB"),
        "{error}"
    );
    let mut cpu = machine.hardware.clone();
    cpu.accelerator = None;
    assert!(of(&cpu, &room).unwrap_err().to_string().contains("describes no GPU"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Everybody ends once, with all tokens or with a reason.
    #[test]
    fn requests_are_conserved(
        sizes in prop::collection::vec((0u32..20, 1u32..1500, 1u32..40), 1..60),
        device_pages in 1usize..60,
    ) {
        let mut requests: Vec<Arrival> =
            sizes.iter().map(|&(t, i, o)| request(f64::from(t) / 4.0, i, o)).collect();
        requests.sort_by(|a, b| a.at.total_cmp(&b.at));
        let report = Machine::new().run(&requests, device_pages);
        let fits = |r: &&Arrival| ((r.input + r.output - 1) as usize).div_ceil(PAGE_TOKENS) <= device_pages;
        prop_assert_eq!(report.requests.finished, requests.iter().filter(fits).count());
        prop_assert_eq!(report.requests.finished + report.requests.failed, requests.len());
        let tokens: u32 = requests.iter().filter(fits).map(|r| r.output).sum();
        prop_assert!((report.throughput_tok_s * report.makespan_s - f64::from(tokens)).abs() < 1e-3);
    }
}

/// Strategies that know only how long answers may be lose what they gain by knowing where they end; learning it brings most of
/// that back. The same requests end either way.
#[test]
fn learned_lengths_are_nearly_as_good_as_known_ones() {
    let machine = Machine::new();
    // 20 to 500 tokens; 1024 are allowed.
    let requests: Vec<Arrival> =
        (0..300).map(|i| request(0.0, 200 + i * 7 % 400, 20 + i * 53 % 480)).collect();
    let made: u64 = requests.iter().map(|r| u64::from(r.output)).sum();
    let run = |most_answer, learns_lengths| {
        machine.with(100, |predicted, options| {
            let capacity = PageCapacity { host_pages: 10_000, ..options.capacity };
            let options = Options { most_answer, learns_lengths, sequences: 512, capacity, ..*options };
            let mut strategy = crate::sched::by_name("neo").unwrap();
            let report = simulate(&requests, &mut *strategy, predicted, &options, &mut |_| ()).unwrap();
            assert_eq!(
                (report.failed, report.trips.iter().map(|t| u64::from(t.made)).sum::<u64>()),
                (0, made)
            );
            report.throughput_tok_s
        })
    };
    let (known, allowed, learned) = (run(None, true), run(Some(1024), false), run(Some(1024), true));
    println!("known {known:.1}, as long as allowed {allowed:.1}, learned {learned:.1} tok/s");
    assert!(allowed < 0.97 * known, "{allowed} {known}");
    assert!(learned > 0.5 * (allowed + known), "{learned} {allowed} {known}");
}
