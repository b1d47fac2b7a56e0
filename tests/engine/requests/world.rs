//! What the tests of requests share.

use std::sync::mpsc::Receiver;

use tandem::engine::{Engine, Event, Finish, NewTokens, Options, Request};
use tandem::model::{LoadedModel, load};
use tandem::program::Wants;
use tandem::simd::Isa;
use tandem::simd::linear::Mode;
use tandem::text::{Sampler, SamplerParams};

pub const CONTEXT: usize = 96;

pub fn model() -> LoadedModel {
    load("synth:tiny-llama,dtype=f32,seed=3").unwrap()
}

/// Chunks of 16 rows; a row's results do not depend on the others.
pub fn options(sequences: usize, pages: Option<usize>) -> Options {
    let plain = Options::new(Isa::best(), CONTEXT);
    Options {
        sequences,
        logits: sequences,
        pages,
        chunk: 16,
        threads: Some(2),
        mode: Mode::Deterministic,
        ..plain
    }
}

pub fn engine(m: &LoadedModel, options: &Options) -> Engine {
    Engine::new(m.spec.clone(), &m.weights, options, &|_| ()).unwrap()
}

pub fn prompt(n: usize, salt: usize, vocab: usize) -> Vec<u32> {
    // Not token 5, which some test damages.
    (0..n).map(|i| ((i * i * 31 + i * 7 + salt * 13) % (vocab - 6) + 6) as u32).collect()
}

/// The `i`-th of requests of many kinds: greedy and drawn, short and long.
pub fn request(i: usize, vocab: usize) -> Request {
    let temperature = if i.is_multiple_of(2) { 0.0 } else { 0.9 };
    let repeat_penalty = if i % 3 == 2 { 1.3 } else { 1.0 };
    let sampling =
        SamplerParams { temperature, top_k: 40, repeat_penalty, seed: i as u64, ..Default::default() };
    let prompt = prompt([3, 40, 1, 17, 64][i % 5], i, vocab);
    Request { prompt, sampling, max_tokens: [8, 3, 20, 1][i % 4], ..Request::default() }
}

/// What a request's answer is when nothing else runs: prefill, then a token at a time, by hand.
pub fn alone(engine: &mut Engine, r: &Request) -> (Vec<u32>, Finish) {
    let seq = engine.add();
    let mut sampler = Sampler::new(r.sampling.clone()).unwrap();
    let mut history = r.prompt.clone();
    let mut logits = engine.prefill(seq, &r.prompt, |_| ()).unwrap();
    let mut answer = Vec::new();
    let finish = loop {
        let token = sampler.sample(&mut logits, &history);
        answer.push(token);
        history.push(token);
        if r.ending.tokens.contains(&token) {
            break Finish::Stop;
        }
        if answer.len() == r.max_tokens || engine.len(seq) == engine.context() {
            break Finish::Length;
        }
        logits =
            engine.forward(&[NewTokens { id: seq, tokens: &[token], wants: Wants::Last }]).unwrap().to_vec();
    };
    engine.remove(seq);
    (answer, finish)
}

/// All that a stream has said so far: tokens, and how it ended if it has.
pub fn drain(events: &Receiver<Event>) -> (Vec<u32>, Option<Finish>) {
    let (mut tokens, mut end) = (Vec::new(), None);
    for event in events.try_iter() {
        assert!(end.is_none(), "{event:?} behind the end");
        match event {
            Event::Token(t) => tokens.push(t.id),
            Event::Cached(_) | Event::Prompt(_) => {}
            Event::End(how) => end = Some(how),
        }
    }
    (tokens, end)
}
