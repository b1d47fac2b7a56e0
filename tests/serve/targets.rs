//! Targets of latency, of the server and of single requests: what the log, the metrics and the status say of them.

use serde_json::json;
use tandem::sched::{OwnTargets, Targets};

use super::world::{Gate, World};

/// What nobody can miss in a test, and what nobody can keep.
const LONG: f64 = 1e6;
const SHORT: f64 = 1e-9;

#[test]
fn a_request_is_in_time_by_its_own_targets() {
    let targets = Targets { ttft: Some(SHORT), tpot: Some(LONG), ..Targets::NONE };
    let served = World { targets, ..World::default() }.serve();
    let caller = served.caller();
    let ask = |more: serde_json::Value| {
        let mut body = json!({ "prompt": "ab", "max_tokens": 3 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    // Only the target that is given replaces the server's.
    for (more, within) in [
        (json!({}), "0/1"),
        (json!({ "tpot_target": LONG }), "0/1"),
        (json!({ "ttft_target": LONG }), "1/1"),
        (json!({ "ttft_target": LONG, "n": 3 }), "3/3"),
        (json!({ "ttft_target": LONG, "tpot_target": SHORT }), "0/1"),
        // An answer of one token has no time between tokens.
        (json!({ "ttft_target": LONG, "tpot_target": SHORT, "max_tokens": 1 }), "1/1"),
        (json!({ "ttft_target": null, "tpot_target": null }), "0/1"),
    ] {
        caller.complete(&ask(more.clone())).ok();
        let line = served.logged(" 200 ");
        assert!(line.ends_with(&format!(" within_targets={within}")), "{more}: {line}");
    }
    // Refused requests are not counted.
    caller.complete(&ask(json!({ "ttft_target": -1 }))).error(400);
    let status = caller.get("/status").ok();
    assert_eq!(status["targets"], json!({ "answers": 9, "within": 5 }));
    assert_eq!(status["model"]["ttft_target_s"], SHORT);
    let metrics = caller.get("/metrics").body;
    for line in ["tandem_answers_with_targets_total 9", "tandem_answers_within_targets_total 5"] {
        assert!(metrics.lines().any(|l| l == line), "{line}: {metrics}");
    }
}

#[test]
fn without_targets_nothing_is_said_of_them() {
    let served = World::default().serve();
    served.caller().complete(&json!({ "prompt": "ab", "max_tokens": 2 })).ok();
    assert!(!served.logged(" 200 ").contains("within_targets"));
    assert_eq!(served.caller().get("/status").ok()["targets"], json!({ "answers": 0, "within": 0 }));
}

/// What the strategy sees is what the request says.
#[test]
fn the_scheduler_has_the_targets_of_a_request() {
    let gate = Gate::after(0);
    let served = World { gate: gate.clone(), ..World::default() }.serve();
    let body = json!({ "prompt": "ab", "max_tokens": 1, "ttft_target": 0.25, "tpot_target": 0.125 });
    let stream = served.send("/v1/completions", &body);
    served.wait_until(|| gate.seen_targets().is_some_and(|own| own != OwnTargets::default()));
    assert_eq!(gate.seen_targets(), Some(OwnTargets::new(Some(0.25), Some(0.125))));
    gate.open();
    drop(stream);
    served.wait_until_free();
}

/// Of a request that fails, every answer that has not ended is late; a client that leaves counts nowhere.
#[test]
fn failed_answers_are_late_and_left_ones_are_not_counted() {
    let targets = Targets { ttft: Some(LONG), ..Targets::NONE };
    // The stream begins with a token of each answer, and these may come to the engine one by one.
    let gate = Gate::after(8);
    let served = World { targets, gate: gate.clone(), ..World::default() }.serve();
    let body = json!({ "prompt": "ab", "max_tokens": 50, "n": 2, "stream": true });
    let left = served.stream("/v1/completions", &body);
    left.leave();
    served.logged(" 499 ");
    // A step that waits at the gate has to end before the engine sees that nobody wants it.
    gate.open();
    served.wait_until(|| served.service.client().in_flight() == 0);
    gate.allow(gate.steps());
    let stream = served.send("/v1/completions", &body);
    let client = served.service.client();
    served.wait_until(|| client.in_flight() == 2);
    gate.break_down();
    let line = served.logged(" 503 ");
    assert!(line.ends_with(" within_targets=0/2"), "{line}");
    assert_eq!(served.caller().get("/status").ok()["targets"], json!({ "answers": 2, "within": 0 }));
    drop(stream);
}
