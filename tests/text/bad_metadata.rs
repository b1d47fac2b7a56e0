//! Tokenizer metadata that is missing, contradictory or hostile: one typed error that names the key.

use proptest::prelude::*;
use tandem::Error;
use tandem::model::formats::gguf::{Metadata, Value};
use tandem::text::Tokenizer;

fn strings(list: &[&str]) -> Value {
    Value::strings(list)
}

fn set(m: &mut Metadata, key: &str, value: Value) {
    m.insert(format!("tokenizer.ggml.{key}"), value);
}

/// A small byte-level vocabulary that works.
fn bpe() -> Metadata {
    let mut m = Metadata::new();
    let mut put = |k: &str, v| m.insert(format!("tokenizer.ggml.{k}"), v);
    put("model", Value::String("gpt2".into()));
    put("pre", Value::String("gpt-2".into()));
    put("tokens", strings(&["<|endoftext|>", "a", "b", "c", "Ġ", "ab", "abc", "Ġab", "<tool>"]));
    put("token_type", Value::ints(&[3, 1, 1, 1, 1, 1, 1, 1, 4]));
    put("merges", strings(&["a b", "ab c", "Ġ ab"]));
    put("eos_token_id", Value::Uint(0));
    m
}

/// A small SentencePiece vocabulary that works.
fn spm() -> Metadata {
    let mut m = Metadata::new();
    let mut put = |k: &str, v| m.insert(format!("tokenizer.ggml.{k}"), v);
    put("model", Value::String("llama".into()));
    put("tokens", strings(&["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁ab", "ba"]));
    put("token_type", Value::ints(&[2, 3, 3, 6, 1, 1, 1, 1, 1, 1]));
    put("scores", Value::floats(&[0.0, 0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -2.0, -1.0, -2.0]));
    m
}

#[test]
fn the_small_vocabularies_work() {
    let t = Tokenizer::from_gguf(&bpe()).unwrap();
    assert_eq!(t.encode("abcab ab", true, true).unwrap(), [6, 5, 7]);
    assert_eq!(t.encode("a<|endoftext|><tool>b", false, true).unwrap(), [1, 0, 8, 2]);
    // Added text is matched in any text, control tokens are not; `<`, `|`, e... have no token here.
    assert_eq!(t.encode("a<tool>b", false, false).unwrap(), [1, 8, 2]);
    assert!(!t.encode("<|endoftext|>", false, false).unwrap().contains(&0));
    assert_eq!(t.decode(&[6, 0, 7, 99], true), "abc ab");
    assert_eq!(t.decode(&[6, 0], false), "abc<|endoftext|>");
    assert!(t.is_eog(0) && !t.is_eog(1));

    let t = Tokenizer::from_gguf(&spm()).unwrap();
    assert_eq!(t.encode("ab", true, true).unwrap(), [1, 8], "bos, then the space prefix");
    // `ab` and `ba` score alike: the left pair wins.
    assert_eq!(t.encode("aba", false, false).unwrap(), [8, 5]);
    assert_eq!(t.encode("\nz", false, false).unwrap(), [4, 3, 0], "a byte token, then unknown");
    assert_eq!(t.decode(&[1, 8, 8], true), "ab ab", "one leading space goes");
    assert_eq!(t.token_bytes(3), b"\n");
    assert_eq!(t.encode("", true, true).unwrap(), [1]);
}

#[test]
fn each_defect_is_named() {
    type Break = fn(&mut Metadata);
    fn unset(m: &mut Metadata, key: &str) {
        m.remove(&format!("tokenizer.ggml.{key}")).expect("a key to remove");
    }
    let cases: [(bool, &str, Break); 26] = [
        (true, "tokenizer.ggml.merges", |m| unset(m, "merges")),
        (true, "tokenizer.ggml.merges", |m| set(m, "merges", strings(&[]))),
        (true, "merge 0", |m| set(m, "merges", strings(&["ab"]))),
        (true, "merge 0", |m| set(m, "merges", strings(&[""]))),
        (true, "merge 1", |m| set(m, "merges", strings(&["a b", "a x"]))),
        (true, "no token", |m| set(m, "merges", strings(&["b a"]))),
        (true, "tokenizer.ggml.merges", |m| set(m, "merges", Value::Bool(true))),
        (true, "tokenizer.ggml.tokens", |m| unset(m, "tokens")),
        (true, "no tokens", |m| {
            set(m, "tokens", strings(&[]));
            set(m, "token_type", Value::ints(&[]));
        }),
        (true, "tokens 1 and 2", |m| {
            set(m, "tokens", strings(&["x", "a", "a", "c", "Ġ", "ab", "abc", "Ġab", "t"]));
        }),
        (true, "tokenizer.ggml.tokens", |m| set(m, "tokens", Value::ints(&[1, 2]))),
        (true, "tokenizer.ggml.token_type", |m| set(m, "token_type", Value::ints(&[1; 8]))),
        (true, "token 3", |m| set(m, "token_type", Value::ints(&[1, 1, 1, 77, 1, 1, 1, 1, 1]))),
        (true, "tokenizer.ggml.eos_token_id", |m| set(m, "eos_token_id", Value::Uint(9))),
        (true, "tokenizer.ggml.eos_token_id", |m| set(m, "eos_token_id", Value::Int(-7))),
        (true, "tokenizer.ggml.bos_token_id", |m| set(m, "bos_token_id", Value::Uint(u64::MAX))),
        (true, "tokenizer.ggml.bos_token_id", |m| set(m, "add_bos_token", Value::Bool(true))),
        (true, "tokenizer.ggml.add_bos_token", |m| set(m, "add_bos_token", Value::Uint(1))),
        (true, "tokenizer.ggml.model", |m| unset(m, "model")),
        (true, "\"bert\"", |m| set(m, "model", Value::String("bert".into()))),
        (true, "my-pre", |m| set(m, "pre", Value::String("my-pre".into()))),
        (true, "token 0 is", |m| {
            set(m, "tokens", Value::strings(&["x".repeat(100_000)]));
            set(m, "token_type", Value::ints(&[1]));
        }),
        (false, "tokenizer.ggml.scores", |m| unset(m, "scores")),
        (false, "2 scores for 10", |m| set(m, "scores", Value::floats(&[0.0, 0.0]))),
        (false, "token 4", |m| {
            let mut scores = vec![0.0; 10];
            scores[4] = f32::NAN;
            set(m, "scores", Value::floats(&scores));
        }),
        (false, "tokenizer.ggml.scores", |m| set(m, "scores", strings(&["x"]))),
    ];
    for (byte_level, expected, damage) in cases {
        let mut metadata = if byte_level { bpe() } else { spm() };
        damage(&mut metadata);
        match Tokenizer::from_gguf(&metadata) {
            Ok(_) => panic!("{expected}: accepted"),
            Err(e @ (Error::Format { .. } | Error::Unsupported(_))) => {
                let message = e.to_string();
                assert!(message.contains(expected), "{expected}: {message}");
                assert!(!message.contains('\n') && message.len() < 300, "{message}");
            }
            Err(e) => panic!("{expected}: another kind of error: {e:?}"),
        }
    }
}

#[test]
fn an_unencodable_byte_without_an_unknown_token_is_an_error() {
    let mut m = spm();
    m.insert("tokenizer.ggml.unknown_token_id".into(), Value::Int(-1));
    let t = Tokenizer::from_gguf(&m).unwrap();
    let error = t.encode("z", false, false).unwrap_err().to_string();
    assert!(error.contains("\"z\"") && error.contains("byte"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    /// Any vocabulary over a few characters either fails to load or encodes any text to valid ids.
    #[test]
    fn any_small_vocabulary_is_refused_or_works(
        tokens in prop::collection::vec("[ab▁Ġ<>]{0,3}", 0..12),
        merges in prop::collection::vec("[ab▁Ġ]{0,2} ?[ab▁Ġ]{0,2}", 0..6),
        scores in prop::collection::vec(prop::num::f32::ANY, 0..12),
        types in prop::collection::vec(0i64..8, 0..12),
        sentencepiece in any::<bool>(),
        text in "[ab <>é\n]{0,20}",
        ids in prop::collection::vec(any::<u32>(), 0..8),
    ) {
        let n = tokens.len();
        let mut m = Metadata::new();
        let mut put = |k: &str, v| m.insert(format!("tokenizer.ggml.{k}"), v);
        put("model", Value::String(if sentencepiece { "llama" } else { "gpt2" }.into()));
        put("pre", Value::String("smollm".into()));
        put("tokens", Value::strings(&tokens));
        put("merges", Value::strings(&merges));
        put("scores", Value::floats(&scores.into_iter().chain(std::iter::repeat(0.5)).take(n).collect::<Vec<_>>()));
        put("token_type", Value::ints(&types.into_iter().chain(std::iter::repeat(1)).take(n).collect::<Vec<_>>()));
        put("add_bos_token", Value::Bool(false));
        if let Ok(t) = Tokenizer::from_gguf(&m) {
            for parse in [false, true] {
                if let Ok(out) = t.encode(&text, false, parse) {
                    prop_assert!(out.iter().all(|&id| (id as usize) < n));
                    t.decode(&out, parse);
                }
            }
            t.decode(&ids, false);
        }
    }
}

/// Descriptions in Latin-1 and vocabularies of bytes occur in real files.
#[test]
fn tokens_may_be_any_bytes() {
    let tokens: [&[u8]; 11] = [
        b"<unk>",
        b"<s>",
        b"</s>",
        b"\xe4",
        b"\xb8",
        b"\xad",
        "▁".as_bytes(),
        b"a",
        b"caf\xe9",
        b"\xc3",
        b"\xa9",
    ];
    let mut m = spm();
    set(&mut m, "tokens", Value::strings(&tokens));
    set(&mut m, "token_type", Value::ints(&[2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1]));
    set(&mut m, "scores", Value::floats(&[0.0, 0.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]));
    m.insert("general.description".into(), Value::Bytes(b"caf\xe9".to_vec()));
    let t = Tokenizer::from_gguf(&m).unwrap();
    let ids = t.encode("中é", false, false).unwrap();
    assert_eq!(ids, [6, 3, 4, 5, 9, 10], "characters without a token, by the tokens of their bytes");
    assert_eq!(t.decode(&ids, false), "中é");
    assert_eq!((t.token_bytes(8), t.token_bytes(3)), (b"caf\xe9".to_vec(), vec![0xe4]));
    let mut m = bpe();
    set(
        &mut m,
        "tokens",
        Value::strings(&[
            &b"<|endoftext|>"[..],
            b"a",
            b"b",
            b"c",
            "Ġ".as_bytes(),
            b"ab",
            b"abc",
            "Ġab".as_bytes(),
            b"\xff\xfe",
        ]),
    );
    let t = Tokenizer::from_gguf(&m).unwrap();
    assert_eq!((t.encode("ab", false, false).unwrap(), t.token_bytes(8)), (vec![5], b"\xff\xfe".to_vec()));
}
