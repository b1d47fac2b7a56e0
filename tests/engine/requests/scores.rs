//! Log-probabilities of prompts: those of teacher forcing, bit by bit, wherever and beside whomever they are computed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};

use tandem::cache::PAGE_TOKENS;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::engine::{Batcher, Engine, Event, Finish, Logprobs, NewTokens, Options, Request};
use tandem::model::{LoadedModel, load};
use tandem::plan::{Predictor, Sizes, Uncached, hardware};
use tandem::program::{Flow, Iteration, Phase, Placement, Side, SubBatch, Wants};
use tandem::sched::{Decision, Limits, Predict, Queues, Strategy, Untimed, by_name};
use tandem::simd::Isa;
use tandem::simd::linear::Mode;
use tandem::text::{SamplerParams, logprobs, token_logprob};

use super::world::prompt;

const CONTEXT: usize = 256;
/// Rows of a step, of which fewer have room for their logits.
const CHUNK: usize = 100;
const LOGITS: usize = 64;
/// Likely tokens beside each.
const TOP: usize = 3;

fn model() -> LoadedModel {
    load("synth:tiny-llama,dtype=f32,seed=3,ctx=256").unwrap()
}

fn options(sequences: usize, pages: Option<usize>) -> Options {
    Options {
        sequences,
        logits: sequences,
        pages,
        chunk: CHUNK,
        threads: Some(2),
        mode: Mode::Deterministic,
        ..Options::new(Isa::best(), CONTEXT)
    }
}

fn on_cpu(m: &LoadedModel, options: &Options) -> Engine {
    Engine::new(m.spec.clone(), &m.weights, options, &|_| ()).unwrap()
}

fn on_device(m: &LoadedModel, options: &Options, placement: Placement) -> Engine {
    let device = EmulatedOptions { jitter: Some(1), ..Default::default() };
    let device = Arc::new(EmulatedAccelerator::new(Arc::new(EmulatedRuntime::new(device).unwrap())));
    Engine::placed(m.spec.clone(), &m.weights, options, device, "emulated", "test", placement, &|_| ())
        .unwrap()
}

/// The scores of a prompt as `tandem perplexity` has them: all logits, of a few rows at a time.
fn forced(m: &LoadedModel, prompt: &[u32]) -> Vec<Logprobs> {
    let mut engine = on_cpu(m, &Options { logits: 7, ..options(1, None) });
    let (seq, vocab, mut all) = (engine.add(), m.spec.vocab, Vec::new());
    for (i, rows) in prompt.chunks(7).enumerate() {
        let logits = engine.forward(&[NewTokens { id: seq, tokens: rows, wants: Wants::All }]).unwrap();
        for (row, next) in logits.chunks_exact(vocab).zip(&prompt[7 * i + 1..]) {
            let (lse, top) = logprobs(row, TOP);
            let token = f64::from(row[*next as usize]) - lse;
            assert_eq!(token as f32, token_logprob(row, *next), "what `perplexity` sums up");
            let rank = row.iter().filter(|&&other| other >= row[*next as usize]).count();
            all.push(Logprobs { token, rank, top });
        }
    }
    all
}

#[derive(Debug, PartialEq, Default)]
struct Heard {
    cached: usize,
    scores: Vec<Logprobs>,
    tokens: Vec<u32>,
    end: Option<Finish>,
}

fn heard(events: &Receiver<Event>) -> Heard {
    let mut all = Heard::default();
    for event in events.try_iter() {
        match event {
            Event::Cached(n) => all.cached = n,
            Event::Prompt(scores) => {
                assert!(all.tokens.is_empty() && !scores.is_empty(), "before the first token");
                all.scores.extend(scores);
            }
            Event::Token(token) => all.tokens.push(token.id),
            Event::End(how) => all.end = Some(how),
        }
    }
    all
}

fn scored(i: usize, vocab: usize) -> Request {
    let prompt = prompt([180, 1, 2, 65, 33, 129][i % 6], i, vocab);
    let temperature = if i.is_multiple_of(2) { 0.0 } else { 0.9 };
    let sampling = SamplerParams { temperature, seed: i as u64, ..Default::default() };
    let max_tokens = [0, 5, 3, 1, 9, 2][i % 6];
    Request { prompt, sampling, max_tokens, prompt_logprobs: Some(TOP), ..Request::default() }
}

/// Scored prompts beside each other and beside requests that are not scored: scores are those of teacher forcing, answers
/// those of requests that do not ask. Returns the asynchronous steps that have scored.
fn in_company(m: &LoadedModel, name: &str, mut all: Batcher) -> usize {
    let mut alone = Batcher::new(on_cpu(m, &options(1, None)));
    let mut answer = |request: &Request| {
        let (_, events) = alone.submit(Request { prompt_logprobs: None, ..request.clone() }).unwrap();
        alone.run();
        heard(&events)
    };
    all.keep_prefixes(true);
    let requests: Vec<Request> = (0..18).map(|i| scored(i, m.spec.vocab)).collect();
    // Every third does not ask; the later ones have begun as earlier ones did.
    let asks = |i: usize| !i.is_multiple_of(3) || i == 6;
    let (mut sent, mut scored_asynchronously) = (Vec::new(), 0);
    let told = Arc::new(AtomicUsize::new(0));
    let mut step = |all: &mut Batcher| {
        let before = told.load(Relaxed);
        let is_async = all.step().flow == Some(Flow::Async);
        scored_asynchronously += usize::from(is_async && told.load(Relaxed) > before);
    };
    for (i, request) in requests.iter().enumerate() {
        let prompt_logprobs = request.prompt_logprobs.filter(|_| asks(i));
        let request =
            Request { prompt_logprobs, prompt: scored(i % 6, m.spec.vocab).prompt, ..request.clone() };
        let ((events, receiver), told) = (channel(), told.clone());
        let deliver = move |event| {
            told.fetch_add(usize::from(matches!(event, Event::Prompt(_))), Relaxed);
            events.send(event).is_ok()
        };
        all.submit_to(request.clone(), Box::new(deliver)).unwrap();
        sent.push((i, request, receiver));
        step(&mut all);
    }
    while !all.is_idle() {
        step(&mut all);
    }
    for (i, request, events) in &sent {
        let (got, want) = (heard(events), answer(request));
        assert_eq!((&got.tokens, &got.end), (&want.tokens, &want.end), "{name}, request {i}");
        match asks(*i) {
            true => {
                assert_eq!(got.cached, 0, "{name}, request {i}");
                assert!(got.scores == forced(m, &request.prompt), "{name}, request {i}: other scores");
            }
            false => assert_eq!(got.scores, [], "{name}, request {i}"),
        }
    }
    scored_asynchronously
}

#[test]
fn scores_are_those_of_teacher_forcing() {
    let m = model();
    in_company(&m, "cpu", Batcher::new(on_cpu(&m, &options(3, None))));
}

#[test]
fn scores_are_the_same_on_a_device_and_on_both_sides() {
    let m = model();
    let n = m.spec.n_layers;
    let o = options(3, Some(24));
    in_company(&m, "device", Batcher::new(on_device(&m, &o, Placement::all(Side::Device, n, 24))));
    in_company(&m, "split", Batcher::new(on_device(&m, &o, Placement::boundary(n / 2 + 1, n, 24, 24))));
}

#[test]
fn scores_are_the_same_in_all_schedules() {
    let m = model();
    let o = Options { kv_pages: Some(9), far_pages: Some(11), sub_batches: 3, ..options(4, Some(20)) };
    let placement = Placement::all(Side::Device, m.spec.n_layers, 9);
    let machine = hardware::named("t4-xeon").unwrap();
    for name in ["gpu-only", "fastdecode", "neo", "apex", "auto"] {
        let sizes = Sizes::of_weights(&m.spec, &m.weights, o.isa);
        let costs = Predictor::new(Uncached(machine.clone()), sizes, placement.clone());
        let engine = on_device(&m, &o, placement.clone());
        in_company(&m, name, Batcher::with(engine, by_name(name).unwrap(), Box::new(costs)));
    }
}

/// Each step is asynchronous: prompts and the device's decode rows, and cohorts of the host's.
struct Asynchronous;

impl Strategy for Asynchronous {
    fn name(&self) -> &'static str {
        "asynchronous"
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, _: &dyn Predict) -> Decision {
        let mut left =
            [Side::Device, Side::Host].map(|side| (side, limits.pages(side) - queues.promised(side)));
        let room = limits.sequences as usize - queues.running().len();
        let mut admit = Vec::new();
        for job in queues.waiting().take(room) {
            // To where more is free.
            left.sort_by_key(|(_, pages)| std::cmp::Reverse(*pages));
            if job.pages() > left[0].1 {
                break;
            }
            left[0].1 -= job.pages();
            admit.push((job.id, left[0].0));
        }
        let (mut own, mut cohort, mut rows) = (Vec::new(), Vec::new(), limits.rows);
        for job in queues.running().iter().filter(|job| job.at.is_none()) {
            let side = job.home.expect("it runs");
            let wanted = if job.phase() == Phase::Prefill { job.prompt - job.stored } else { 1 };
            match (job.phase(), side) {
                (Phase::Decode, Side::Host) => cohort.push(job.group(1, side)),
                _ if rows > 0 => {
                    own.push(job.group(wanted.min(rows), side));
                    rows -= wanted.min(rows);
                }
                _ => {}
            }
        }
        let mut sub_batches: Vec<SubBatch> = [own, cohort].into_iter().map(SubBatch::of).collect();
        let parked = queues.running().iter().filter_map(|job| Some((job.group(1, Side::Host), job.at?)));
        sub_batches.extend(parked.map(|(group, at)| SubBatch::parked(vec![group], at)));
        let iteration = Iteration { sub_batches, flow: Flow::Async, ..Iteration::serial(Vec::new(), false) };
        Decision { admit, passed: Vec::new(), swaps: Vec::new(), iteration }
    }
}

#[test]
fn scores_are_the_same_beside_cohorts() {
    let m = model();
    let o = Options { kv_pages: Some(9), far_pages: Some(11), sub_batches: 3, ..options(4, Some(20)) };
    let engine = on_device(&m, &o, Placement::all(Side::Device, m.spec.n_layers, 9));
    let steps =
        in_company(&m, "asynchronous", Batcher::with(engine, Box::new(Asynchronous), Box::new(Untimed)));
    assert!(steps > 0, "no asynchronous step has scored");
}

/// Rows of prompts that are scored come in steps of as many as have room for their logits; others do not wait for that.
#[test]
fn logits_of_a_step_are_bounded() {
    let m = model();
    let mut all = Batcher::new(on_cpu(&m, &options(2, None)));
    let rows = |all: &mut Batcher, request: Request| {
        let (_, events) = all.submit(request).unwrap();
        let mut rows = Vec::new();
        while !all.is_idle() {
            rows.push(all.step().rows);
        }
        (rows, heard(&events).scores.len())
    };
    let asks = scored(0, m.spec.vocab);
    let plain = Request { prompt_logprobs: None, ..asks.clone() };
    assert_eq!(rows(&mut all, asks), (vec![LOGITS, LOGITS, 180 - 2 * LOGITS], 179));
    assert_eq!(rows(&mut all, plain), (vec![CHUNK, 180 - CHUNK], 0));
}

/// What a scored prompt has computed may be shared, but it shares nothing itself.
#[test]
fn a_scored_prompt_is_computed_as_a_whole() {
    let m = model();
    let mut all = Batcher::new(on_cpu(&m, &options(2, None)));
    all.keep_prefixes(true);
    let asks = Request { max_tokens: 1, ..scored(3, m.spec.vocab) };
    let plain = Request { prompt_logprobs: None, ..asks.clone() };
    let mut run = |request: &Request| {
        let (_, events) = all.submit(request.clone()).unwrap();
        all.run();
        heard(&events)
    };
    let first = run(&asks);
    assert_eq!((first.cached, first.scores.len()), (0, 64));
    assert_eq!(run(&plain).cached, 2 * PAGE_TOKENS);
    assert_eq!(run(&asks), first);
}

/// A token whose embedding is damaged: scores that are not numbers end the one request.
#[test]
fn scores_that_are_no_numbers_fail_alone() {
    let m = super::numbers::model("token_embd.weight");
    let mut all = Batcher::new(on_cpu(&m, &Options { context: 96, ..options(3, None) }));
    let good = scored(3, m.spec.vocab);
    let mut bad = good.clone();
    bad.prompt[20] = super::numbers::BAD;
    let (_, good_events) = all.submit(good.clone()).unwrap();
    let (_, bad_events) = all.submit(bad).unwrap();
    all.run();
    assert_eq!(heard(&good_events).scores.len(), good.prompt.len() - 1);
    let bad = heard(&bad_events);
    assert!(bad.scores.len() <= 20, "those before it, in earlier steps");
    let Some(Finish::Failed(why)) = bad.end else { panic!("{:?}", bad.end) };
    assert!(why.to_string().contains("not numbers"), "{why}");
}
