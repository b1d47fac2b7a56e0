//! Tokenisers of real model files against llama.cpp's ids and the oracles' ids.
//!
//! `tests/fixtures/tokenizer_*.json` says how it was made. A folder with llama.cpp's own
//! `ggml-vocab-*.gguf` files (and their `.inp` and `.out`) in `TANDEM_TEST_VOCABS` is checked too.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tandem::model::formats::gguf::Gguf;
use tandem::text::{ChatTemplate, Message, Tokenizer};

fn model(names: &[&str]) -> Option<Gguf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = std::env::var_os("TANDEM_TEST_MODELS").map_or(root.join("models"), PathBuf::from);
    match names.iter().map(|n| folder.join(n)).find(|p| p.exists()) {
        Some(path) => Some(Gguf::open(&path).expect("a model file that opens")),
        None => {
            println!("skipped: none of {names:?} in {}", folder.display());
            None
        }
    }
}

fn smollm2() -> Option<(Gguf, Tokenizer)> {
    let gguf = model(&["SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2.gguf"])?;
    let tokenizer = Tokenizer::from_gguf(&gguf.metadata).expect("SmolLM2's tokenizer");
    Some((gguf, tokenizer))
}

fn gemma3() -> Option<(Gguf, Tokenizer)> {
    let gguf = model(&["gemma-3-270m-q4_k_m.gguf", "gemma3.gguf"])?;
    let tokenizer = Tokenizer::from_gguf(&gguf.metadata).expect("Gemma 3's tokenizer");
    Some((gguf, tokenizer))
}

fn json(path: &str) -> serde_json::Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("a fixture is JSON")
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().expect("a list of ids").iter().map(|v| v.as_u64().expect("an id") as u32).collect()
}

/// Every text of the fixture, in both modes; failures are reported together.
fn check_fixture(tokenizer: &Tokenizer, fixture: &str) {
    let mut failures = Vec::new();
    let fixture = json(fixture);
    let cases = fixture["cases"].as_array().expect("cases");
    assert!(cases.len() >= 80, "the fixture lost its cases");
    for case in cases {
        let text = case["text"].as_str().expect("text");
        for (mode, special) in [("plain", false), ("special", true)] {
            let want = ids(&case[mode]);
            let got = tokenizer.encode(text, special, special).expect("every text encodes");
            if got != want {
                let show =
                    |ids: &[u32]| ids.iter().filter_map(|&i| tokenizer.token_text(i)).collect::<Vec<_>>();
                let clip: String = text.chars().take(60).collect();
                failures.push(format!("{mode} {clip:?}\n   got {:?}\n  want {:?}", show(&got), show(&want)));
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {} differ:\n{}",
        failures.len(),
        cases.len() * 2,
        failures.join("\n")
    );
}

fn check_oracle(tokenizer: &Tokenizer, oracle: &str) {
    let oracle = json(oracle);
    for prompt in oracle["prompts"].as_array().expect("prompts") {
        let text = prompt["prompt"].as_str().expect("a prompt");
        assert_eq!(tokenizer.encode(text, true, false).unwrap(), ids(&prompt["prompt_ids"]), "{text:?}");
    }
    let text = oracle["text"].as_str().expect("a text");
    let want = ids(&oracle["text_ids"]);
    assert_eq!(tokenizer.encode(text, true, false).unwrap(), want);
    assert_eq!(tokenizer.decode(&want, true), text);
}

#[test]
fn smollm2_tokens_equal_the_reference() {
    let Some((_, tokenizer)) = smollm2() else { return };
    check_fixture(&tokenizer, "fixtures/tokenizer_smollm2.json");
    check_oracle(&tokenizer, "oracles/smollm2_q4_1.json");
}

#[test]
fn gemma3_tokens_equal_the_reference() {
    let Some((_, tokenizer)) = gemma3() else { return };
    check_fixture(&tokenizer, "fixtures/tokenizer_gemma3.json");
    check_oracle(&tokenizer, "oracles/gemma3_270m.json");
}

#[test]
fn roles_of_tokens_come_from_the_metadata() {
    if let Some((_, t)) = smollm2() {
        assert_eq!((t.vocab_size(), t.kind()), (49152, "byte-level BPE"));
        assert_eq!((t.bos(), t.eos()), (Some(1), Some(2)));
        assert!(t.is_eog(2) && t.is_eog(0) && !t.is_eog(1), "<|im_end|> and <|endoftext|> end generation");
        assert!(t.is_special(1) && !t.is_special(504));
        assert_eq!(t.token_text(504).as_deref(), Some("The"));
        assert_eq!(t.token_bytes(3575), b" capital");
        assert_eq!(t.token_text(49152), None);
        assert_eq!(t.token_bytes(49152), b"");
    }
    if let Some((_, t)) = gemma3() {
        assert_eq!((t.vocab_size(), t.kind()), (262144, "SentencePiece"));
        assert_eq!((t.bos(), t.eos()), (Some(2), Some(1)));
        assert!(t.is_eog(1) && t.is_eog(t.token_id("<end_of_turn>").unwrap()) && !t.is_eog(2));
        let html = t.token_id("</s>").expect("Gemma has HTML tags as tokens");
        assert!(!t.is_eog(html) && !t.is_special(html), "</s> is struck-through text here");
        assert!(!t.adds_space_prefix());
        assert_eq!(t.token_bytes(t.token_id("<0x0A>").unwrap()), b"\n");
        assert_eq!(t.token_bytes(5279), b" capital");
    }
}

#[test]
fn smollm2s_own_chat_template_gives_its_prompt() {
    let Some((gguf, tokenizer)) = smollm2() else { return };
    let source = gguf.metadata["tokenizer.chat_template"].as_str().expect("a template");
    let messages = [Message::new("user", "Why is the sky blue?")];
    let want = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
                <|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n";
    let got =
        ChatTemplate::new(source).unwrap().render(&messages, true, "<|im_start|>", "<|im_end|>").unwrap();
    assert_eq!(got, want);
    let ids = tokenizer.encode(&got, true, true).unwrap();
    assert_eq!((ids[0], *ids.last().unwrap()), (1, 198));
    assert_eq!(tokenizer.decode(&ids, false), want);
    assert!(!tokenizer.decode(&ids, true).contains("<|im_start|>"));
    let fallback = ChatTemplate::fallback(&tokenizer).expect("SmolLM2 has ChatML's tokens");
    assert_eq!(
        ChatTemplate::new(fallback).unwrap().render(&messages, true, "", "").unwrap(),
        want[want.find("<|im_start|>user").unwrap()..]
    );
}

#[test]
fn llama_cpps_own_vocabularies_tokenize_as_it_says() {
    let Some(folder) = std::env::var_os("TANDEM_TEST_VOCABS") else {
        println!("skipped: TANDEM_TEST_VOCABS names no folder with ggml-vocab-*.gguf");
        return;
    };
    let mut failures = Vec::new();
    let mut checked = 0;
    for entry in std::fs::read_dir(&folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let (Ok(inputs), Ok(outputs)) = (
            std::fs::read_to_string(path.with_file_name(format!("{name}.inp"))),
            std::fs::read_to_string(path.with_file_name(format!("{name}.out"))),
        ) else {
            continue;
        };
        let gguf = Gguf::open(&path).expect("a vocabulary that opens");
        let tokenizer = match Tokenizer::from_gguf(&gguf.metadata) {
            Ok(tokenizer) => tokenizer,
            Err(e) => {
                println!("skipped: {name}: {e}");
                continue;
            }
        };
        checked += 1;
        for (text, want) in inputs.split("\n__ggml_vocab_test__\n").zip(outputs.lines()) {
            let want: Vec<u32> = want.split_whitespace().map(|id| id.parse().expect("an id")).collect();
            let got = tokenizer.encode(text, false, false).unwrap();
            if got != want {
                failures.push(format!("{name} {text:?}\n   got {got:?}\n  want {want:?}"));
            }
        }
    }
    assert!(checked > 0, "no vocabulary in {folder:?}");
    println!("{checked} vocabularies checked");
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}

/// Text of everything that tokenisers trip over.
fn wild_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        any::<String>(),
        "[ \t\r\n]{1,12}",
        "[a-zA-Z']{1,8}",
        "[0-9]{1,6}",
        prop::sample::select(vec![
            "<|im_start|>",
            "<|im_",
            "<bos>",
            "▁",
            "Ġ",
            "<0x41>",
            "é",
            "e\u{301}",
            "中文",
            "👨‍👩‍👧"
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(part, 0..12).prop_map(|p| p.concat())
}

/// Encoding then decoding gives the text back, whatever it is.
#[test]
fn round_trips() {
    if let Some((_, tokenizer)) = gemma3() {
        proptest!(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() }, |(text in wild_text())| {
            // U+2581 is how this vocabulary writes a space: it cannot come back as itself.
            let text = text.replace('\u{2581}', " ");
            let ids = tokenizer.encode(&text, false, false).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, false), text.clone());
            let ids = tokenizer.encode(&text, false, true).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, false), text);
        });
    }
    if let Some((_, tokenizer)) = smollm2() {
        // A few bytes were never seen in its training and have no token: they are dropped.
        let known = |c: &char| {
            let text = c.to_string();
            tokenizer.decode(&tokenizer.encode(&text, false, false).unwrap(), false) == text
        };
        assert!(('\t'..='\u{2fff}').filter(|c| !known(c)).count() < 64, "all but a few characters survive");
        proptest!(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() }, |(text in wild_text())| {
            let text: String = text.chars().filter(known).collect();
            let ids = tokenizer.encode(&text, false, true).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, false), text);
        });
    }
}

/// Prints how long loading takes; a first token within 150 ms leaves the tokenizer little of it.
#[test]
fn loading_stays_within_its_share_of_the_start() {
    type Open = fn() -> Option<(Gguf, Tokenizer)>;
    // Generous: shared machines; the point is to notice a return to seconds.
    for (open, name, limit_ms) in [(smollm2 as Open, "SmolLM2", 300.0), (gemma3 as Open, "Gemma 3", 900.0)] {
        let Some((gguf, _)) = open() else { continue };
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let start = std::time::Instant::now();
            let tokenizer = Tokenizer::from_gguf(&gguf.metadata).unwrap();
            let load = start.elapsed().as_secs_f64() * 1e3;
            let ids = tokenizer.encode("Why is the sky blue?", true, true).unwrap();
            assert!(ids.len() > 4);
            let first = start.elapsed().as_secs_f64() * 1e3;
            println!("{name}: load {load:.1} ms, first text encoded after {first:.1} ms");
            best = best.min(first);
        }
        assert!(best < limit_ms, "{name}: {best} ms");
    }
}
