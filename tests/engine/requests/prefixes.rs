//! Requests that begin as earlier ones did: pages are shared, and no bit changes.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tandem::cache::PAGE_TOKENS;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::engine::{Batcher, Engine, Event, Finish, Options, Request};
use tandem::model::{LoadedModel, load};
use tandem::plan::{Predictor, Sizes, Uncached, hardware};
use tandem::program::Placement;
use tandem::sched::by_name;
use tandem::simd::Isa;
use tandem::simd::linear::Mode;
use tandem::text::SamplerParams;

use super::world::prompt;

const CONTEXT: usize = 256;

fn model() -> LoadedModel {
    load("synth:tiny-llama,dtype=f32,seed=3,ctx=256").unwrap()
}

fn options(sequences: usize, pages: Option<usize>) -> Options {
    Options {
        sequences,
        logits: sequences,
        pages,
        chunk: 48,
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

/// What a request has been sent: cached tokens, tokens, and how it ended.
type Heard = (usize, Vec<u32>, Option<Finish>);

fn heard(events: &std::sync::mpsc::Receiver<Event>) -> Heard {
    let mut all: Heard = (0, Vec::new(), None);
    for event in events.try_iter() {
        match event {
            Event::Cached(n) => {
                assert!(all.0 == 0 && all.1.is_empty(), "once, and before the first token");
                all.0 = n;
            }
            Event::Token(token) => all.1.push(token.id),
            Event::Prompt(_) => {}
            Event::End(how) => all.2 = Some(how),
        }
    }
    all
}

/// Runs a request alone; returns its rows, too.
fn run(all: &mut Batcher, request: &Request) -> (Heard, usize) {
    let (_, events) = all.submit(request.clone()).unwrap();
    let mut rows = 0;
    while !all.is_idle() {
        rows += all.step().rows;
    }
    (heard(&events), rows)
}

#[test]
fn the_next_turn_of_a_conversation_computes_what_is_new() {
    let m = model();
    let mut plain = Batcher::new(on_cpu(&m, &options(2, None)));
    let mut kept = Batcher::new(on_cpu(&m, &options(2, None)));
    kept.keep_prefixes(true);
    let free = kept.limits().all_pages();
    let mut said = prompt(70, 1, m.spec.vocab);
    let mut stored = 0;
    for turn in 0..4 {
        let request = Request { prompt: said.clone(), max_tokens: 11, ..Request::default() };
        let ((none, answer, how), all_rows) = run(&mut plain, &request);
        assert_eq!((none, how), (0, Some(Finish::Length)));
        let ((cached, same, _), rows) = run(&mut kept, &request);
        assert_eq!(same, answer, "turn {turn}");
        assert_eq!(cached, stored / PAGE_TOKENS * PAGE_TOKENS, "turn {turn}");
        assert_eq!(all_rows - rows, cached);
        let new = said.len() - stored;
        assert!(rows <= new + PAGE_TOKENS + request.max_tokens, "{rows} rows for {new} new tokens");
        // The last token of an answer is not stored.
        stored = said.len() + answer.len() - 1;
        said.extend(answer);
        said.extend(prompt(20, 2 + turn, m.spec.vocab));
    }
    let mut engine = kept.into_engine();
    assert!(engine.kept_pages() > 0);
    assert_eq!(engine.free_pages(), free, "what is kept is free");
}

/// The same prompt again: its last token is computed, whose logits are wanted.
#[test]
fn a_prompt_of_whole_pages_computes_its_last_page() {
    let m = model();
    let mut all = Batcher::new(on_cpu(&m, &options(1, None)));
    all.keep_prefixes(true);
    let request =
        Request { prompt: prompt(3 * PAGE_TOKENS, 4, m.spec.vocab), max_tokens: 1, ..Request::default() };
    let (first, rows) = run(&mut all, &request);
    let (second, fewer) = run(&mut all, &request);
    assert_eq!((first.0, rows, second.0, fewer), (0, 96, 64, 32));
    assert_eq!(first.1, second.1);
}

#[test]
fn requests_at_the_same_time_share_pages() {
    let m = model();
    // Room for one prompt, and little more for each of the others.
    let mut all = Batcher::new(on_cpu(&m, &options(3, Some(24))));
    all.keep_prefixes(true);
    let begin = prompt(5 * PAGE_TOKENS, 7, m.spec.vocab);
    let request = |i: usize| {
        let prompt = [begin.clone(), prompt(5, i, m.spec.vocab)].concat();
        Request { prompt, max_tokens: 8, ..Request::default() }
    };
    let first = all.submit(request(1)).unwrap().1;
    while !first.try_iter().any(|e| matches!(e, Event::Token(_))) {
        all.step();
    }
    let before = all.limits().all_pages();
    let others = [2, 3].map(|i| all.submit(request(i)).unwrap().1);
    all.step();
    all.step();
    assert_eq!(all.load(), (0, 3), "all run together");
    let mut engine_free = 0;
    all.run();
    for events in &others {
        let (cached, tokens, how) = heard(events);
        assert_eq!((cached, tokens.len(), how), (5 * PAGE_TOKENS, 8, Some(Finish::Length)));
    }
    engine_free += all.into_engine().free_pages();
    assert_eq!(engine_free, before);
}

#[derive(Debug, Clone)]
enum Do {
    Submit(usize),
    Cancel(prop::sample::Index),
    Step,
}

fn any_do() -> impl Strategy<Value = Do> {
    prop_oneof![
        2 => (0..KINDS).prop_map(Do::Submit),
        1 => any::<prop::sample::Index>().prop_map(Do::Cancel),
        5 => Just(Do::Step),
    ]
}

const KINDS: usize = 12;

/// Requests of two families of prompts, which begin alike and part at different places.
fn request(i: usize, vocab: usize) -> Request {
    let whole = prompt(150, i % 2, vocab);
    let alike = [150, 64, 96, 31, 100, 33][i / 2 % 6];
    let prompt = [whole[..alike].to_vec(), prompt([0, 9, 40][i % 3], 20 + i, vocab)].concat();
    let temperature = if i.is_multiple_of(3) { 0.8 } else { 0.0 };
    let sampling = SamplerParams { temperature, top_k: 40, seed: i as u64, ..Default::default() };
    Request { prompt, sampling, max_tokens: [4, 17, 1][i % 3], ..Request::default() }
}

/// Any submits, cancels and steps: every answer is that of the request alone on the CPU, no page is lost, and pages were
/// shared.
fn any_company(m: &LoadedModel, name: &str, make: impl Fn() -> Batcher) {
    let mut alone = Batcher::new(on_cpu(m, &options(1, None)));
    let requests: Vec<Request> = (0..KINDS).map(|i| request(i, m.spec.vocab)).collect();
    let answers: Vec<Heard> = requests.iter().map(|r| run(&mut alone, r).0).collect();
    let shared = std::cell::Cell::new(0);
    let mut runner = TestRunner::new(Config { cases: 12, ..Config::default() });
    let run = |script: Vec<Do>| {
        let mut all = make();
        all.keep_prefixes(true);
        let mut sent = Vec::new();
        for what in script {
            match what {
                Do::Submit(kind) => {
                    let (id, events) = all.submit(requests[kind].clone()).unwrap();
                    sent.push((kind, id, events));
                }
                Do::Cancel(which) if !sent.is_empty() => drop(all.cancel(sent[which.index(sent.len())].1)),
                Do::Cancel(_) => {}
                Do::Step => shared.set(shared.get() + all.step().cached),
            }
        }
        while !all.is_idle() {
            shared.set(shared.get() + all.step().cached);
        }
        for (kind, _, events) in &sent {
            let (_, tokens, end) = heard(events);
            let (_, answer, finish) = &answers[*kind];
            match end {
                Some(Finish::Cancelled) => prop_assert_eq!(&tokens[..], &answer[..tokens.len()]),
                end => prop_assert_eq!((&tokens, &end), (answer, finish), "{}, kind {}", name, kind),
            }
        }
        let all_pages = all.limits().all_pages();
        let engine = all.into_engine();
        let free: usize = match engine.has_homes() {
            true => [tandem::program::Side::Device, tandem::program::Side::Host]
                .map(|s| engine.kv_pages(s).free)
                .iter()
                .sum(),
            false => {
                let mut engine = engine;
                engine.free_pages()
            }
        };
        prop_assert_eq!(free, all_pages, "{}: no page is lost", name);
        Ok(())
    };
    runner.run(&prop::collection::vec(any_do(), 10..60), run).unwrap();
    assert!(shared.get() > 0, "{name}: no page was shared");
}

#[test]
fn answers_are_the_same_in_any_company_on_the_cpu() {
    let m = model();
    any_company(&m, "cpu", || Batcher::new(on_cpu(&m, &options(3, Some(12)))));
}

#[test]
fn answers_are_the_same_in_any_company_on_a_device() {
    let m = model();
    let n = m.spec.n_layers;
    let whole = Placement::all(tandem::program::Side::Device, n, 12);
    any_company(&m, "device", || Batcher::new(on_device(&m, &options(3, Some(12)), whole.clone())));
    // Layers of both sides: a page of each for every 32 tokens.
    let split = Placement::boundary(n / 2 + 1, n, 12, 12);
    any_company(&m, "split", || Batcher::new(on_device(&m, &options(3, Some(12)), split.clone())));
}

/// The oldest pages of long sequences leave the device.
#[test]
fn answers_are_the_same_where_pages_move() {
    let m = model();
    let o = Options { kv_pages: Some(9), ..options(3, Some(20)) };
    let placement = Placement::all(tandem::program::Side::Device, m.spec.n_layers, 9);
    any_company(&m, "paged", || Batcher::new(on_device(&m, &o, placement.clone())));
}

/// The scheduler decides where sequences live, and moves them.
#[test]
fn answers_are_the_same_in_all_schedules() {
    let m = model();
    let o = Options { kv_pages: Some(9), far_pages: Some(11), sub_batches: 3, ..options(4, Some(20)) };
    let placement = Placement::all(tandem::program::Side::Device, m.spec.n_layers, 9);
    let machine = hardware::named("t4-xeon").unwrap();
    for name in ["gpu-only", "fastdecode", "neo", "apex", "auto"] {
        any_company(&m, name, || {
            let sizes = Sizes::of_weights(&m.spec, &m.weights, o.isa);
            let costs = Predictor::new(Uncached(machine.clone()), sizes, placement.clone());
            let engine = on_device(&m, &o, placement.clone());
            Batcher::with(engine, by_name(name).unwrap(), Box::new(costs))
        });
    }
}
