//! A tokenizer.json with any structure: a tokenizer that works or one sentence; no panic, no excess of time or memory.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use tandem::text::Tokenizer;

#[path = "../../tests/support/mutate_json.rs"]
mod mutate_json;

/// A small tokenizer of each kind that released models have.
static KINDS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let all: Value =
        serde_json::from_str(include_str!("../../tests/fixtures/tokenizers.json")).expect("a fixture");
    all["cases"].as_array().expect("cases").iter().map(|case| case["tokenizer"].clone()).collect()
});

/// Components of all kinds, and some that are known to be dangerous.
static PARTS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let dangerous = r#"[
        {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "y"},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Prepend", "prepend": ""}, {"type": "NFKD"}, {"type": "Nmt"}, {"type": "Lowercase"}, {"type": "StripAccents"},
        {"type": "Strip", "strip_left": true, "strip_right": true}, {"type": "BertNormalizer", "clean_text": true,
         "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        {"type": "FixedLength", "length": 0}, {"type": "Whitespace"}, {"type": "WhitespaceSplit"}, {"type": "BertPreTokenizer"},
        {"type": "UnicodeScripts"}, {"type": "CharDelimiterSplit", "delimiter": "a"}, {"type": "Digits", "individual_digits": true},
        {"type": "Punctuation", "behavior": "Contiguous"}, {"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always"},
        {"type": "Split", "pattern": {"Regex": "(.*)*x"}, "behavior": "Isolated", "invert": false},
        {"type": "Split", "pattern": {"Regex": "(?<=a)b(?!c)"}, "behavior": "Removed", "invert": true},
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [], "special_tokens": {}},
        {"type": "BertProcessing", "sep": ["x", 1], "cls": ["y", 2]},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": true}, {"type": "BPEDecoder", "suffix": ""},
        {"type": "Strip", "content": " ", "start": 1000000000000, "stop": 1000000000000}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "WordPiece", "prefix": "", "cleanup": true},
        {"type": "Sequence", "normalizers": []}, {"type": "Sequence", "pretokenizers": []}, {"type": "Sequence", "decoders": []}
    ]"#;
    serde_json::from_str(dangerous).expect("JSON")
});

static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    // In memory where the system has such a place.
    let shared = PathBuf::from("/dev/shm");
    let folder = if shared.is_dir() { shared } else { std::env::temp_dir() };
    folder.join(format!("tandem-fuzz-{}-tokenizer.json", std::process::id()))
});

const TEXTS: [&str; 3] = [
    "Hello wörld 123 <s> the a b\n\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "中文 \u{1f680}\u{301} ▁a",
];

fuzz_target!(|data: &[u8]| {
    let mut at = 0;
    let mut draw = |n: usize| {
        let pair = [data.get(at).copied().unwrap_or(0), data.get(at + 1).copied().unwrap_or(0)];
        at += 2;
        usize::from(u16::from_le_bytes(pair)) % n
    };
    let mut file = KINDS[draw(KINDS.len())].clone();
    mutate_json::mutate(&mut file, &KINDS, &PARTS, &mut draw);
    std::fs::write(&*FILE, file.to_string()).expect("a place to write to");
    match Tokenizer::from_json_file(&FILE, None) {
        Err(e) => assert_eq!(e.to_string().lines().count(), 1, "{e}"),
        Ok(tokenizer) => {
            for text in TEXTS {
                for (special, parse) in [(true, true), (false, false)] {
                    if let Ok(ids) = tokenizer.encode(text, special, parse) {
                        let _ = tokenizer.decode(&ids, true);
                        ids.iter()
                            .for_each(|&id| drop((tokenizer.token_bytes(id), tokenizer.token_text(id))));
                    }
                }
            }
            let _ = (tokenizer.token_bytes(u32::MAX), tokenizer.is_special(0), tokenizer.vocab_size());
        }
    }
});
