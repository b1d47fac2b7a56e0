//! A server over random weights, clients, and a strategy that makes steps only when a test says so.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use tandem::device::Accelerator;
use tandem::engine::{Batcher, Engine, Service};
use tandem::program::Placement;
use tandem::sched::{Continuous, Decision, Limits, OwnTargets, Predict, Queues, Strategy, Targets, Untimed};
use tandem::serve::{Model, Options, Server};
use tandem::simd::Isa;
use tandem::text::{Chat, Ending, Grammars, SamplerParams, Sandbox};

use crate::support::spelling;

/// Long enough for the slowest machine; waiting for so long is a failure.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Held alone by a test that keeps all cores busy, and together by those that count what happens within a moment.
pub static QUIET: RwLock<()> = RwLock::new(());

/// Lets a fixed number of steps pass, or all.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<Steps>, Condvar)>);

#[derive(Default)]
struct Steps {
    allowed: Option<usize>,
    made: usize,
    /// The step at which the strategy panics.
    panics: bool,
    /// What the first waiting request of the last step asked of latency.
    targets: Option<OwnTargets>,
}

impl Gate {
    /// A gate that lets `n` steps pass.
    pub fn after(n: usize) -> Gate {
        let gate = Gate::default();
        gate.0.0.lock().unwrap().allowed = Some(n);
        gate
    }

    pub fn open(&self) {
        self.0.0.lock().unwrap().allowed = None;
        self.0.1.notify_all();
    }

    /// Lets steps pass until there were `n`.
    pub fn allow(&self, n: usize) {
        self.0.0.lock().unwrap().allowed = Some(n);
        self.0.1.notify_all();
    }

    /// The next step panics.
    pub fn break_down(&self) {
        self.0.0.lock().unwrap().panics = true;
        self.open();
    }

    pub fn steps(&self) -> usize {
        self.0.0.lock().unwrap().made
    }

    pub fn seen_targets(&self) -> Option<OwnTargets> {
        self.0.0.lock().unwrap().targets
    }

    fn pass(&self, queues: &Queues) {
        let (steps, changed) = &*self.0;
        let closed = |s: &mut Steps| s.allowed.is_some_and(|n| s.made >= n);
        let mut steps = steps.lock().unwrap();
        steps.targets = queues.waiting().next().map(|job| job.targets);
        let mut steps = changed.wait_while(steps, closed).unwrap();
        steps.made += 1;
        let panics = steps.panics;
        drop(steps);
        assert!(!panics, "a step that breaks down");
    }
}

struct Gated(Continuous, Gate);

impl Strategy for Gated {
    fn name(&self) -> &'static str {
        "gated"
    }
    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        self.1.pass(queues);
        self.0.plan(queues, limits, costs)
    }
}

/// What a test chooses.
pub struct World {
    pub options: Options,
    pub gate: Gate,
    pub sequences: usize,
    pub context: usize,
    /// Rows of a prompt in a step.
    pub chunk: usize,
    pub ready: bool,
    /// Whether requests share what earlier ones computed.
    pub prefixes: bool,
    /// Whether tokens are bytes, instead of numbers without a text.
    pub spells: bool,
    /// Whether these have harmony's control tokens.
    pub channels: bool,
    pub template: Option<&'static str>,
    /// What is asked of the latency of all requests.
    pub targets: Targets,
    /// The device of all layers but the first; without one, the CPU has them all.
    pub accelerator: Option<Arc<dyn Accelerator>>,
    /// Whether lines of the log are kept.
    pub logs: bool,
}

impl Default for World {
    fn default() -> World {
        let options = Options { name: "tiny/llama".into(), ..Options::default() };
        World {
            options,
            gate: Gate::default(),
            sequences: 4,
            context: 256,
            chunk: 64,
            ready: true,
            prefixes: false,
            spells: false,
            channels: false,
            template: None,
            targets: Targets::NONE,
            accelerator: None,
            logs: true,
        }
    }
}

/// A running server.
pub struct Served {
    /// Goes first.
    _opener: Opener,
    pub server: Server,
    pub service: Service,
    pub gate: Gate,
    log: Mutex<Receiver<String>>,
    model: Option<Model>,
}

/// Opens a gate when it goes: a test that fails while a step waits there ends.
struct Opener(Gate);

impl Drop for Opener {
    fn drop(&mut self) {
        self.0.open();
    }
}

impl World {
    pub fn serve(self) -> Served {
        let loaded =
            if self.spells { long_model() } else { tandem::model::load("synth:tiny-llama").unwrap() };
        let isa = Isa::selected().unwrap();
        let vocab = loaded.spec.vocab;
        let mut options = tandem::engine::Options::new(isa, self.context);
        options.mode = tandem::simd::linear::Mode::Deterministic;
        (options.sequences, options.chunk, options.threads) = (self.sequences, self.chunk, Some(1));
        let engine = match self.accelerator {
            None => Engine::new(loaded.spec, &loaded.weights, &options, &|_| ()),
            Some(on) => {
                let placement = Placement::boundary(1, loaded.spec.n_layers, 0, 0);
                let spec = loaded.spec.clone();
                Engine::placed(spec, &loaded.weights, &options, on, "emulated", "test", placement, &|_| ())
            }
        };
        let engine = engine.unwrap();
        let strategy = Gated(Continuous::default(), self.gate.clone());
        let mut requests = Batcher::with(engine, Box::new(strategy), Box::new(Untimed));
        requests.keep_prefixes(self.prefixes);
        requests.count_busy();
        requests.set_targets(self.targets);
        let tokenizer = self.spells.then(if self.channels { spelling::harmony } else { spelling::tokenizer });
        requests.set_tokenizer(tokenizer.clone());
        let service = Service::start(requests).unwrap();
        let (lines, log) = channel();
        let lines = Mutex::new(lines);
        let log_to = Arc::new(move |line: &str, _| {
            if self.logs {
                drop(lines.lock().unwrap().send(line.to_owned()));
            }
        });
        let server = Server::start(Options { log: log_to, ..self.options }).unwrap();
        let ends = tokenizer.as_ref().map_or_else(Vec::new, |t| t.end_of_generation().collect());
        let sampling = SamplerParams { temperature: 1.0, ..SamplerParams::default() };
        let sandbox = Sandbox::of_program(env!("CARGO_BIN_EXE_tandem"));
        let model = Model {
            client: service.client(),
            chat: Chat::new(tokenizer.clone(), self.template, vocab).in_sandbox(sandbox),
            grammars: Grammars::new(tokenizer.clone(), vocab),
            tokenizer,
            vocab,
            context: self.context,
            sequences: self.sequences,
            sampling,
            ending: Ending::at(ends),
            targets: self.targets,
            placement: "cpu-only: all on the cpu".into(),
        };
        let mut served = Served {
            _opener: Opener(self.gate.clone()),
            server,
            service,
            gate: self.gate,
            log: Mutex::new(log),
            model: Some(model),
        };
        if self.ready {
            served.ready();
        }
        served
    }
}

/// A tiny model with a context for spelled texts.
pub fn long_model() -> tandem::model::LoadedModel {
    let config = include_str!("../../specs/tiny-llama.json");
    let mut config: Value = serde_json::from_str(config).unwrap();
    config["max_position_embeddings"] = 8192.into();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    tandem::model::load(&format!("synth:{}", path.display())).unwrap()
}

/// An answer of the server.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub retry_after: Option<String>,
    pub body: String,
    headers: ureq::http::HeaderMap,
}

impl Reply {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// A header.
    #[track_caller]
    pub fn header(&self, name: &str) -> &str {
        self.headers[name].to_str().unwrap()
    }

    /// The JSON of a request that was answered.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// An error in the form of OpenAI's.
    #[track_caller]
    pub fn error(&self, status: u16) -> Value {
        let error = self.json()["error"].clone();
        assert_eq!(self.status, status, "{}", self.body);
        assert!(error["message"].is_string() && error["type"].is_string(), "{}", self.body);
        assert!(error.get("param").is_some() && error.get("code").is_some(), "{}", self.body);
        error
    }
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE)).build().into()
}

fn reply(response: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Reply {
    let mut response = response.expect("an answer");
    let retry_after = response.headers().get("retry-after").map(|v| v.to_str().unwrap().to_owned());
    let body = response.body_mut().read_to_string().expect("text");
    Reply { status: response.status().as_u16(), retry_after, body, headers: response.headers().clone() }
}

/// A client that may be sent to another thread.
#[derive(Clone)]
pub struct Caller(String);

impl Caller {
    pub fn get(&self, path: &str) -> Reply {
        reply(agent().get(format!("{}{path}", self.0)).call())
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_text(path, &body.to_string(), &[("content-type", "application/json")])
    }

    pub fn post_text(&self, path: &str, body: &str, headers: &[(&str, &str)]) -> Reply {
        let request = agent().post(format!("{}{path}", self.0));
        reply(headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).send(body))
    }

    pub fn chat(&self, body: &Value) -> Reply {
        self.post("/v1/chat/completions", body)
    }

    pub fn complete(&self, body: &Value) -> Reply {
        self.post("/v1/completions", body)
    }
}

impl Served {
    pub fn ready(&mut self) {
        self.server.ready(self.model.take().expect("not ready yet"));
    }

    pub fn caller(&self) -> Caller {
        Caller(format!("http://{}", self.server.address()))
    }

    /// A connection, with a request already sent.
    pub fn send(&self, path: &str, body: &Value) -> TcpStream {
        self.send_with(path, body, "")
    }

    /// The same, with more lines of its head.
    pub fn send_with(&self, path: &str, body: &Value, more: &str) -> TcpStream {
        let stream = self.connect();
        let text = body.to_string();
        let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}");
        let length = format!("Content-Length: {}\r\n\r\n{text}", text.len());
        (&stream).write_all(format!("{head}{length}").as_bytes()).unwrap();
        stream
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.server.address()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A request with a stream of events as its answer.
    pub fn stream(&self, path: &str, body: &Value) -> Events {
        Events::of(self.send(path, body))
    }

    /// Waits for a line of the log that has `part` in it.
    #[track_caller]
    pub fn logged(&self, part: &str) -> String {
        let until = Instant::now() + PATIENCE;
        let mut seen = Vec::new();
        let log = self.log.lock().unwrap();
        while let Ok(line) = log.recv_timeout(until.saturating_duration_since(Instant::now())) {
            if line.contains(part) {
                return line;
            }
            seen.push(line);
        }
        panic!("no line with {part:?} in the log: {seen:#?}");
    }

    /// Waits until something is so.
    #[track_caller]
    pub fn wait_until(&self, is_so: impl Fn() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < until, "it does not come to that");
            std::thread::yield_now();
        }
    }

    /// Waits until the engine has no request and no page is in use.
    #[track_caller]
    pub fn wait_until_free(&self) {
        let (client, until) = (self.service.client(), Instant::now() + PATIENCE);
        loop {
            let status = client.status();
            if status.load == (0, 0) && status.free_pages == status.pages && client.in_flight() == 0 {
                return;
            }
            assert!(Instant::now() < until, "still in use: {status:?}, {} in flight", client.in_flight());
            std::thread::yield_now();
        }
    }
}

/// The events of a stream, as they come.
pub struct Events {
    pub status: u16,
    pub head: String,
    from: BufReader<Chunks>,
}

impl Events {
    pub fn of(stream: TcpStream) -> Events {
        let mut from = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(from.read_line(&mut head).unwrap(), 0, "the connection ends: {head:?}");
        }
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let chunked = head.contains("transfer-encoding: chunked");
        Events { status, head, from: BufReader::new(Chunks { from, left: 0, chunked }) }
    }

    /// The next line that is not empty; `None` at the end.
    pub fn line(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.from.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            let line = line.trim_end();
            if !line.is_empty() {
                return Some(line.to_owned());
            }
        }
    }

    /// The next event that is no comment; `None` after `[DONE]`.
    #[track_caller]
    pub fn event(&mut self) -> Option<Value> {
        loop {
            let line = self.line().expect("[DONE] before the end");
            if line.starts_with(':') {
                continue;
            }
            let data = line.strip_prefix("data: ").expect("an event");
            return (data != "[DONE]").then(|| serde_json::from_str(data).unwrap());
        }
    }

    /// All events to the end.
    #[track_caller]
    pub fn all(mut self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.head);
        let mut all = Vec::new();
        while let Some(event) = self.event() {
            all.push(event);
        }
        assert_eq!(self.line(), None, "nothing follows [DONE]");
        all
    }

    /// Goes away without reading the rest.
    pub fn leave(self) {
        let stream = self.from.into_inner().from.into_inner();
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// Joins the chunks of a body.
struct Chunks {
    from: BufReader<TcpStream>,
    left: usize,
    chunked: bool,
}

impl Read for Chunks {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        if !self.chunked {
            return self.from.read(to);
        }
        if self.left == 0 {
            let mut size = String::new();
            self.from.read_line(&mut size)?;
            if size == "\r\n" {
                size.clear();
                self.from.read_line(&mut size)?;
            }
            self.left = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        }
        let n = to.len().min(self.left);
        let n = self.from.read(&mut to[..n])?;
        self.left -= n;
        Ok(n)
    }
}

/// The text of choice `index` in a stream's events.
pub fn text_of(events: &[Value], index: u64) -> String {
    let choices = events.iter().flat_map(|e| e["choices"].as_array().unwrap());
    let mine = choices.filter(|c| c["index"] == index);
    mine.filter_map(|c| c["delta"]["content"].as_str().or(c["text"].as_str())).collect()
}
