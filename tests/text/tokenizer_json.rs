//! Every kind of `tokenizer.json` that models have gives the crate's tokens; hostile ones give one sentence, soon.

use std::path::Path;

use serde_json::{Value, json};
use tandem::Error;
use tandem::text::Tokenizer;

/// One small tokenizer of each kind, texts, and the ids that Python's `tokenizers` gives (make_tokenizers.py).
fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/tokenizers.json")).unwrap()
}

fn load(value: &Value, folder: &Path) -> Result<Tokenizer, Error> {
    let path = folder.join("tokenizer.json");
    std::fs::write(&path, value.to_string()).unwrap();
    Tokenizer::from_json_file(&path, None)
}

/// With special tokens around and parsed, and with neither.
const FLAGS: [(bool, bool); 2] = [(true, true), (false, false)];

#[test]
fn each_kind_gives_the_reference_ids() {
    let folder = tempfile::tempdir().unwrap();
    let fixture = fixture();
    let texts: Vec<&str> = fixture["texts"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() >= 20, "the fixture lost its tokenizers");
    let mut wrong = Vec::new();
    for case in cases {
        let tokenizer = load(&case["tokenizer"], folder.path()).unwrap();
        for (text, expected) in texts.iter().zip(case["ids"].as_array().unwrap()) {
            for ((special, parse), expected) in FLAGS.into_iter().zip(expected.as_array().unwrap()) {
                let ids = tokenizer.encode(text, special, parse).map_err(|e| e.to_string());
                if json!(ids.as_ref().unwrap_or(&vec![])) != *expected {
                    wrong.push(format!("{}: {text:?}: {ids:?}, not {expected}", case["name"]));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
