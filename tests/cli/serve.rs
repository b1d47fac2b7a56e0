//! `tandem serve` as a process: it says where it listens, answers, and ends by signals.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::command::{assert_error, json as json_of, run, tandem};
use crate::support::models;

/// Waiting for so long is a failure.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Serving {
    child: Child,
    address: String,
}

impl Serving {
    fn start(home: &std::path::Path, args: &[&str]) -> Serving {
        Serving::of("synth:tiny-llama", home, args)
    }

    fn of(model: &str, home: &std::path::Path, args: &[&str]) -> Serving {
        let mut command = tandem(home);
        command.args(["serve", "-m", model, "--device", "cpu", "--port", "0", "--json"]).args(args);
        Serving::spawn(command)
    }

    /// The command is `serve` with a free port and JSON.
    pub fn spawn(mut command: Command) -> Serving {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let address = said["listening"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
        Serving { child, address }
    }

    fn ask(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    pub fn post(&self, path: &str, body: &str) -> TcpStream {
        let n = body.len();
        self.ask(&format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {n}\r\n\r\n{body}"
        ))
    }

    pub fn wait_until_ready(&self) {
        let until = Instant::now() + PATIENCE;
        while !answer(self.ask("GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
            .contains(" 200 ")
        {
            assert!(Instant::now() < until);
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: kill takes no pointer; the child has not been waited for, so the id is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// The exit code, and what it wrote to stderr.
    pub fn end(mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap().code(), said)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Of a test that failed.
        let _ = self.child.kill();
    }
}

pub fn answer(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn it_answers_and_a_signal_lets_it_finish() {
    let home = tempfile::tempdir().unwrap();
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let serving = Serving::start(home.path(), &["--served-name", "tiny", "--drain-seconds", "600"]);
        serving.wait_until_ready();
        let whole = answer(serving.post("/v1/completions", r#"{"prompt": "secret", "max_tokens": 4}"#));
        assert!(whole.starts_with("HTTP/1.1 200") && whole.contains("\"model\":\"tiny\""), "{whole}");
        let stream = serving.post("/v1/completions", r#"{"prompt": "ab", "max_tokens": 60, "stream": true}"#);
        let mut lines = BufReader::new(stream);
        let mut text = String::new();
        while !text.contains("data: {") {
            assert_ne!(lines.read_line(&mut text).unwrap(), 0);
        }
        serving.signal(signal);
        lines.read_to_string(&mut text).unwrap();
        assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("data: [DONE]"), "{text}");
        let (code, said) = serving.end();
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("tandem: listening on http://127.0.0.1:"), "{said}");
        assert!(said.contains("POST /v1/completions 200") && said.contains("tokens=4"), "{said}");
        assert!(!said.contains("secret"), "{said}");
        assert!(said.lines().all(|line| line.starts_with("tandem: ")), "{said}");
    }
}

#[test]
fn after_the_deadline_and_by_a_second_signal_requests_are_cancelled() {
    let home = tempfile::tempdir().unwrap();
    for (drain, signals) in [("0", 1), ("600", 2)] {
        let args = ["--drain-seconds", drain, "--threads", "1", "--ctx", "512", "--sequences", "64"];
        let serving = Serving::start(home.path(), &args);
        serving.wait_until_ready();
        // Sixty-four long answers take longer than the signals.
        let body = r#"{"prompt": "ab", "max_tokens": 500, "n": 64, "stream": true}"#;
        let mut lines = BufReader::new(serving.post("/v1/completions", body));
        let mut text = String::new();
        while !text.contains("data: {") {
            assert_ne!(lines.read_line(&mut text).unwrap(), 0);
        }
        serving.signal(libc::SIGTERM);
        if signals == 2 {
            // Signals that come together are one.
            let health = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
            while !answer(serving.ask(health)).contains("draining") {}
            serving.signal(libc::SIGTERM);
        }
        lines.read_to_string(&mut text).unwrap();
        assert!(text.contains("\"code\":\"draining\""), "{text}");
        let (code, said) = serving.end();
        assert_eq!(code, Some(0), "{said}");
    }
}

#[test]
fn a_signal_while_the_model_is_loaded_ends_it() {
    let home = tempfile::tempdir().unwrap();
    let serving = Serving::start(home.path(), &[]);
    serving.signal(libc::SIGTERM);
    let (code, said) = serving.end();
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn what_cannot_be_served_is_an_error() {
    let home = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let serve = |args: &[&str]| run(tandem(home.path()).arg("serve").args(args));
    let output = serve(&["-m", "synth:tiny-llama", "--port", &port]);
    assert_error(&output, 1, "choose another --host or --port");
    assert_error(&serve(&["-m", "synth:tiny-llama", "--port", "70000"]), 2, "--port");
    assert_error(&serve(&["--api-key", "", "--port", "0"]), 2, "a key is one word");
    assert_error(&serve(&["-m", "synth:tiny-llama", "--sequences", "0"]), 2, "--sequences");
    assert_error(
        &serve(&["-m", "synth:tiny-llama", "--target-percentile", "50"]),
        2,
        "--target-percentile 50",
    );
    let keys = home.path().join("keys");
    std::fs::write(&keys, "# none\n").unwrap();
    assert_error(&serve(&["--port", "0", "--api-key-file", keys.to_str().unwrap()]), 2, "no key");
    let output = serve(&["-m", "synth:nosuch", "--port", "0"]);
    assert_error(&output, 2, "nosuch");
}

/// The JSON of an answer.
fn body(answer: &str) -> Value {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    serde_json::from_str(body).unwrap()
}

/// The events of a stream, whose chunks hold whole lines.
fn events(answer: &str) -> Vec<Value> {
    let data = answer.lines().filter_map(|line| line.strip_prefix("data: "));
    data.take_while(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// A tokenizer, a chat template in its sandbox, characters of several tokens.
#[test]
fn a_real_model_answers_as_generate_does() {
    let Some(path) = models::smollm2() else { return };
    let path = path.to_str().unwrap();
    let home = tempfile::tempdir().unwrap();
    let serving = Serving::of(path, home.path(), &["--ctx", "256", "--sequences", "2"]);
    serving.wait_until_ready();
    let generate = ["generate", "-m", path, "--device", "cpu", "--json", "--temp", "0", "-n", "12"];
    for role in ["system", "developer"] {
        let system = ["--system", "Answer in one word.", "Capital of France?"];
        let alone = json_of(&run(tandem(home.path()).args(generate).args(system)));
        let messages =
            json!([{ "role": role, "content": system[1] }, { "role": "user", "content": system[2] }]);
        let mut asked = json!({ "messages": messages, "temperature": 0, "max_tokens": 12 });
        let whole = body(&answer(serving.post("/v1/chat/completions", &asked.to_string())));
        assert_eq!(whole["choices"][0]["message"]["content"], alone["text"]);
        assert_eq!(whole["choices"][0]["finish_reason"], alone["finish_reason"]);
        assert_eq!(whole["usage"]["prompt_tokens"], alone["prompt_tokens"]);
        asked["stream"] = true.into();
        let streamed = events(&answer(serving.post("/v1/chat/completions", &asked.to_string())));
        let parts = streamed.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str());
        assert_eq!(alone["text"], parts.collect::<String>());
    }
    // A rocket has several tokens: no event has a part of one.
    let rockets = json!({ "prompt": "🚀🚀🚀🚀🚀🚀🚀🚀", "max_tokens": 24, "temperature": 0, "stream": true, "logprobs": 1 });
    let streamed = events(&answer(serving.post("/v1/completions", &rockets.to_string())));
    let parts: Vec<&str> = streamed.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert!(parts.iter().filter(|part| part.contains('🚀')).count() > 1, "{parts:?}");
    assert!(parts[..parts.len() - 2].iter().all(|part| !part.contains('\u{fffd}')), "{parts:?}");
    let bad = json!({ "messages": [{ "role": "user", "content": "x ".repeat(300) }] });
    let refused = answer(serving.post("/v1/chat/completions", &bad.to_string()));
    assert!(refused.starts_with("HTTP/1.1 400") && refused.contains("\"n_ctx\":256"), "{refused}");
    serving.signal(libc::SIGTERM);
    assert_eq!(serving.end().0, Some(0));
}
