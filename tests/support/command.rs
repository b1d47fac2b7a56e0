//! Running the binary, and the folder that is its home.

use std::path::Path;
use std::process::{Command, Output, Stdio};

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
