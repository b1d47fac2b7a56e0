//! A server's life: loading, a full queue, draining, and the end of its engine.

use std::time::Duration;

use serde_json::{Value, json};
use tandem::engine::Shutdown;
use tandem::serve::Options;

use super::world::{Gate, PATIENCE, World, text_of};

const TEXT: &str = "/v1/completions";

fn body(more: Value) -> Value {
    let mut body = json!({ "prompt": "ab", "max_tokens": 8, "seed": 1 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn until_the_model_is_there_requests_are_put_off() {
    let mut served = World { ready: false, ..World::default() }.serve();
    let caller = served.caller();
    for reply in
        [caller.get("/health"), caller.complete(&body(json!({}))), caller.post("/tokenize", &json!({}))]
    {
        assert_eq!(reply.error(503)["code"], "loading");
        assert!(reply.retry_after.is_some());
    }
    assert_eq!(caller.get("/v1/models").ok()["data"][0]["id"], "tiny/llama");
    assert!(caller.get("/metrics").body.contains("tandem_ready 0"));
    served.ready();
    caller.get("/health").ok();
    caller.complete(&body(json!({}))).ok();
}

#[test]
fn a_full_queue_refuses_and_takes_again() {
    let options = Options { queue: 2, ..Options::default() };
    let served = World { options, gate: Gate::after(1), sequences: 1, ..World::default() }.serve();
    let caller = served.caller();
    // One runs, two wait; the engine is held.
    let mut first = served.stream(TEXT, &body(json!({ "stream": true })));
    first.event().unwrap();
    let others = [0, 1].map(|_| served.send(TEXT, &body(json!({ "stream": true }))));
    let client = served.service.client();
    let until = std::time::Instant::now() + PATIENCE;
    while client.in_flight() < 3 {
        assert!(std::time::Instant::now() < until);
        std::thread::yield_now();
    }
    let reply = caller.complete(&body(json!({})));
    assert_eq!(reply.error(429)["code"], "queue_full");
    assert!(reply.retry_after.is_some());
    // More than ever fit is the request's fault.
    assert_eq!(caller.complete(&body(json!({ "n": 4 }))).error(400)["param"], "n");
    served.gate.open();
    while first.event().is_some() {}
    for other in others {
        let events = super::world::Events::of(other).all();
        assert_eq!(text_of(&events, 0).split_whitespace().count(), 8);
    }
    served.wait_until_free();
    caller.complete(&body(json!({}))).ok();
}

#[test]
fn a_server_that_drains_finishes_what_it_has() {
    let served = World { gate: Gate::after(2), ..World::default() }.serve();
    let caller = served.caller();
    let mut events = served.stream(TEXT, &body(json!({ "stream": true })));
    events.event().unwrap();
    served.server.drain();
    for reply in [caller.get("/health"), caller.complete(&body(json!({})))] {
        assert_eq!(reply.error(503)["code"], "draining");
        assert!(reply.retry_after.is_some());
    }
    assert!(!served.server.is_idle_within(Duration::from_millis(20)), "a stream is open");
    served.gate.open();
    let mut last = Value::Null;
    while let Some(event) = events.event() {
        last = event;
    }
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert!(served.server.is_idle_within(PATIENCE));
    let address = served.server.address();
    served.server.end(PATIENCE);
    served.service.shutdown(Shutdown::Finish).unwrap();
    std::net::TcpStream::connect(address).expect_err("nobody listens");
}

#[test]
fn what_is_cancelled_at_the_deadline_is_told_so() {
    let served = World { gate: Gate::after(2), ..World::default() }.serve();
    let mut events = served.stream(TEXT, &body(json!({ "stream": true, "max_tokens": 200 })));
    events.event().unwrap();
    let caller = served.caller();
    let whole = std::thread::spawn(move || caller.complete(&body(json!({ "max_tokens": 200 }))));
    let client = served.service.client();
    while client.in_flight() < 2 {
        std::thread::yield_now();
    }
    served.server.drain();
    let service = served.service;
    let ending = std::thread::spawn(move || service.shutdown(Shutdown::Cancel).map(drop));
    served.gate.open();
    ending.join().unwrap().unwrap();
    let mut last = Value::Null;
    while let Some(event) = events.event() {
        last = event;
    }
    assert_eq!(last["error"]["code"], "draining", "{last}");
    let status = whole.join().unwrap();
    // It was accepted and cancelled, or came too late.
    status.error(503);
    assert!(served.server.is_idle_within(PATIENCE));
}

#[test]
fn the_end_of_the_engine_is_an_error_of_every_request() {
    let served = World { gate: Gate::after(2), ..World::default() }.serve();
    let mut events = served.stream(TEXT, &body(json!({ "stream": true, "max_tokens": 200 })));
    events.event().unwrap();
    let caller = served.caller();
    let whole = std::thread::spawn(move || caller.complete(&body(json!({ "max_tokens": 200 }))));
    let client = served.service.client();
    while client.in_flight() < 2 {
        std::thread::yield_now();
    }
    served.gate.break_down();
    let mut last = Value::Null;
    while let Some(event) = events.event() {
        last = event;
    }
    assert_eq!(last["error"]["code"], "unavailable", "{last}");
    whole.join().unwrap().error(503);
    served.caller().get("/health").error(503);
    served.caller().complete(&body(json!({}))).error(503);
    assert_eq!(served.service.client().in_flight(), 0);
}
