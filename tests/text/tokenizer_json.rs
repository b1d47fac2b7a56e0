//! Every kind of `tokenizer.json` that models have gives the crate's tokens; hostile ones give one sentence, soon.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem::Error;
use tandem::text::Tokenizer;

use crate::support::mutate_json::mutate;

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

/// Components that make the `tokenizers` crate panic, take gigabytes or not end, each with its place and what is said of it; an
/// empty text where it is no danger and works.
#[test]
fn hostile_parts_get_one_sentence_soon() {
    let folder = tempfile::tempdir().unwrap();
    let fixture = fixture();
    let named = |name: &str| {
        let cases = fixture["cases"].as_array().unwrap();
        let found = cases.iter().find(|c| c["tokenizer"]["model"]["type"] == name).unwrap();
        found["tokenizer"].clone()
    };
    let replace =
        |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let text = |t: &str| json!({ "String": t });
    let regex = |t: &str| json!({ "Regex": t });
    let many = |stage: &Value, n: usize| json!({"type": "Sequence", "normalizers": vec![stage; n]});
    let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let around = |single: Vec<Value>| json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}});
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let grows = replace(text("a"), &"a".repeat(2000));
    let cases: Vec<(&str, &str, Value)> = vec![
        ("BPE", "normalizer", replace(text(""), "xx")),
        ("BPE", "normalizer", grows.clone()),
        ("BPE", "normalizer", many(&grows, 8)),
        ("BPE", "normalizer", many(&replace(text("a"), "aa"), 64)),
        ("BPE", "normalizer", many(&replace(regex("(a+)+$"), ""), 4)),
        ("BPE", "normalizer", replace(regex("(((a*)*)*)*b"), "")),
        ("BPE", "normalizer", json!({"type": "Precompiled", "precompiled_charsmap": ""})),
        ("BPE", "normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
        ("BPE", "normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="})),
        ("BPE", "normalizer", json!({"type": "Prepend", "prepend": "z".repeat(1 << 20)})),
        ("BPE", "pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        (
            "BPE",
            "pre_tokenizer",
            json!({"type": "Split", "pattern": regex("(.*)*x"), "behavior": "Isolated", "invert": false}),
        ),
        (
            "BPE",
            "pre_tokenizer",
            json!({"type": "Split", "pattern": text(""), "behavior": "Isolated", "invert": false}),
        ),
        ("BPE", "post_processor", around(vec![special("[nowhere]"), sequence("A")])),
        ("BPE", "post_processor", around(vec![sequence("B")])),
        (
            "BPE",
            "post_processor",
            json!({"type": "RobertaProcessing", "sep": ["x", 4294967295u32], "cls": ["y", 7], "trim_offsets": true, "add_prefix_space": true}),
        ),
        ("BPE", "decoder", json!({"type": "Strip", "content": " ", "start": 1u64 << 60, "stop": 1u64 << 60})),
        (
            "BPE",
            "decoder",
            json!({"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": true}),
        ),
        ("BPE", "decoder", json!({"type": "BPEDecoder", "suffix": ""})),
        ("BPE", "model.continuing_subword_prefix", json!("#".repeat(50))),
        ("BPE", "model.end_of_word_suffix", json!("</w>".repeat(1000))),
        ("BPE", "model.dropout", json!(0.5)),
        ("BPE", "model.merges", json!([["a", "nowhere"]])),
        ("BPE", "model.vocab", json!({"a": 4294967295u32})),
        (
            "BPE",
            "added_tokens",
            json!([{"id": 4294967295u32, "content": "", "special": true, "single_word": false, "lstrip": true, "rstrip": true, "normalized": true}]),
        ),
        ("Unigram", "model.unk_id", json!(1u64 << 40)),
        ("Unigram", "model.vocab", json!([["a", 1e308], ["", -1e308], ["a", 0]])),
        ("WordPiece", "model.max_input_chars_per_word", json!(u64::MAX)),
        ("WordPiece", "model.continuing_subword_prefix", json!("")),
    ];
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    std::fs::write(folder.path().join("tokenizer.json"), deep).unwrap();
    let error =
        Tokenizer::from_json_file(&folder.path().join("tokenizer.json"), None).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
    let long = "aab ".repeat(10_000);
    for (model, place, part) in cases {
        let mut file = named(model);
        match place.split_once('.') {
            Some((outer, inner)) => file[outer][inner] = part.clone(),
            None => file[place] = part.clone(),
        }
        let began = Instant::now();
        let said = load(&file, folder.path()).and_then(|t| {
            let ids = t.encode(&long, true, true)?;
            t.decode(&ids, false);
            Ok(())
        });
        if let Err(e) = &said {
            let e = e.to_string();
            assert!(
                e.contains("tokenizer.json") && e.lines().count() == 1 && e.len() < 600,
                "{place} {part}: {e}"
            );
        }
        let took = began.elapsed();
        assert!(took < Duration::from_secs(20), "{place} {part}: {took:?}");
    }
}

/// Random changes of structure: a tokenizer or one sentence, whatever becomes of it. The fuzz target `tokenizer_json` does the same
/// for longer.
#[test]
fn any_structure_is_a_tokenizer_or_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let donors: Vec<Value> =
        fixture()["cases"].as_array().unwrap().iter().map(|c| c["tokenizer"].clone()).collect();
    let mut state = 1u64;
    let mut draw = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    let mut works = 0;
    for _ in 0..300 {
        let mut file = donors[draw(donors.len())].clone();
        mutate(&mut file, &donors, &[], &mut draw);
        match load(&file, folder.path()) {
            Ok(t) => {
                works += 1;
                for (special, parse) in FLAGS {
                    if let Ok(ids) = t.encode("Hello wörld 123 <s> the a", special, parse) {
                        t.decode(&ids, false);
                        ids.iter().for_each(|&id| drop((t.token_bytes(id), t.token_text(id))));
                    }
                }
            }
            Err(e) => assert_eq!(e.to_string().lines().count(), 1, "{e}"),
        }
    }
    assert!(works > 30, "only {works} of 300 changed files load: the changes are too coarse");
}
