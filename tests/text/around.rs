//! Tokens around a text: once in front, none around what a template rendered, by the flags where they count.

use serde_json::{Value as Json, json};
use tandem::model::formats::gguf::{Metadata, Value};
use tandem::text::Tokenizer;

/// `<s>` is 2, `</s>` is 3.
fn folder(post_processor: Json, config: Json) -> Result<Tokenizer, String> {
    let token = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": post_processor,
        "added_tokens": [token(2, "<s>"), token(3, "</s>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"a": 0, "Ġ": 1}, "merges": []},
    });
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, file.to_string()).unwrap();
    Tokenizer::from_json_file(&path, Some(&config.to_string())).map_err(|e| e.to_string())
}

fn both() -> Json {
    let special = |id: u32, text: &str| json!({"id": text, "ids": [id], "tokens": [text]});
    json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": special(2, "<s>"), "</s>": special(3, "</s>")}})
}

fn byte_level() -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true})
}

fn config(class: &str, bos: Option<bool>, eos: Option<bool>) -> Json {
    let mut config = json!({"tokenizer_class": class, "bos_token": "<s>", "eos_token": "</s>"});
    for (key, flag) in [("add_bos_token", bos), ("add_eos_token", eos)] {
        if let Some(flag) = flag {
            config[key] = flag.into();
        }
    }
    config
}

/// What transformers 5.24.0 gives by `apply_chat_template(tokenize=True)`: what the template rendered, and nothing else.
#[test]
fn a_rendered_chat_of_a_folder_gets_nothing() {
    for (post_processor, class, flag) in
        [(both(), "PreTrainedTokenizerFast", None), (byte_level(), "LlamaTokenizerFast", Some(true))]
    {
        let t = folder(post_processor, config(class, flag, flag)).unwrap();
        assert_eq!(t.encode_chat("a").unwrap(), [0]);
        assert_eq!(t.encode_chat("<s>a").unwrap(), [2, 0]);
        assert_eq!(t.encode_chat(" <s>a</s>").unwrap(), [1, 2, 0, 3]);
        assert_eq!((t.encode_prompt("a").unwrap(), t.beginning()), (vec![2, 0, 3], &[2][..]));
        assert_eq!(t.encode_prompt("<s>a").unwrap(), [2, 0, 3], "one beginning");
        assert_eq!(t.encode_prompt(" <s>a").unwrap(), [1, 2, 0, 3], "one beginning behind white space");
        // As `tokenizer(text)`, whatever the text is.
        assert_eq!(t.encode("<s>a", true, true).unwrap(), [2, 2, 0, 3]);
    }
}

#[test]
fn flags_count_for_classes_that_have_them() {
    let around = |post_processor: Json, class: &str, bos, eos| {
        folder(post_processor, config(class, bos, eos)).unwrap().encode("a", true, true).unwrap()
    };
    let (yes, no) = (Some(true), Some(false));
    // DeepSeek-R1-Distill's folders.
    assert_eq!(around(byte_level(), "LlamaTokenizerFast", yes, no), [2, 0]);
    for class in ["LlamaTokenizer", "GemmaTokenizerFast", "CodeLlamaTokenizerFast", "CohereTokenizerFast"] {
        assert_eq!(around(byte_level(), class, yes, yes), [2, 0, 3], "{class}");
        assert_eq!(around(both(), class, no, no), [0], "{class}");
        assert_eq!(around(both(), class, None, None), [2, 0, 3], "{class}");
        assert_eq!(around(both(), class, yes, None), [2, 0, 3], "{class}");
        assert_eq!(around(Json::Null, class, None, yes), [0, 3], "{class}");
    }
    for class in ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", ""] {
        assert_eq!(around(byte_level(), class, yes, yes), [0], "{class}");
        assert_eq!(around(both(), class, no, no), [2, 0, 3], "{class}");
    }
    let mut odd = config("LlamaTokenizerFast", None, None);
    odd["add_bos_token"] = "yes".into();
    let error = folder(byte_level(), odd).map(|_| ()).unwrap_err();
    assert!(error.contains("tokenizer_config.json: add_bos_token: \"yes\", wanted true or false"), "{error}");
}

/// llama.cpp's rule for its files, but for a second beginning behind white space.
#[test]
fn a_rendered_chat_of_a_gguf_file_begins_once_and_does_not_end() {
    let mut m = Metadata::new();
    let mut put = |k: &str, v| m.insert(format!("tokenizer.ggml.{k}"), v);
    put("model", Value::String("gpt2".into()));
    put("pre", Value::String("gpt-2".into()));
    put("tokens", Value::strings(&["a", "Ġ", "<s>", "</s>", "Ġa"]));
    put("token_type", Value::ints(&[1, 1, 3, 3, 1]));
    put("merges", Value::strings(&["Ġ a"]));
    put("bos_token_id", Value::Uint(2));
    put("eos_token_id", Value::Uint(3));
    put("add_bos_token", Value::Bool(true));
    put("add_eos_token", Value::Bool(true));
    let t = Tokenizer::from_gguf(&m).unwrap();
    assert_eq!(t.encode_chat("a").unwrap(), [2, 0]);
    assert_eq!(t.encode_chat("<s>a").unwrap(), [2, 0]);
    assert_eq!(t.encode_chat(" <s>a").unwrap(), [1, 2, 0]);
    assert_eq!(t.encode_prompt("a").unwrap(), [2, 0, 3]);
    assert_eq!(t.encode_prompt(" <s>a").unwrap(), [1, 2, 0, 3]);
    m.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(false));
    let t = Tokenizer::from_gguf(&m).unwrap();
    assert_eq!((t.encode_chat("a").unwrap(), t.beginning()), (vec![0], &[][..]));
}
