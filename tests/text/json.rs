//! `tokenizer.json`: the same vocabulary through the `tokenizers` crate gives the same tokens as
//! through our own tables, which makes each an oracle of the other.

use std::path::{Path, PathBuf};

use tandem::Error;
use tandem::model::formats::gguf::{Gguf, Metadata};
use tandem::text::Tokenizer;

fn metadata(names: &[&str]) -> Option<Metadata> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = std::env::var_os("TANDEM_TEST_MODELS").map_or(root.join("models"), PathBuf::from);
    let Some(path) = names.iter().map(|n| folder.join(n)).find(|p| p.exists()) else {
        println!("skipped: none of {names:?} in {}", folder.display());
        return None;
    };
    Some(Gguf::open(&path).expect("a model file that opens").metadata)
}

/// SmolLM2's `tokenizer.json`, from the parts that its GGUF has.
fn smollm2_json(metadata: &Metadata) -> serde_json::Value {
    let array = |key: &str| metadata[&format!("tokenizer.ggml.{key}")].as_array().unwrap();
    let strings = |key| -> Vec<String> {
        array(key).strings().unwrap().map(|s| String::from_utf8(s.to_vec()).unwrap()).collect()
    };
    let (tokens, merges) = (strings("tokens"), strings("merges"));
    let types: Vec<i64> = array("token_type").ints().unwrap().collect();
    let vocab: serde_json::Map<_, _> = tokens.iter().zip(0..).map(|(t, id)| (t.clone(), id.into())).collect();
    let added: Vec<_> = (0..tokens.len())
        .filter(|&id| types[id] == 3)
        .map(|id| {
            serde_json::json!({"id": id, "content": tokens[id], "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    serde_json::json!({
        "version": "1.0", "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": null, "added_tokens": added, "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges},
    })
}

#[test]
fn both_roads_give_the_same_tokens() {
    let Some(metadata) = metadata(&["SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2.gguf"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, smollm2_json(&metadata).to_string()).unwrap();
    let config =
        r#"{"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "unk_token": null}"#;
    let theirs = Tokenizer::from_json_file(&path, Some(config)).unwrap();
    let ours = Tokenizer::from_gguf(&metadata).unwrap();

    assert_eq!(theirs.kind(), "tokenizer.json");
    assert_eq!((theirs.bos(), theirs.eos()), (ours.bos(), ours.eos()));
    assert_eq!(theirs.vocab_size(), ours.vocab_size());
    for id in (0..ours.vocab_size() as u32 + 2).step_by(7) {
        assert_eq!(theirs.token_bytes(id), ours.token_bytes(id), "bytes of {id}");
        assert_eq!(theirs.token_text(id), ours.token_text(id), "text of {id}");
        assert_eq!(
            (theirs.is_special(id), theirs.is_eog(id)),
            (ours.is_special(id), ours.is_eog(id)),
            "{id}"
        );
    }
    let fixture = include_str!("../fixtures/tokenizer_smollm2.json");
    let fixture: serde_json::Value = serde_json::from_str(fixture).unwrap();
    for case in fixture["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        for special in [false, true] {
            let ids = theirs.encode(text, special, special).unwrap();
            assert_eq!(ids, ours.encode(text, special, special).unwrap(), "{text:?} special {special}");
            assert_eq!(theirs.decode(&ids, true), ours.decode(&ids, true));
        }
    }
}

#[test]
fn sentencepiece_spelling_is_recognised() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [
            {"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "vocab": {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "▁": 3, "a": 4, "▁a": 5}, "merges": ["▁ a"]},
    });
    std::fs::write(&path, json.to_string()).unwrap();
    let t = Tokenizer::from_json_file(&path, Some(r#"{"bos_token": "<s>"}"#)).unwrap();
    let ids = t.encode("a a\n", true, false).unwrap();
    assert_eq!(ids, [1, 5, 5, 2]);
    assert_eq!(t.decode(&ids, true), "a a\n", "the prefix space goes, the others stay");
    assert_eq!((t.token_bytes(2), t.token_bytes(5)), (b"\n".to_vec(), b" a".to_vec()));
    assert!(t.adds_space_prefix());
}

#[test]
fn bad_files_are_typed_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    assert!(matches!(Tokenizer::from_json_file(&path, None), Err(Error::Io { .. })), "a missing file");
    for bad in
        ["", "{}", "[1]", "{\"model\": {\"type\": \"BPE\", \"vocab\": {}, \"merges\": [\"a b\"]}}", "\u{0}"]
    {
        std::fs::write(&path, bad).unwrap();
        let error = Tokenizer::from_json_file(&path, None).expect_err(bad);
        assert!(
            matches!(&error, Error::Format { what, .. } if what.contains("tokenizer.json")),
            "{bad}: {error}"
        );
    }
}
