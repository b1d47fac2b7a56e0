use super::super::view::RequestView;
use super::*;
use crate::cache::PAGE_TOKENS;
use crate::model::synth;
use crate::plan::{Predictor, Sizes, hardware};
use crate::program::{Group, Placement, Side};
use crate::sched::{Decision, Targets};
use crate::sim::{Options, PageCapacity, simulate};
use crate::workload::Arrival;

const DEVICE_PAGES: usize = 250;
const HOST_PAGES: usize = 4000;
const LIMITS: Limits =
    Limits { rows: 1024, sub_batches: 2, sequences: 256, device_pages: DEVICE_PAGES, host_pages: HOST_PAGES };

fn predictor(machine: &str) -> Predictor {
    split_predictor(machine, 0)
}

/// With the first units on the host.
fn split_predictor(machine: &str, boundary: usize) -> Predictor {
    let sizes = Sizes::of_spec(&synth::spec("llama-2-7b").unwrap());
    let placement = Placement::boundary(boundary, sizes.layers(), DEVICE_PAGES, HOST_PAGES);
    let placement = Placement { host_pages: HOST_PAGES, ..placement };
    Predictor::new(hardware::named(machine).unwrap(), sizes, placement)
}

fn id(slot: u32) -> RequestId {
    RequestId { slot, generation: 0 }
}

/// Lengths that vary by a quarter.
fn requests(n: u32, prompt: u32, output: u32) -> Vec<Arrival> {
    let vary = |x: u32, i: u32| x * (75 + i % 51) / 100;
    (0..n).map(|i| Arrival { at: 0.0, input: vary(prompt, 37 * i), output: vary(output, 23 * i) }).collect()
}

fn queues(requests: &[Arrival]) -> Queues {
    let mut queues = Queues::default();
    for (i, r) in requests.iter().enumerate() {
        queues.submit(RequestView::new(id(i as u32), r.input, r.input + r.output - 1));
    }
    queues
}

fn run_out(mut rollout: Rollout, costs: &dyn Predict) -> f64 {
    while rollout.requests() > 0 && rollout.seconds().is_finite() {
        rollout.step(&LIMITS, costs, &Learned::default());
    }
    rollout.seconds()
}

/// Any will do where only the seconds are looked at.
fn worth() -> Worth {
    Worth::priced(1.0, 0.01)
}

#[test]
fn a_rollout_takes_as_long_as_the_simulated_run() {
    let capacity = PageCapacity { device_pages: DEVICE_PAGES, host_pages: HOST_PAGES };
    let options = Options {
        rows: LIMITS.rows,
        sub_batches: 2,
        sequences: LIMITS.sequences,
        capacity,
        targets: Targets::NONE,
        most_answer: None,
        learns_lengths: true,
    };
    let mut overlapped = 0;
    for (machine, boundary) in [("t4-xeon", 0), ("t4-g4dn", 0), ("t4-xeon", 5)] {
        let costs = split_predictor(machine, boundary);
        for (prompt, output) in [(300, 60), (60, 200)] {
            let requests = requests(60, prompt, output);
            for policy in Policy::all() {
                let rollout = run_out(Rollout::new(policy.clone(), queues(&requests), worth()), &costs);
                let mut run = policy.clone();
                let report = simulate(&requests, &mut run, &costs, &options, &mut |_| ()).unwrap();
                assert_eq!(report.requests.finished, requests.len());
                overlapped += report.flows[2];
                let ratio = rollout / report.makespan_s;
                let what = format!("{machine} {boundary} {prompt}+{output} {}: {ratio}", policy.name());
                assert!((ratio - 1.0).abs() < 0.02, "{what} {:?}", report.flows);
            }
        }
    }
    assert!(overlapped > 100, "cohorts in {overlapped} steps only");
}

#[test]
fn a_policy_that_leaves_requests_behind_takes_for_ever() {
    // A request on the host that is too long for the device: the device alone never runs it.
    let long = (DEVICE_PAGES * PAGE_TOKENS) as u32 + 1;
    let mut queues = Queues::default();
    queues.submit(RequestView::new(id(0), long, long + 5));
    let nothing = Iteration::serial(Vec::new(), false);
    queues.admit(&Decision {
        admit: vec![(id(0), Side::Host)],
        passed: Vec::new(),
        swaps: Vec::new(),
        iteration: nothing,
    });
    let costs = predictor("t4-xeon");
    for policy in Policy::all() {
        let seconds = run_out(Rollout::new(policy.clone(), queues.clone(), worth()), &costs);
        assert_eq!(seconds.is_finite(), policy.serves(&queues, &LIMITS), "{}: {seconds}", policy.name());
        assert_eq!(seconds.is_finite(), !policy.name().starts_with("gpu-only"));
    }
}

#[test]
fn parked_rows_get_their_token_before_a_policy_without_cohorts_goes_on() {
    let costs = predictor("t4-xeon");
    let mut queues = queues(&requests(2, 40, 20));
    let nothing = Iteration::serial(Vec::new(), false);
    let admit = vec![(id(0), Side::Host), (id(1), Side::Device)];
    queues.admit(&Decision { admit, passed: Vec::new(), swaps: Vec::new(), iteration: nothing });
    let prompts: Vec<Group> =
        queues.running().iter().map(|job| job.group(job.prompt, job.home.unwrap())).collect();
    queues.commit(&Iteration::serial(prompts, false), &[], |g| g.tokens);
    let cohort: Vec<Group> = queues.running().iter().take(1).map(|job| job.group(1, Side::Host)).collect();
    let overlap = Iteration {
        sub_batches: vec![SubBatch::of(Vec::new()), SubBatch::of(cohort)],
        flow: Flow::Async,
        ..Iteration::serial(Vec::new(), false)
    };
    queues.commit(&overlap, &[None, Some(0)], |g| g.tokens);
    for policy in Policy::all() {
        if !policy.serves(&queues, &LIMITS) {
            assert_eq!(policy.name(), "fastdecode", "a request is on the device");
            continue;
        }
        let decision = policy.clone().plan(&queues, &LIMITS, &costs);
        assert_eq!(decision.iteration.flow, Flow::Async, "{}", policy.name());
        assert!(decision.iteration.cohorts().any(|(_, batch)| batch.at == Some(0)), "{}", policy.name());
        assert!(run_out(Rollout::new(policy.clone(), queues.clone(), worth()), &costs).is_finite());
    }
}
