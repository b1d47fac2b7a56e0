//! Unigram vocabularies beside sentencepiece's ids (`tests/fixtures/make_unigram.py`).

use serde_json::Value as Json;
use tandem::model::formats::gguf::{Metadata, Value};
use tandem::text::Tokenizer;

fn list<T>(value: &Json, of: impl Fn(&Json) -> Option<T>) -> Vec<T> {
    value.as_array().expect("a list").iter().map(|v| of(v).expect("an item")).collect()
}

fn texts(value: &Json) -> Vec<String> {
    list(value, |v| v.as_str().map(str::to_owned))
}

fn metadata(vocabulary: &Json) -> Metadata {
    let mut m = Metadata::new();
    let mut put = |k: &str, v| m.insert(format!("tokenizer.ggml.{k}"), v);
    put("model", Value::String("llama".into()));
    put("tokens", Value::strings(&texts(&vocabulary["tokens"])));
    put("token_type", Value::ints(&list(&vocabulary["types"], Json::as_i64)));
    put("scores", Value::floats(&list(&vocabulary["scores"], |v| v.as_f64().map(|f| f as f32))));
    for key in ["add_space_prefix", "remove_extra_whitespaces"] {
        put(key, Value::Bool(vocabulary[key].as_bool().expect("a flag")));
    }
    m
}

fn vocabularies() -> Vec<Json> {
    let fixture: Json = serde_json::from_str(include_str!("../fixtures/unigram.json")).unwrap();
    fixture["vocabularies"].as_array().unwrap().clone()
}

#[test]
fn texts_become_the_tokens_of_sentencepiece() {
    let mut wrong = Vec::new();
    for vocabulary in vocabularies() {
        let t = Tokenizer::from_gguf(&metadata(&vocabulary)).unwrap();
        assert_eq!(t.kind(), "SentencePiece (unigram)");
        for case in vocabulary["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let want = list(&case["ids"], |v| v.as_u64().map(|id| id as u32));
            let got = t.encode(text, false, false).unwrap();
            if got != want {
                wrong.push(format!("{} {text:?}: {got:?}, sentencepiece: {want:?}", vocabulary["name"]));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn t5_ends_its_texts_and_refuses_what_it_would_have_to_normalise() {
    let mut m = metadata(&vocabularies()[0]);
    let mut put = |k: &str, v| m.insert(format!("tokenizer.ggml.{k}"), v);
    put("model", Value::String("t5".into()));
    put("unknown_token_id", Value::Uint(0));
    put("eos_token_id", Value::Uint(2));
    put("precompiled_charsmap", Value::ints(&[]));
    let t = Tokenizer::from_gguf(&m).unwrap();
    let plain = t.encode("the cat", false, true).unwrap();
    assert_eq!(t.encode("the cat", true, true).unwrap(), [&plain[..], &[2]].concat());

    m.insert("tokenizer.ggml.precompiled_charsmap".into(), Value::ints(&[1, 2]));
    let error = Tokenizer::from_gguf(&m).unwrap_err().to_string();
    assert!(error.contains("tokenizer.ggml.precompiled_charsmap"), "{error}");
}

#[test]
fn a_long_text_takes_linear_time() {
    let t = Tokenizer::from_gguf(&metadata(&vocabularies()[0])).unwrap();
    let text = "thethethe cat☃".repeat(20_000);
    let ids = t.encode(&text, false, false).unwrap();
    assert_eq!(t.decode(&ids, false).matches("the").count(), 60_000);
}
