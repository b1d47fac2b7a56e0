//! Answers in channels at the command line: reasoning as other models write it, then the content; no header is text.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use tandem::model::{export_hf_folder, load};
use tandem::tensor::DType;

use crate::support::command::{json as parsed, run, stderr, stdout, tandem};
use crate::support::spelling;

const TEMPLATE: &str = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>\
    {% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";

/// A folder of random weights whose tokens are bytes and harmony's control tokens.
fn model(home: &Path) -> PathBuf {
    let folder = home.join("model");
    let loaded = load("synth:tiny-llama,dtype=f32,seed=3,ctx=4096").unwrap();
    export_hf_folder(&loaded, &folder, DType::F32, 1).unwrap();
    std::fs::write(folder.join("tokenizer.json"), spelling::harmony_json().to_string()).unwrap();
    let config = json!({ "chat_template": TEMPLATE });
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

/// Whether it reasons, before the only content that the schema allows.
#[track_caller]
fn check(result: &Value) -> bool {
    let text = result["text"].as_str().unwrap();
    assert_eq!(result["finish_reason"], "stop", "{result}");
    if text == "\"tea\"" {
        return false;
    }
    assert!(text.starts_with("<think>\n") && text.ends_with("\n</think>\n\n\"tea\""), "{text:?}");
    true
}

#[test]
fn a_form_holds_for_the_content_behind_the_reasoning() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let schema = "{\"const\": \"tea\"}";
    let file = home.join("prompts.jsonl");
    // An `f` first is that of `final`.
    let f = |seed: u64| if seed.is_multiple_of(2) { 50 } else { 0 };
    let line = |seed: u64| {
        let bias = json!({ "256": 3, "102": f(seed) });
        json!({ "prompt": "Go.", "seed": seed, "max_tokens": 3000, "logit_bias": bias })
    };
    let lines: String = (0..4).map(|seed| format!("{}\n", line(seed))).collect();
    std::fs::write(&file, lines).unwrap();
    let shared = ["--temp", "1", "--json-schema", schema, "-m"];
    let output = run(tandem(home).args(["generate", "--prompts"]).arg(&file).args(shared).arg(&model));
    let reasons: Vec<bool> =
        stdout(&output).lines().map(|line| check(&serde_json::from_str(line).unwrap())).collect();
    assert_eq!(reasons, [false, true, false, true]);
    let ask = ["generate", "Go.", "-n", "3000", "--seed", "5"];
    let whole = parsed(&run(tandem(home).args(ask).arg("--json").args(shared).arg(&model)));
    check(&whole);
    let printed = stdout(&run(tandem(home).args(ask).args(shared).arg(&model)));
    assert_eq!(printed.strip_suffix('\n'), whole["text"].as_str());
}

#[test]
fn a_conversation_goes_on_with_the_content_alone() {
    let home = tempfile::tempdir().unwrap();
    let (home, model) = (home.path(), model(home.path()));
    let mut child = tandem(home)
        .args(["chat", "-n", "40", "--temp", "1", "--seed", "2", "-v", "-m"])
        .arg(&model)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let saved = home.join("talk.json");
    let lines = format!("Go.\nOn.\n/save {}\n", saved.display());
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let talk: Value = serde_json::from_slice(&std::fs::read(saved).unwrap()).unwrap();
    let turns = talk.as_array().unwrap();
    assert_eq!(turns.len(), 4);
    let shown = stdout(&output);
    for turn in turns.iter().filter(|turn| turn["role"] == "assistant") {
        let content = turn["content"].as_str().unwrap();
        assert!(shown.contains(content) && !content.contains("<think>"), "{content:?} in {shown:?}");
    }
    assert!(!shown.contains("<|"), "no marker is shown: {shown:?}");
}
