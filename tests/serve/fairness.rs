//! Whose requests are computed next: keys take turns, and none may fill the queue.

use std::net::TcpStream;

use serde_json::{Value, json};
use tandem::serve::{Keys, Options};

use super::world::{Events, Gate, Served, World};

/// One sequence at a time; requests of one step each; no step is made yet.
fn world(per_key: Option<usize>) -> Served {
    let keys = Keys::new(["a", "b"]).unwrap();
    let options = Options { keys, queue: 8, queue_per_key: per_key, ..Options::default() };
    World { options, sequences: 1, gate: Gate::after(0), ..World::default() }.serve()
}

/// Sends a request, and waits until the engine has it.
fn send(served: &Served, key: &str, priority: i32) -> TcpStream {
    let client = served.service.client();
    let before = client.in_flight();
    let body =
        json!({ "prompt": "ab", "max_tokens": 1, "temperature": 0, "priority": priority, "stream": true });
    let stream = served.send_with("/v1/completions", &body, &format!("X-Api-Key: {key}\r\n"));
    served.wait_until(|| client.in_flight() > before);
    stream
}

fn all(stream: TcpStream) -> Vec<Value> {
    Events::of(stream).all()
}

#[test]
fn the_first_request_of_a_key_does_not_wait_for_all_of_another() {
    let served = world(None);
    let busy: Vec<TcpStream> = (0..5).map(|_| send(&served, "a", -9)).collect();
    let first = send(&served, "b", 0);
    // The one that was first, and one more.
    served.gate.allow(2);
    assert_eq!(all(first).last().unwrap()["choices"][0]["finish_reason"], "length");
    assert_eq!(served.gate.steps(), 2);
    served.gate.open();
    busy.into_iter().for_each(|stream| drop(all(stream)));
    served.wait_until_free();
}

#[test]
fn a_lower_priority_is_earlier_among_the_requests_of_a_key() {
    let served = world(None);
    let first = send(&served, "a", 0);
    let later = send(&served, "a", 3);
    let sooner = send(&served, "a", -3);
    served.gate.allow(2);
    all(first);
    all(sooner);
    assert_eq!(served.gate.steps(), 2);
    served.gate.open();
    all(later);
    let error = served.caller().post_text(
        "/v1/completions",
        r#"{"prompt": "a", "priority": "high"}"#,
        &[("content-type", "application/json"), ("x-api-key", "a")],
    );
    assert_eq!(error.error(400)["param"], "priority");
}

#[test]
fn a_key_has_a_bound_of_its_own() {
    let served = world(Some(1));
    let ask = |key: &str, n: u32| {
        let body = json!({ "prompt": "ab", "max_tokens": 1, "n": n }).to_string();
        served.caller().post_text(
            "/v1/completions",
            &body,
            &[("content-type", "application/json"), ("x-api-key", key)],
        )
    };
    let never = ask("a", 3);
    assert_eq!(never.error(400)["param"], "n");
    let taken = [send(&served, "a", 0), send(&served, "a", 0)];
    let refused = ask("a", 1);
    let error = refused.error(429);
    assert_eq!((error["code"].as_str(), refused.retry_after.as_deref()), (Some("key_queue_full"), Some("1")));
    assert!(error["message"].as_str().unwrap().contains("of this key"), "{error}");
    // Another key has its own places; the engine has one more of them.
    let others = [send(&served, "b", 0), send(&served, "b", 0)];
    served.gate.open();
    taken.into_iter().chain(others).for_each(|stream| drop(all(stream)));
    served.wait_until_free();
    ask("a", 1).ok();
}
