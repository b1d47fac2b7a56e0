//! What the tests of the command line share: running the binary, and a web server of their own.

#![allow(dead_code)] // each test binary uses a part of it

pub mod gpu;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

/// The least of a tokenizer.json: a token for every other character or so, and one for the rest.
pub const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"h":0,"e":1,"l":2,"o":3,"?":4},"merges":[],"unk_token":"?"}}"#;

/// The binary under test, with an environment of its own.
pub fn tandem(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
    for name in [
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HF_TOKEN",
        "TANDEM_ISA",
    ] {
        command.env_remove(name);
    }
    command.env("TANDEM_HOME", home).env("HF_ENDPOINT", "http://127.0.0.1:9").stdin(Stdio::null());
    command
}

/// Runs to the end.
pub fn run(command: &mut Command) -> Output {
    command.output().expect("the binary starts")
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("stdout is UTF-8")
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("stderr is UTF-8")
}

/// The run failed with `code` and exactly one sentence, which contains `want`; nothing on stdout.
#[track_caller]
pub fn assert_error(output: &Output, code: i32, want: &str) {
    let (out, err) = (stdout(output), stderr(output));
    assert_eq!(output.status.code(), Some(code), "stderr: {err}");
    let errors: Vec<_> = err.lines().filter(|l| l.starts_with("tandem: error: ")).collect();
    assert_eq!(errors.len(), 1, "one error line wanted: {err}");
    assert!(err.lines().all(|l| l.starts_with("tandem: ")), "a stray line: {err}");
    assert!(errors[0].contains(want), "{want:?} wanted: {err}");
    assert!(!err.contains("panicked") && !err.contains("backtrace"), "{err}");
    assert_eq!(out, "", "nothing on stdout wanted");
}

/// The run succeeded and printed exactly one JSON object.
#[track_caller]
pub fn json(output: &Output) -> serde_json::Value {
    assert_eq!(output.status.code(), Some(0), "stderr: {}", stderr(output));
    let out = stdout(output);
    let value: serde_json::Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"));
    assert!(value.is_object(), "{out}");
    value
}

/// A model for tests, in `$TANDEM_TEST_MODELS` or `models/`, under any of these names.
pub fn model(names: &[&str]) -> Option<std::path::PathBuf> {
    let folder =
        std::env::var_os("TANDEM_TEST_MODELS").map_or_else(|| "models".into(), std::path::PathBuf::from);
    let found = names.iter().map(|n| folder.join(n)).find(|p| p.exists());
    if found.is_none() {
        println!("skipped: no {} in {}", names[0], folder.display());
    }
    found
}

/// SmolLM2-135M-Instruct in Q4_1.
pub fn smollm2() -> Option<std::path::PathBuf> {
    model(&["SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2.gguf"])
}

/// Gemma 3 270M in Q4_K_M.
pub fn gemma3() -> Option<std::path::PathBuf> {
    model(&["gemma-3-270m-q4_k_m.gguf", "gemma3.gguf"])
}

/// A request as the server saw it.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    /// By lower-case name.
    pub headers: BTreeMap<String, String>,
}

impl Request {
    /// N of `Range: bytes=N-`.
    pub fn range(&self) -> Option<usize> {
        self.headers.get("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// What the server answers.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Drop the connection after this many bytes of the body.
    pub cut: Option<usize>,
}

impl Reply {
    pub fn ok(body: impl Into<Vec<u8>>) -> Reply {
        Reply { status: 200, headers: vec![], body: body.into(), cut: None }
    }
    pub fn status(status: u16) -> Reply {
        Reply { status, ..Reply::ok("") }
    }
    pub fn header(mut self, name: &str, value: impl Into<String>) -> Reply {
        self.headers.push((name.into(), value.into()));
        self
    }
    pub fn cut(mut self, after: usize) -> Reply {
        self.cut = Some(after);
        self
    }
    /// `body` as a well-behaved server sends it: the rest, if a range is asked for.
    pub fn file(request: &Request, body: &[u8]) -> Reply {
        match request.range() {
            None => Reply::ok(body),
            Some(from) if from < body.len() => {
                let range = format!("bytes {from}-{}/{}", body.len() - 1, body.len());
                Reply { status: 206, ..Reply::ok(&body[from..]) }.header("content-range", range)
            }
            Some(_) => Reply::status(416),
        }
    }
}

/// A web server on the loopback interface, until the process ends.
pub struct Server {
    pub port: u16,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// `answer` gets each request and the number of earlier requests for the same path.
    pub fn start(answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (log, answer) = (seen.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, answer) = (log.clone(), answer.clone());
                std::thread::spawn(move || serve(stream, &log, &*answer));
            }
        });
        Server { port, seen }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The requests for a path so far.
    pub fn requests(&self, path: &str) -> Vec<Request> {
        self.seen.lock().unwrap().iter().filter(|r| r.path == path).cloned().collect()
    }
}

fn serve(mut stream: TcpStream, log: &Mutex<Vec<Request>>, answer: &dyn Fn(&Request, usize) -> Reply) {
    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
    let mut line = String::new();
    if reader.read_line(&mut line).unwrap_or(0) == 0 {
        return;
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.trim().to_lowercase(), value.trim().to_owned());
        }
    }
    let request = Request { path, headers };
    let earlier = {
        let mut log = log.lock().unwrap();
        let earlier = log.iter().filter(|r| r.path == request.path).count();
        log.push(request.clone());
        earlier
    };
    let reply = answer(&request, earlier);
    let mut head = format!("HTTP/1.1 {} X\r\nconnection: close\r\n", reply.status);
    head += &format!("content-length: {}\r\n", reply.body.len());
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let body = &reply.body[..reply.cut.unwrap_or(reply.body.len())];
    // A client that has seen enough may be gone already.
    let _ = stream.write_all(format!("{head}\r\n").as_bytes()).and_then(|()| stream.write_all(body));
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.read(&mut [0; 1]);
}

/// Every file below `folder`, by path relative to it.
pub fn tree(folder: &Path) -> Vec<String> {
    fn walk(folder: &Path, base: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, base, found);
            } else {
                found.push(path.strip_prefix(base).unwrap().display().to_string());
            }
        }
    }
    let mut found = Vec::new();
    walk(folder, folder, &mut found);
    found.sort();
    found
}
