//! Requests that are held to a form, among others that are free: on the CPU, and on a device with a host beside it.

use std::sync::Arc;

use serde_json::json;
use tandem::engine::{Batcher, Engine, Event, Finish, Options, Request, Token};
use tandem::text::{Constraint, Content, Ending, Grammars, SamplerParams, Shape, Tokenizer};

use super::world::{alone, drain, engine, model, options, request};
use crate::support::spelling::{self, END};

fn constraint(tokenizer: &Arc<Tokenizer>, vocab: usize) -> Constraint {
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer", "minimum": 0, "maximum": 99 },
        "b": { "enum": ["x", "yz"] } }, "required": ["a", "b"], "additionalProperties": false });
    let shape = Shape { content: Content::Schema(schema), ..Shape::default() };
    Grammars::new(Some(tokenizer.clone()), vocab).compile(&shape.grammar().unwrap()).unwrap()
}

/// A request for JSON, greedy or drawn. Space is made unlikely, so that the answer fits.
fn held(i: usize, constraint: &Constraint, vocab: usize) -> Request {
    let temperature = [0.0, 0.9, 1.5][i % 3];
    let biases = [32, 9, 10, 13].map(|space| (space, -100.0)).to_vec().into();
    // Without biases, a greedy one is decided by the likeliest tokens where a device gives these.
    let biases = if i.is_multiple_of(3) { Arc::default() } else { biases };
    let sampling = SamplerParams { temperature, biases, seed: 7 * i as u64, ..SamplerParams::default() };
    let constraint = Some(constraint.clone());
    Request { sampling, constraint, max_tokens: 60, ending: Ending::at(vec![END]), ..request(i, vocab) }
}

/// The tokens of streams, and how they ended.
fn answers(all: &mut Batcher, requests: &[Request]) -> Vec<(Vec<Token>, Finish)> {
    let streams: Vec<_> = requests.iter().map(|r| all.submit(r.clone()).unwrap().1).collect();
    all.run();
    let answer = |events: std::sync::mpsc::Receiver<Event>| {
        let (mut tokens, mut how) = (Vec::new(), None);
        for event in events {
            match event {
                Event::Token(token) => tokens.push(token),
                Event::Cached(_) => {}
                Event::End(end) => how = Some(end),
            }
        }
        (tokens, how.expect("an end"))
    };
    streams.into_iter().map(answer).collect()
}

#[track_caller]
fn check(answers: &[(Vec<Token>, Finish)]) {
    for (tokens, how) in answers {
        let text: String = tokens.iter().map(|t| &*t.text).collect();
        match how {
            Finish::Stop => {
                let value: serde_json::Value =
                    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
                let fields: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
                assert_eq!(fields, ["a", "b"]);
                assert!(
                    value["a"].as_u64().unwrap() < 100 && ["x", "yz"].contains(&value["b"].as_str().unwrap())
                );
            }
            Finish::Length => assert!(tokens.len() == 60 && text.starts_with('{'), "{text}"),
            how => panic!("{how:?}: {text}"),
        }
    }
}

#[test]
fn a_form_is_kept_and_changes_no_other_answer() {
    let m = model();
    let vocab = m.spec.vocab;
    let tokenizer = spelling::tokenizer();
    let constraint = constraint(&tokenizer, vocab);
    let mut all = Batcher::new(engine(&m, &options(6, None)));
    all.set_tokenizer(Some(tokenizer));
    let wanted: Vec<Request> = (0..6).map(|i| held(i, &constraint, vocab)).collect();
    let apart: Vec<_> = wanted.iter().map(|r| answers(&mut all, std::slice::from_ref(r)).remove(0)).collect();
    check(&apart);
    assert!(apart.iter().filter(|(_, how)| *how == Finish::Stop).count() >= 4, "most are complete");
    // Free ones, greedy and drawn, in the same steps.
    let mut lone = engine(&m, &options(1, None));
    let free: Vec<Request> = (0..6).map(|i| request(i, vocab)).collect();
    let mixed: Vec<Request> = wanted.iter().zip(&free).flat_map(|(a, b)| [a.clone(), b.clone()]).collect();
    let together = answers(&mut all, &mixed);
    for (i, pair) in together.chunks(2).enumerate() {
        assert_eq!(pair[0], apart[i], "request {i} with a form");
        let ids: Vec<u32> = pair[1].0.iter().map(|t| t.id).collect();
        assert_eq!((ids, pair[1].1.clone()), alone(&mut lone, &free[i]), "free request {i}");
    }
}

#[test]
fn requests_with_a_form_end_like_others() {
    let m = model();
    let vocab = m.spec.vocab;
    let tokenizer = spelling::tokenizer();
    let constraint = constraint(&tokenizer, vocab);
    let mut all = Batcher::new(engine(&m, &options(4, None)));
    all.set_tokenizer(Some(tokenizer));
    // Settings that leave nothing to choose: an error, and no text without the form.
    let excluded = (0..vocab as u32).filter(|&id| id != u32::from(b'x')).map(|id| (id, f32::NEG_INFINITY));
    let sampling = SamplerParams { biases: excluded.collect(), ..SamplerParams::default() };
    let none = Request { sampling, ..held(0, &constraint, vocab) };
    // No token, and one.
    let nothing = Request { max_tokens: 0, ..held(1, &constraint, vocab) };
    let one = Request { max_tokens: 1, ..held(1, &constraint, vocab) };
    let mut ended = answers(&mut all, &[none, nothing, one]);
    let (tokens, how) = ended.remove(0);
    assert!(
        tokens.is_empty() && matches!(&how, Finish::Failed(e) if e.to_string().contains("no token is left")),
        "{how:?}"
    );
    assert_eq!(ended[0], (Vec::new(), Finish::Length));
    assert_eq!((&*ended[1].0[0].text, &ended[1].1), ("{", &Finish::Length));
    // A cancelled one, in the middle, whose mask may be on its way.
    let (id, events) = all.submit(held(1, &constraint, vocab)).unwrap();
    let (_, other) = all.submit(held(2, &constraint, vocab)).unwrap();
    (0..8).for_each(|_| drop(all.step()));
    assert!(all.cancel(id));
    all.run();
    assert_eq!(drain(&events).1, Some(Finish::Cancelled));
    assert_ne!(drain(&other).1, Some(Finish::Cancelled));
}

/// The same on an emulated device, whose logits and argmax are its own.
#[test]
fn a_form_is_kept_on_a_device() {
    let m = model();
    let vocab = m.spec.vocab;
    let tokenizer = spelling::tokenizer();
    let constraint = constraint(&tokenizer, vocab);
    let options = Options { ..options(4, None) };
    let on_cpu = engine(&m, &options);
    let accel = tandem::device::open(&"emulated".parse().unwrap(), Some(1 << 30)).unwrap();
    let on_device =
        Engine::on_accelerator(m.spec.clone(), &m.weights, &options, accel, "emulated", &|_| ()).unwrap();
    let requests: Vec<Request> =
        (0..3).flat_map(|i| [held(i, &constraint, vocab), request(i, vocab)]).collect();
    let [cpu, device] = [on_cpu, on_device].map(|engine| {
        let mut all = Batcher::new(engine);
        all.set_tokenizer(Some(tokenizer.clone()));
        answers(&mut all, &requests)
    });
    check(&device.iter().step_by(2).cloned().collect::<Vec<_>>());
    assert_eq!(cpu, device, "deterministic mode has the same bits");
}
