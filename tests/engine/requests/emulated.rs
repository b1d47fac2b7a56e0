//! Requests in emulated time: a step takes what was predicted of it.

use tandem::cache::PAGE_TOKENS;
use tandem::device;
use tandem::engine::{Batcher, Engine, Finish, Options, Request};
use tandem::model::load;
use tandem::plan::{Predictor, Sizes, Uncached, hardware};
use tandem::program::{Flow, Group, Iteration, Phase, Placement, Side, SubBatch};
use tandem::sched::{Decision, Limits, Predict, Queues, RequestView, Strategy, by_name};
use tandem::simd::Isa;
use tandem::text::SamplerParams;

use super::world::{drain, prompt};

const MACHINE: &str = "t4-xeon";

/// Lock step with one half of the requests on each side: prompts and the device's decode rows in the first sub-batch, the host's in
/// the second.
struct Halves;

impl Strategy for Halves {
    fn name(&self) -> &'static str {
        "halves"
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, _: &dyn Predict) -> Decision {
        let side = |i: usize| if i.is_multiple_of(2) { Side::Device } else { Side::Host };
        let admit: Vec<_> = queues.waiting().enumerate().map(|(i, job)| (job.id, side(i))).collect();
        let new = queues.waiting().enumerate().map(|(i, job)| (job, side(i)));
        let running = queues.running().iter().map(|job| (job, job.home.expect("it runs")));
        let (mut first, mut second): (Vec<Group>, Vec<Group>) = (Vec::new(), Vec::new());
        let mut left = limits.rows;
        for (job, side) in running.chain(new) {
            let prompt = job.phase() == Phase::Prefill;
            let tokens = if prompt { (job.prompt - job.stored).min(left) } else { 1 };
            let job: &RequestView = job;
            match side == Side::Host && !prompt {
                true => second.push(job.group(1, side)),
                false if tokens > 0 => {
                    left -= tokens;
                    first.push(job.group(tokens, side));
                }
                false => {}
            }
        }
        let sub_batches = vec![SubBatch::of(first), SubBatch::of(second)];
        let iteration =
            Iteration { sub_batches, moves: Vec::new(), flow: Flow::TwoLanes, pick: false, top: false };
        Decision { admit, passed: Vec::new(), swaps: Vec::new(), iteration }
    }
}

/// Seconds of all steps, predicted and executed, of prompts and of decode steps.
fn seconds(strategy: Box<dyn Strategy>) -> [(f64, f64); 2] {
    let m = load("synth:tiny-llama,seed=2,layers=8,ctx=512").unwrap();
    let isa = Isa::selected().unwrap();
    let options = Options {
        sequences: 8,
        logits: 8,
        chunk: 256,
        threads: Some(2),
        kv_pages: Some(40),
        far_pages: Some(60),
        sub_batches: 2,
        ..Options::new(isa, 400)
    };
    let placement = Placement::all(Side::Device, m.spec.n_layers, 40);
    let accel = device::open(&format!("emulated:{MACHINE}").parse().unwrap(), Some(1 << 30)).unwrap();
    let e = Engine::placed(
        m.spec.clone(),
        &m.weights,
        &options,
        accel,
        MACHINE,
        "test",
        placement.clone(),
        &|_| (),
    );
    let sizes = Sizes::of_weights(&m.spec, &m.weights, isa);
    let predictor = Predictor::new(Uncached(hardware::named(MACHINE).unwrap()), sizes, placement);
    let mut all = Batcher::with(e.unwrap(), strategy, Box::new(predictor));
    let streams: Vec<_> = (0..8)
        .map(|i| {
            let request = Request {
                prompt: prompt(60 + 25 * i, i, m.spec.vocab),
                sampling: SamplerParams { temperature: 0.0, ..Default::default() },
                max_tokens: 30,
                ..Request::default()
            };
            all.submit(request).unwrap().1
        })
        .collect();
    let mut sums = [(0.0, 0.0); 2];
    while !all.is_idle() {
        let prompts = all.queues().waiting().len() > 0
            || all.queues().running().iter().any(|job| job.phase() == Phase::Prefill);
        let report = all.step();
        assert!(report.seconds > 0.0 && report.predicted > 0.0 && report.failed == 0, "{report:?}");
        let sum = &mut sums[usize::from(!prompts)];
        *sum = (sum.0 + report.predicted, sum.1 + report.seconds);
    }
    for events in &streams {
        let (tokens, end) = drain(events);
        assert_eq!((tokens.len(), end), (30, Some(Finish::Length)));
    }
    sums
}

#[test]
fn iterations_take_what_was_predicted_of_them_within_a_tenth() {
    let mut wrong = Vec::new();
    for strategy in [by_name("gpu-only").unwrap(), Box::new(Halves)] {
        let name = strategy.name();
        for (phase, (predicted, executed)) in ["prompts", "decode"].into_iter().zip(seconds(strategy)) {
            let off = executed / predicted - 1.0;
            let line = format!(
                "{name}, {phase}: predicted {:.3} ms, executed {:.3} ms ({:+.1}%)",
                1e3 * predicted,
                1e3 * executed,
                100.0 * off
            );
            println!("{line}");
            if off.is_nan() || off.abs() > 0.1 {
                wrong.push(line);
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Whole pages of every layer cross, once in each direction, and nothing else does.
#[test]
fn pages_that_change_sides_are_counted_as_bytes_of_the_link() {
    let m = load("synth:tiny-llama,seed=2,layers=4,ctx=512").unwrap();
    let options = Options {
        sequences: 1,
        chunk: 128,
        threads: Some(2),
        kv_pages: Some(8),
        far_pages: Some(8),
        ..Options::new(Isa::selected().unwrap(), 200)
    };
    let placement = Placement::all(Side::Device, m.spec.n_layers, 8);
    let accel = device::open(&format!("emulated:{MACHINE}").parse().unwrap(), Some(1 << 30)).unwrap();
    let spec = m.spec.clone();
    let mut e =
        Engine::placed(spec, &m.weights, &options, accel, MACHINE, "test", placement, &|_| ()).unwrap();
    assert_eq!(e.link_bytes(), [0, 0], "weights are there before anything counts");
    let id = e.add();
    e.prefill(id, &prompt(70, 1, m.spec.vocab), |_| ()).unwrap();
    let results = e.link_bytes();
    assert_eq!(results, [0, 4 * m.spec.vocab as u64], "the logits of its last row");
    let page = (PAGE_TOKENS * 2 * 2 * m.spec.kv_dim()) as u64;
    let moved = 3 * m.spec.n_layers as u64 * page;
    e.swap(id, Side::Host).unwrap();
    assert_eq!(e.link_bytes(), [0, results[1] + moved]);
    e.swap(id, Side::Device).unwrap();
    assert_eq!(e.link_bytes(), [moved, results[1] + moved]);
    // It is there.
    e.swap(id, Side::Device).unwrap();
    assert_eq!(e.link_bytes(), [moved, results[1] + moved]);
}
