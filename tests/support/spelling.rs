//! A tokenizer whose tokens are bytes, for models of random weights: answers of any form can be spelled with it.

use std::sync::Arc;

use serde_json::json;
use tandem::text::Tokenizer;

/// The token that ends a turn.
pub const END: u32 = 256;
/// Other control tokens, from 257 on; the first of them begins and ends turns.
pub const CONTROL: [&str; 4] = ["<|turn|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"];

/// Harmony's control tokens behind `<|end|>`, from 257 on.
pub const HARMONY: [&str; 6] =
    ["<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"];

/// Tokens 0 to 255 are bytes, 256 is `<|end|>`, then come those of [`CONTROL`].
pub fn tokenizer() -> Arc<Tokenizer> {
    opened(&with_control(&CONTROL))
}

/// The same with those of [`HARMONY`]: `<|end|>` does not end an answer then.
pub fn harmony() -> Arc<Tokenizer> {
    opened(&harmony_json())
}

/// The `tokenizer.json` of [`harmony`].
pub fn harmony_json() -> serde_json::Value {
    with_control(&HARMONY)
}

fn opened(tokenizer: &serde_json::Value) -> Arc<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    Arc::new(Tokenizer::from_json_file(&path, None).unwrap())
}

fn with_control(others: &[&'static str]) -> serde_json::Value {
    // GPT-2's alphabet: see src/text/tokenizer/bytelevel.rs.
    let mut next = 0x100;
    let mut letter = |byte: u32| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from_u32(byte).unwrap(),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap()
        }
    };
    let vocab: serde_json::Map<_, _> = (0..256).map(|byte| (letter(byte).to_string(), json!(byte))).collect();
    let control = std::iter::once("<|end|>").chain(others.iter().copied());
    let added = (256..).zip(control).map(|(id, content)| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [] },
    })
}
