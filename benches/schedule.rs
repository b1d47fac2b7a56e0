//! What a step costs before it runs, with a thousand requests in flight: `Strategy::plan`, `lower`, `check`, `waits` and a
//! prediction, for Llama 3.1 8B (32 layers) on described machines.
//!
//!   cargo bench --bench schedule                     everything
//!   cargo bench --bench schedule -- plan             names that contain a word
//!   cargo bench --bench schedule -- steps/auto       2000 steps one by one: median, mean, p99
//!
//! `plan` runs in a closed loop: every step is committed, cohorts advance, requests that end are replaced, so that
//! queues, shapes of steps and tokens change as they do in a run. What a step is limited to: 200 us for `plan`, 500 us for
//! `lower` and `check` together.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use tandem::model::synth;
use tandem::plan::{Predictor, Sizes, hardware};
use tandem::program::{
    Flow, Group, Iteration, Kv, Phase, Placement, RequestId, Side, SubBatch, Wants, check, lower, waits,
};
use tandem::sched::{self, Decision, Limits, Predict, Queues, RequestView, Strategy};

const MACHINES: [&str; 2] = ["t4-xeon", "a10-xeon"];
const IN_FLIGHT: u32 = 1000;

fn predictor(machine: &str) -> Predictor {
    let sizes = Sizes::of_spec(&synth::spec("llama-3.1-8b").unwrap());
    let placement = Placement { host_pages: 60_000, ..Placement::all(Side::Device, sizes.layers(), 12_000) };
    Predictor::new(hardware::named(machine).unwrap(), sizes, placement)
}

fn id(slot: u32) -> RequestId {
    RequestId { slot, generation: 0 }
}

/// Requests that come and go, and a strategy that serves them.
struct Crowd {
    strategy: Box<dyn Strategy>,
    queues: Queues,
    limits: Limits,
    submitted: u32,
}

impl Crowd {
    /// Requests on both sides (on one, where the strategy knows no other), most in the middle of their answers, every 20th with its
    /// prompt still to come; and every tenth waits.
    fn new(name: &str) -> Crowd {
        let limits =
            Limits { rows: 512, sub_batches: 3, sequences: 4096, device_pages: 5_000, host_pages: 60_000 };
        let strategy = sched::by_name(name).unwrap();
        let mut crowd = Crowd { strategy, queues: Queues::default(), limits, submitted: 0 };
        let nothing = Iteration::serial(Vec::new(), false);
        let mut decision = Decision { admit: vec![], passed: vec![], swaps: vec![], iteration: nothing };
        let mut stored = Vec::new();
        for slot in 0..IN_FLIGHT {
            let job = crowd.submit();
            let home = match (name, slot % 2) {
                ("gpu-only", _) => Side::Device,
                ("fastdecode", _) | (_, 1) => Side::Host,
                _ => Side::Device,
            };
            if slot % 10 == 9 || (name == "gpu-only" && slot >= 500) {
                continue;
            }
            decision.admit.push((job.id, home));
            if slot % 20 != 0 {
                let chunk = Group { wants: Wants::Nothing, ..job.group(job.prompt, home) };
                stored.push(Group { tokens: job.prompt + slot % 100, ..chunk });
            }
        }
        crowd.queues.admit(&decision);
        crowd.queues.commit(&Iteration::serial(stored, false), &[], |g| g.tokens);
        crowd
    }

    fn submit(&mut self) -> RequestView {
        let slot = self.submitted;
        let prompt = 100 + slot * 37 % 300;
        let job = RequestView::new(id(slot), prompt, prompt + 100 + slot * 91 % 300);
        self.submitted += 1;
        self.queues.submit(job.clone());
        job
    }

    /// A step, and how long it took to decide.
    fn step(&mut self, costs: &Predictor) -> (Duration, Iteration) {
        let start = Instant::now();
        let decision = black_box(self.strategy.plan(&self.queues, &self.limits, costs));
        let took = start.elapsed();
        self.queues.admit(&decision);
        let iteration = decision.iteration;
        assert!(iteration.sub_batches.iter().any(|b| b.rows() > 0), "nothing to do");
        // Every cohort goes on by a layer.
        let next = |(b, batch): (usize, &SubBatch)| match iteration.flow {
            Flow::Async if b > 0 => Some(batch.at.map_or(0, |at| at + 1)).filter(|&l| l < costs.layers()),
            _ => None,
        };
        let parked: Vec<_> = iteration.sub_batches.iter().enumerate().map(next).collect();
        self.queues.commit(&iteration, &parked, |g| g.tokens);
        let over: Vec<_> =
            self.queues.running().iter().filter(|j| j.stored >= j.most).map(|j| j.id).collect();
        for id in over {
            self.queues.end(id);
            self.submit();
        }
        (took, iteration)
    }
}

fn group(slot: u32, phase: Phase, first: u32, tokens: u32, kv: Kv) -> Group {
    Group { request: id(slot), phase, first, tokens, kv, wants: Wants::Last }
}

fn decode(slots: std::ops::Range<u32>, kv: Kv) -> Vec<Group> {
    slots.map(|slot| group(slot, Phase::Decode, 200 + slot * 37 % 900, 1, kv)).collect()
}

/// A thousand rows, shared between the sides in each way.
fn steps() -> Vec<(&'static str, Iteration)> {
    let of = |flow, sub_batches: Vec<SubBatch>| Iteration {
        sub_batches,
        moves: vec![],
        flow,
        pick: true,
        top: false,
    };
    let first = |device: u32, host: u32| {
        let prompts = vec![
            group(2000, Phase::Prefill, 0, 50, Kv::Host),
            group(2001, Phase::Prefill, 256, 30, Kv::Device),
            group(2002, Phase::Prefill, 0, 20, Kv::Device),
        ];
        [prompts, decode(0..device, Kv::Device), decode(1000..1000 + host, Kv::Host)].concat()
    };
    let parked = |slots, at| SubBatch::parked(decode(slots, Kv::Host), at);
    vec![
        ("serial", of(Flow::Serial, vec![first(600, 300).into()])),
        ("two-lanes", of(Flow::TwoLanes, vec![first(400, 100).into(), decode(1200..1600, Kv::Host).into()])),
        ("async", of(Flow::Async, vec![first(500, 0).into(), parked(1000..1200, 9), parked(1200..1400, 20)])),
    ]
}

fn plans(c: &mut Criterion) {
    let mut bench = c.benchmark_group("plan");
    for machine in MACHINES {
        let costs = predictor(machine);
        for name in sched::NAMES {
            let mut crowd = Crowd::new(name);
            bench.bench_function(BenchmarkId::new(name, machine), |b| {
                b.iter_custom(|n| (0..n).map(|_| crowd.step(&costs).0).sum());
            });
        }
    }
}

/// Steps one by one: a mean hides the slow ones, a median what they cost.
fn steps_alone(_: &mut Criterion) {
    let wanted: Vec<_> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    for machine in MACHINES {
        for name in sched::NAMES {
            let id = format!("steps/{name}/{machine}");
            if !wanted.is_empty() && !wanted.iter().any(|w| id.contains(w.as_str())) {
                continue;
            }
            let (costs, mut crowd) = (predictor(machine), Crowd::new(name));
            (0..100).for_each(|_| drop(crowd.step(&costs)));
            let mut us: Vec<_> = (0..2000).map(|_| crowd.step(&costs).0.as_secs_f64() * 1e6).collect();
            us.sort_by(f64::total_cmp);
            let mean = us.iter().sum::<f64>() / us.len() as f64;
            let at = |p: usize| us[us.len() * p / 1000];
            println!(
                "{id:30} median {:6.1} us, mean {mean:6.1}, p99 {:6.1}, p99.9 {:6.1}",
                at(500),
                at(990),
                at(999)
            );
        }
    }
}

fn programs(c: &mut Criterion) {
    let costs = predictor(MACHINES[1]);
    let placement = costs.placement();
    for (name, iteration) in steps() {
        let rows: u32 = iteration.sub_batches.iter().map(SubBatch::rows).sum();
        assert_eq!(rows, 1000);
        let program = lower(placement, &iteration).unwrap();
        check(&program, placement, &iteration).unwrap();
        // The answer is right before it is timed.
        let (predicted, exact) = (costs.iteration(&iteration), costs.exact(&iteration).unwrap().all);
        assert!((predicted / exact - 1.0).abs() < 0.02, "{name}: {predicted} of {exact}");
        let mut bench = c.benchmark_group(name);
        bench.bench_function("lower", |b| b.iter(|| lower(placement, black_box(&iteration)).unwrap()));
        bench.bench_function("check", |b| b.iter(|| check(black_box(&program), placement, &iteration)));
        bench.bench_function("lower+check", |b| {
            b.iter(|| {
                let program = lower(placement, black_box(&iteration)).unwrap();
                check(&program, placement, &iteration).unwrap();
                program
            });
        });
        bench.bench_function("waits", |b| b.iter(|| waits(black_box(&program))));
        bench.bench_function("predict", |b| b.iter(|| costs.iteration(black_box(&iteration))));
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = steps_alone, plans, programs
}
criterion_main!(benches);
