//! Many requests of all kinds at once, while the device fails now and then: each is answered, refused or failed, once; no page is lost,
//! and resident memory stays what it was.
//!
//! `TANDEM_SOAK_REQUESTS` says how many (600), `TANDEM_SOAK_CLIENTS` from how many clients at a time (64). Before them there are a thousand
//! open streams at once. The figures are printed:
//!
//! ```console
//! $ TANDEM_SOAK_REQUESTS=100000 TANDEM_SOAK_CLIENTS=1000 cargo test --release --test serve soak -- --nocapture
//! ```

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan};
use tandem::serve::Options;

use super::world::{Events, Gate, QUIET, Served, World};

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Streams that are open at once.
const STREAMS: usize = 1000;

/// How a request ended, as its client saw it.
#[derive(Clone, Copy)]
enum End {
    Answered,
    Failed,
    Refused,
    /// The client went away, or broke off its request, and does not know.
    Left,
}

/// A generator with a state of its own for each request (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % n
    }
}

fn number(name: &str, otherwise: usize) -> usize {
    std::env::var(name).ok().map_or(otherwise, |n| n.parse().expect("a whole number"))
}

/// Bytes of this process in memory: the server's, the engine's and the clients'.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// A request that is well formed, and how many tokens its answer has.
fn good(random: &mut Random, stream: bool) -> (&'static str, Value, u64) {
    let (n, tokens) = (1 + random.below(40) as usize, 1 + random.below(12));
    // Half of them begin alike, so that pages are shared.
    let text =
        if random.below(2) == 0 { "a".repeat(n) } else { format!("{}{}", random.below(1000), "b".repeat(n)) };
    let body = json!({
        "prompt": text, "messages": [{ "role": "user", "content": text }], "max_tokens": tokens, "stream": stream,
        "temperature": 0.5, "ignore_eos": true, "stream_options": if stream { json!({ "include_usage": true }) } else { Value::Null },
        "ttft_target": if random.below(3) == 0 { json!(5.0) } else { Value::Null },
    });
    (if random.below(2) == 0 { TEXT } else { CHAT }, body, tokens)
}

/// Reads an answer that is no stream.
fn whole(connection: &TcpStream) -> (u16, String) {
    let mut text = String::new();
    let mut from = BufReader::new(connection);
    let mut length = 0;
    loop {
        let mut line = String::new();
        assert_ne!(from.read_line(&mut line).unwrap(), 0, "the connection ends: {text:?}");
        if let Some(n) = line.strip_prefix("content-length: ") {
            length = n.trim().parse().unwrap();
        }
        text += &line;
        if line == "\r\n" {
            break;
        }
    }
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    let mut body = vec![0; length];
    from.read_exact(&mut body).unwrap();
    (status, String::from_utf8(body).unwrap())
}

/// A stream has one end: a reason of each answer and the usage, or an error.
fn read_stream(mut events: Events, tokens: u64, pause: impl Fn()) -> End {
    if events.status != 200 {
        assert!(events.status >= 500, "{}", events.head);
        return End::Failed;
    }
    let (mut reasons, mut errors, mut usage) = (0, 0, None);
    while let Some(event) = events.event() {
        pause();
        errors += usize::from(event.get("error").is_some());
        reasons += usize::from(event["choices"][0]["finish_reason"].is_string());
        usage = event["usage"]["completion_tokens"].as_u64().or(usage);
    }
    assert_eq!(events.line(), None, "nothing follows [DONE]");
    match (reasons, errors, usage) {
        (1, 0, Some(n)) => {
            assert_eq!(n, tokens);
            End::Answered
        }
        (0, 1, None) => End::Failed,
        other => panic!("reasons, errors and usage of a stream: {other:?}"),
    }
}

/// One request.
fn request(served: &Served, number: u64) -> End {
    let mut random = Random(number);
    let kind = random.below(100);
    let (path, body, tokens) = good(&mut random, kind >= 45);
    match kind {
        0..45 => {
            let connection = served.send_with(path, &body, "Connection: close\r\n");
            let (status, text) = whole(&connection);
            let answer: Value = serde_json::from_str(&text).unwrap();
            match status {
                200 => assert_eq!(answer["usage"]["completion_tokens"], tokens, "{text}"),
                _ => assert!(status == 500 && answer["error"]["message"].is_string(), "{status} {text}"),
            }
            if status == 200 { End::Answered } else { End::Failed }
        }
        45..65 => read_stream(served.stream(path, &body), tokens, || ()),
        // Slow: it pauses at each event.
        65..75 => {
            let pause = Duration::from_millis(random.below(15));
            read_stream(served.stream(path, &body), tokens, || std::thread::sleep(pause))
        }
        // It goes away: at once, after a while, or after some of the answer.
        75..88 => {
            let connection = served.send(path, &body);
            match random.below(3) {
                0 => {}
                1 => std::thread::sleep(Duration::from_micros(random.below(20_000))),
                _ => {
                    let mut some = vec![0; 1 + random.below(900) as usize];
                    let _ = (&connection).read(&mut some);
                }
            }
            let _ = connection.shutdown(Shutdown::Both);
            End::Left
        }
        // Its body is cut off.
        88..90 => {
            let connection = served.connect();
            let head = format!(
                "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
            );
            (&connection).write_all(format!("{head}{{\"prompt\": \"").as_bytes()).unwrap();
            End::Left
        }
        _ => {
            let wrong = match random.below(6) {
                0 => json!({ "prompt": 7, "messages": 7 }),
                1 => {
                    json!({ "prompt": "a", "messages": [{ "role": "user", "content": "a" }], "temperature": -1 })
                }
                2 => {
                    json!({ "prompt": "a", "messages": [{ "role": "user", "content": "a" }], "tpot_target": 0 })
                }
                3 => {
                    json!({ "prompt": "x".repeat(1000), "messages": [{ "role": "user", "content": "x".repeat(1000) }] })
                }
                4 => json!({ "prompt": "a", "messages": [{ "role": "user", "content": "a" }], "n": 0 }),
                _ => json!([]),
            };
            let connection = served.send_with(path, &wrong, "Connection: close\r\n");
            let (status, text) = whole(&connection);
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert!(status == 400 && answer["error"]["message"].is_string(), "{status} {text}");
            End::Refused
        }
    }
}

/// A thousand streams, all accepted before the first has more than a token.
fn open_streams(served: &Served, gate: &Gate) {
    let body = json!({ "prompt": "ab", "max_tokens": 4, "stream": true, "stream_options": { "include_usage": true } });
    let connections: Vec<TcpStream> = (0..STREAMS).map(|_| served.send(TEXT, &body)).collect();
    let client = served.service.client();
    served.wait_until(|| client.in_flight() == STREAMS);
    // Behind the first step all are taken up, behind the second the status says so.
    gate.allow(2);
    served.wait_until(|| client.status().steps == 2);
    let (waiting, running) = client.status().load;
    assert_eq!(waiting + running, STREAMS, "{waiting} wait, {running} run");
    let events: Vec<Events> = connections.into_iter().map(Events::of).collect();
    assert!(events.iter().all(|events| events.status == 200));
    gate.open();
    for events in events {
        assert!(matches!(read_stream(events, 4, || ()), End::Answered));
    }
    served.wait_until_free();
}

/// Makes steps fail until told to stop: mostly a launch, after which the step is made again; sometimes all of a kind, so that the requests
/// that have it fail.
fn faults(runtime: &EmulatedRuntime, served: &Served, over: &AtomicBool, seen: &AtomicUsize) {
    let (mut random, client) = (Random(99), served.service.client());
    // The first is of the second kind, so that a short run meets one.
    for turn in 0u32.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        if turn % 12 > 0 {
            let refuse_launch = Some(1 + random.below(200));
            runtime.set_faults(FaultPlan { refuse_launch, ..FaultPlan::default() });
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let failed = client.status().ended.1;
        runtime.set_faults(FaultPlan { refuse_kernel: Some("ffn_up".into()), ..FaultPlan::default() });
        let until = Instant::now() + Duration::from_millis(200);
        // The first one goes on until a client has seen it.
        let first = || seen.load(Ordering::Relaxed) == 0 && !over.load(Ordering::Relaxed);
        while turn == 0 && first() || client.status().ended.1 == failed && Instant::now() < until {
            std::thread::yield_now();
        }
        runtime.set_faults(FaultPlan::default());
    }
    runtime.set_faults(FaultPlan::default());
}

/// Sends requests from `first` on, from so many clients, and counts how they end.
fn send(served: &Served, first: usize, last: usize, clients: usize, ends: &[AtomicUsize; 4]) {
    let next = AtomicUsize::new(first);
    std::thread::scope(|threads| {
        for _ in 0..clients {
            let client = || {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= last {
                        return;
                    }
                    let end = request(served, number as u64);
                    ends[end as usize].fetch_add(1, Ordering::Relaxed);
                }
            };
            std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(threads, client).unwrap();
        }
    });
    served.wait_until_free();
}

#[test]
fn a_soak_loses_no_request_no_page_and_no_memory() {
    let _alone = QUIET.write().unwrap_or_else(PoisonError::into_inner);
    let (requests, clients) = (number("TANDEM_SOAK_REQUESTS", 600), number("TANDEM_SOAK_CLIENTS", 64));
    let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
    let accelerator = Arc::new(EmulatedAccelerator::new(runtime.clone()));
    let (gate, options) = (Gate::after(0), Options { queue: 4 * STREAMS, ..Options::default() });
    let served = World {
        options,
        gate: gate.clone(),
        sequences: 64,
        prefixes: true,
        logs: false,
        accelerator: Some(accelerator),
        ..World::default()
    };
    let served = served.serve();
    open_streams(&served, &gate);
    let (ends, over) = (<[AtomicUsize; 4]>::default(), AtomicBool::new(false));
    let begun = Instant::now();
    // What is allocated once is there after some of them.
    let some = requests / 5;
    let (mut before, mut after) = (0, 0);
    std::thread::scope(|threads| {
        threads.spawn(|| faults(&runtime, &served, &over, &ends[End::Failed as usize]));
        send(&served, 0, some, clients, &ends);
        before = resident();
        let parts = 4;
        for part in 0..parts {
            let (first, last) =
                (some + part * (requests - some) / parts, some + (part + 1) * (requests - some) / parts);
            send(&served, first, last, clients, &ends);
            after = resident();
            println!(
                "{last} requests, {:.1} s, {:.1} MB resident",
                begun.elapsed().as_secs_f64(),
                after as f64 / 1e6
            );
        }
        over.store(true, Ordering::Relaxed);
    });
    let seconds = begun.elapsed().as_secs_f64();
    let of = |end: End| ends[end as usize].load(Ordering::Relaxed) as u64;
    let (answered, failed, refused, left) =
        (of(End::Answered), of(End::Failed), of(End::Refused), of(End::Left));
    assert_eq!((answered + failed + refused + left) as usize, requests);
    // Connections that were broken off may end a moment after the engine is free.
    let http = || {
        let status = served.caller().get("/status").ok();
        ["ok", "refused", "failed", "left"].map(|name| status["http"][name].as_u64().unwrap())
    };
    let mut said = http();
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let now = http();
        if now == said {
            break;
        }
        said = now;
    }
    let status = served.service.client().status();
    println!(
        "{requests} requests of {clients} clients in {seconds:.1} s ({:.0}/s): {answered} answered, {failed} failed, {refused} refused, \
         {left} left; the server says {said:?}; {} sequences failed; {:.1} MB resident after {some}, {:.1} MB at the end",
        requests as f64 / seconds,
        status.ended.1,
        before as f64 / 1e6,
        after as f64 / 1e6
    );
    // Each was counted once; of clients that left, those whose request had not arrived as a whole need not be.
    let counted = said.iter().sum::<u64>() - STREAMS as u64;
    assert!(
        (answered + failed + refused..=requests as u64).contains(&counted),
        "{counted} counted: {said:?}"
    );
    assert!(said[0] >= answered + STREAMS as u64 && said[1] >= refused && said[2] >= failed, "{said:?}");
    assert!(failed > 0 && status.ended.1 >= failed, "no fault was met");
    assert_eq!((status.load, status.free_pages), ((0, 0), status.pages), "pages are conserved");
    assert!(after <= before + before / 10 + (8 << 20), "{before} bytes resident, then {after}");
    // It serves as before.
    let last = served.caller().complete(&json!({ "prompt": "ab", "max_tokens": 3 })).ok();
    assert_eq!(last["usage"]["completion_tokens"], 3);
}
