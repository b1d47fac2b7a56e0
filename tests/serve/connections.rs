//! Connections as they are: clients that leave, that are slow, that are many.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem::serve::Options;

use super::world::{Events, Gate, QUIET, World, text_of};

const TEXT: &str = "/v1/completions";

/// A prompt of so many tokens.
fn long(tokens: usize, more: Value) -> Value {
    let mut body = json!({ "prompt": "x".repeat(tokens), "max_tokens": 200, "ignore_eos": true });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The client leaves after the engine has made `steps` steps; the prompt has one token a step, of 40.
fn leaves_after(steps: usize, stream: bool, leave: impl FnOnce(std::net::TcpStream)) {
    let _quiet = QUIET.read().unwrap_or_else(PoisonError::into_inner);
    let world = World { gate: Gate::after(steps), chunk: 1, ..World::default() };
    let served = world.serve();
    let connection = served.send(TEXT, &long(40, json!({ "stream": stream })));
    let client = served.service.client();
    let until = Instant::now() + super::world::PATIENCE;
    while client.status().steps < steps as u64 || client.in_flight() == 0 {
        assert!(Instant::now() < until, "{:?}", client.status());
        std::thread::yield_now();
    }
    leave(connection);
    // The server has seen it; the engine is still held.
    let line = served.logged("499");
    assert!(line.contains(&format!("stream={stream}")), "{line}");
    // The line is written a moment before the engine is told.
    std::thread::sleep(Duration::from_millis(100));
    served.gate.open();
    let begun = Instant::now();
    served.wait_until_free();
    println!("free after {:?}", begun.elapsed());
    // At most the step that was held, and one that had begun.
    assert!(served.gate.steps() <= steps + 2, "{} steps", served.gate.steps());
}

#[test]
fn a_client_that_leaves_while_its_prompt_is_computed_frees_its_pages() {
    for stream in [false, true] {
        leaves_after(5, stream, drop);
    }
}

#[test]
fn a_client_that_leaves_during_its_answer_frees_its_pages() {
    for stream in [false, true] {
        leaves_after(50, stream, drop);
    }
}

/// A closed half cannot be told from a closed connection.
#[test]
fn a_half_closed_connection_has_left() {
    leaves_after(50, true, |connection| {
        connection.shutdown(Shutdown::Write).unwrap();
        std::mem::forget(connection);
    });
}

#[test]
fn pages_are_free_within_a_tenth_of_a_second() {
    let served = World { chunk: 1, ..World::default() }.serve();
    let mut times: Vec<Duration> = (0..10)
        .map(|_| {
            let mut events = served.stream(TEXT, &long(40, json!({ "stream": true })));
            events.event().unwrap();
            events.leave();
            let left = Instant::now();
            served.wait_until_free();
            left.elapsed()
        })
        .collect();
    times.sort();
    println!("pages are free after {:?} (median), {:?} (most)", times[5], times[9]);
    // Not the median: other programs have the cores, too.
    assert!(times[2] < Duration::from_millis(100), "{times:?}");
}

#[test]
fn a_neighbour_that_leaves_changes_nothing() {
    let served = World { chunk: 8, ..World::default() }.serve();
    let body = long(20, json!({ "seed": 5, "max_tokens": 60 }));
    let alone = served.caller().complete(&body).ok();
    let mut beside = served.stream(TEXT, &long(60, json!({ "stream": true })));
    beside.event().unwrap();
    let mut streamed = body;
    streamed["stream"] = true.into();
    let mut events = served.stream(TEXT, &streamed);
    let first = events.event().unwrap();
    beside.leave();
    let mut all = vec![first];
    while let Some(event) = events.event() {
        all.push(event);
    }
    assert_eq!(text_of(&all, 0), alone["choices"][0]["text"].as_str().unwrap());
    served.wait_until_free();
}

#[test]
fn a_stream_without_news_has_comments() {
    let options = Options { keep_alive: Duration::from_millis(20), ..Options::default() };
    let served = World { options, gate: Gate::after(1), chunk: 8, ..World::default() }.serve();
    // Accepted before the first step, whose successor is held.
    let mut events = served.stream(
        "/v1/chat/completions",
        &json!({
            "messages": [{ "role": "user", "content": "x".repeat(40) }], "stream": true, "max_tokens": 2,
        }),
    );
    assert!(events.line().unwrap().contains("assistant"));
    for _ in 0..3 {
        assert_eq!(events.line().unwrap(), ": keep-alive");
    }
    served.gate.open();
    while events.event().is_some() {}
}

#[test]
fn clients_that_are_slow_to_ask_are_cut_off() {
    let (head_time, body_time) = (Duration::from_millis(200), Duration::from_millis(200));
    let options = Options { head_time, body_time, ..Options::default() };
    let served = World { options, ..World::default() }.serve();
    let mut answer = String::new();
    let mut head = served.connect();
    head.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow:").unwrap();
    head.read_to_string(&mut answer).unwrap();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    answer.clear();
    let mut body = served.connect();
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{";
    body.write_all(head.as_bytes()).unwrap();
    body.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    served.caller().get("/health").ok();
}

#[test]
fn what_is_no_http_is_told_so() {
    let served = World::default().serve();
    for (bytes, want) in [
        (&b"hello\r\n\r\n"[..], "HTTP/1.1 400"),
        (b"GET / HTTP/9.9\r\n\r\n", "HTTP/1.1 400"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 400"),
    ] {
        let mut connection = served.connect();
        connection.write_all(bytes).unwrap();
        connection.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with(want), "{answer:?}");
    }
    served.caller().get("/health").ok();
}

/// Streams of many clients, each with the answer that it has alone.
fn many(n: usize, tokens: usize) {
    let served = World { sequences: 32, chunk: 64, ..World::default() }.serve();
    let body =
        |i: usize| json!({ "prompt": format!("{i}"), "max_tokens": tokens, "seed": i, "stream": i > 0 });
    let connections: Vec<_> = (0..n).map(|i| served.send(TEXT, &body(i + 1))).collect();
    assert!(served.service.client().in_flight() <= n);
    let texts: Vec<String> = connections.into_iter().map(|c| text_of(&Events::of(c).all(), 0)).collect();
    for i in (0..n).step_by(n / 8) {
        let mut alone = body(i + 1);
        alone["stream"] = false.into();
        let alone = served.caller().complete(&alone).ok();
        assert_eq!(texts[i], alone["choices"][0]["text"].as_str().unwrap(), "stream {i}");
    }
    assert!(texts.iter().all(|t| t.split_whitespace().count() == tokens));
    served.wait_until_free();
}

#[test]
fn three_hundred_streams_at_a_time() {
    many(300, 6);
}

#[test]
fn a_thousand_streams_at_a_time() {
    // Both ends of every connection are in this process, which may raise its limit up to the hard one.
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one rlimit through the pointer to one, and nothing else.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    if !known || limit.rlim_max < 2200 {
        println!("SKIPPED: a process may have {} descriptors, 2200 are needed", limit.rlim_max);
        return;
    }
    many(1000, 6);
}
