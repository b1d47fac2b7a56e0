//! Tokenizer metadata of any content: a tokenizer that works or one error; no panic, no excess.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use tandem::model::formats::gguf::{Metadata, Value};
use tandem::text::{StreamDecoder, Tokenizer};

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    sentencepiece: bool,
    pre: u8,
    tokens: Vec<String>,
    whole_alphabet: bool,
    merges: Vec<String>,
    merge_ids: Vec<(u8, u8)>,
    scores: Vec<f32>,
    types: Option<Vec<i8>>,
    ids: Vec<(u8, u32)>,
    flags: Vec<(u8, bool)>,
    text: &'a str,
    decode: Vec<u32>,
}

const PRE: [&str; 9] =
    ["gpt-2", "smollm", "llama-bpe", "qwen2", "falcon", "default", "deepseek-llm", "gpt-4o", "nonsense"];
const IDS: [&str; 5] = ["bos", "eos", "eot", "eom", "unknown"];
const FLAGS: [&str; 3] = ["add_bos_token", "add_eos_token", "add_space_prefix"];

fuzz_target!(|input: Input| {
    let mut tokens = input.tokens;
    if input.whole_alphabet {
        // Single characters first, so that merges and texts have something to work on.
        tokens.splice(0..0, ('!'..='~').chain(['Ġ', 'Ċ', '\u{2581}']).map(String::from));
    }
    let mut merges = input.merges;
    for (a, b) in input.merge_ids {
        if let (Some(a), Some(b)) = (tokens.get(a as usize).cloned(), tokens.get(b as usize).cloned()) {
            merges.push(format!("{a} {b}"));
            tokens.push(format!("{a}{b}"));
        }
    }
    let mut scores = input.scores;
    scores.resize(tokens.len(), 0.0);
    let mut metadata = Metadata::new();
    let mut put = |key: &str, value| metadata.insert(format!("tokenizer.ggml.{key}"), value);
    put("model", Value::String(if input.sentencepiece { "llama" } else { "gpt2" }.into()));
    put("pre", Value::String(PRE[input.pre as usize % PRE.len()].into()));
    if let Some(types) = input.types {
        put("token_type", Value::ints(&types.iter().map(|&t| t as i64).collect::<Vec<_>>()));
    }
    put("tokens", Value::strings(&tokens));
    put("merges", Value::strings(&merges));
    put("scores", Value::floats(&scores));
    for (which, id) in input.ids {
        put(&format!("{}_token_id", IDS[which as usize % IDS.len()]), Value::Uint(id as u64));
    }
    for (which, flag) in input.flags {
        put(FLAGS[which as usize % FLAGS.len()], Value::Bool(flag));
    }
    let Ok(tokenizer) = Tokenizer::from_gguf(&metadata) else { return };
    for (special, parse) in [(false, false), (true, true)] {
        if let Ok(ids) = tokenizer.encode(input.text, special, parse) {
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
            let _ = tokenizer.decode(&ids, true);
        }
    }
    let _ = tokenizer.decode(&input.decode, false);
    let mut stream = StreamDecoder::new(["stop"]);
    for &id in &input.decode {
        let _ = (stream.push(&tokenizer.token_bytes(id)), tokenizer.token_text(id), tokenizer.is_special(id));
    }
    let _ = stream.finish();
});
