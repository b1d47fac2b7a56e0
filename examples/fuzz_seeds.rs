//! Writes starting points for the fuzzer into fuzz/corpus/<target>/ (git-ignored: they are made, not kept). An example of the main
//! package, so that it is built with the tests and not with all dependencies once more.

use std::fs;
use std::path::Path;

use tandem::model::{export_gguf, export_hf_folder, export_split_gguf, load, synth};
use tandem::tensor::DType;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for target in ["gguf", "gguf_split", "safetensors", "config"] {
        fs::create_dir_all(corpus.join(target))?;
    }
    for name in synth::names() {
        let spec =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("specs").join(name).with_added_extension("json");
        fs::copy(spec, corpus.join("config").join(name))?;
    }
    let names = [
        "tiny-llama",
        "tiny-qwen2",
        "tiny-qwen3",
        "tiny-gemma2",
        "tiny-gemma3",
        "tiny-olmo2",
        "tiny-qwen2-moe",
    ];
    for name in names {
        let model = load(&format!("synth:{name},dtype=q4_0,layers=1"))?;
        let bytes = export_gguf(&model)?;
        fs::write(corpus.join("gguf").join(name), &bytes)?;
        // The header alone is where the fuzzer can do most.
        fs::write(corpus.join("gguf").join(format!("{name}-header")), &bytes[..bytes.len().min(4096)])?;
        let dir = std::env::temp_dir().join(format!("tandem-seed-{}-{name}", std::process::id()));
        export_hf_folder(&model, &dir, DType::BF16, 1)?;
        let st = fs::read(dir.join("model.safetensors"))?;
        fs::write(corpus.join("safetensors").join(name), &st[..st.len().min(8192)])?;
        export_split_gguf(&model, &dir, "m", 3)?;
        let parts = (1..=3).map(|i| fs::read(dir.join(format!("m-{i:05}-of-00003.gguf"))));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let lengths = [&parts[0], &parts[1]].map(|part| (part.len() as u32).to_le_bytes());
        fs::write(corpus.join("gguf_split").join(name), [lengths.concat(), parts.concat()].concat())?;
        fs::remove_dir_all(&dir)?;
    }
    let good = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]}}"#;
    let mut small = (good.len() as u64).to_le_bytes().to_vec();
    small.extend_from_slice(good);
    small.extend_from_slice(&[0; 12]);
    fs::write(corpus.join("safetensors").join("small"), small)?;
    changes(&corpus.join("tokenizer_json"))?;
    templates(&corpus.join("chat_template"))?;
    hardware(&corpus.join("hardware"))?;
    trace(&corpus.join("trace"))?;
    prompts(&corpus.join("prompts"))
}

/// Choices that the target makes of a tokenizer and of its changes.
fn changes(corpus: &Path) -> Result<(), Box<dyn std::error::Error>> {
    fs::create_dir_all(corpus)?;
    for kind in 0u8..24 {
        let choices: Vec<u8> = (0..64u8).flat_map(|i| [i.wrapping_mul(kind.wrapping_add(37)), 0]).collect();
        fs::write(corpus.join(format!("kind-{kind}")), [&[kind, 0][..], &choices].concat())?;
    }
    Ok(())
}

/// All descriptions of machines.
fn hardware(corpus: &Path) -> Result<(), Box<dyn std::error::Error>> {
    fs::create_dir_all(corpus)?;
    for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("hardware"))? {
        let file = file?;
        fs::copy(file.path(), corpus.join(file.file_name()))?;
    }
    Ok(())
}

/// A trace with times of each kind, and one without.
fn trace(corpus: &Path) -> Result<(), Box<dyn std::error::Error>> {
    fs::create_dir_all(corpus)?;
    for (name, text) in [
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,5,9\n",
        ),
        (
            "zone",
            "\u{feff}arrived_at,num_prefill_tokens,num_decode_tokens\r\n2024-05-10T00:00:00.009930+00:00,12.0,3\r\n",
        ),
        ("seconds", "arrival_time,input_tokens,output_tokens\n0.5,10,2\n-1,3,3\nnan,1,1\n1e9,4,4\n"),
        ("plain", "\"prompt_tokens\",x,completion_tokens\n7,\"a,\"\"b\"\"\",9\n0,,1\n3\n"),
    ] {
        fs::write(corpus.join(name), text)?;
    }
    Ok(())
}

/// Lines of every kind.
fn prompts(corpus: &Path) -> Result<(), Box<dyn std::error::Error>> {
    fs::create_dir_all(corpus)?;
    let all = [
        r#"{"id":"a","prompt":"hi","max_tokens":7,"temperature":0,"top_p":0.5,"top_k":-1,"min_p":0.1,"seed":3,"stop":"x","model":"m","n":1,"user":null}"#,
        r#"{"prompt":[3,5],"raw":true,"stop":["a","b"],"repetition_penalty":1.1,"stream":false}"#,
        r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"h"}]}]}"#,
        r#"{"custom_id":1,"method":"POST","url":"/v1/completions","body":{"prompt":"x","max_completion_tokens":9}}"#,
        r#"{"prompt":"\ud83d\ude00\u0000","temprature":1}"#,
    ];
    for (i, line) in all.iter().enumerate() {
        fs::write(corpus.join(i.to_string()), format!("{line}\n"))?;
    }
    fs::write(corpus.join("all"), format!("\u{feff}{}\r\n\n[]", all.join("\n")))?;
    Ok(())
}

/// The templates of the tests, and ones that double a value with every turn: the fuzzer takes it from there.
fn templates(corpus: &Path) -> Result<(), Box<dyn std::error::Error>> {
    fs::create_dir_all(corpus)?;
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat_templates.json");
    let fixture: serde_json::Value = serde_json::from_slice(&fs::read(fixture)?)?;
    for template in fixture["templates"].as_array().ok_or("no templates")? {
        let text = |key: &str| template[key].as_str().ok_or("no text");
        fs::write(corpus.join(text("name")?.replace('/', "-")), text("source")?)?;
    }
    for (i, (init, step)) in [
        ("'ab'", "ns.s ~ ns.s"),
        ("'ab'", "ns.s * 2"),
        ("'ab'", "ns.s | replace('a', 'aa')"),
        ("'ab'", "'%s%s' | format(ns.s, ns.s)"),
        ("['a']", "(ns.s + ns.s) | list"),
        ("['a']", "[ns.s, ns.s] | tojson"),
    ]
    .iter()
    .enumerate()
    {
        let source = format!(
            "{{% set ns = namespace(s={init}) %}}{{% for i in range(9) %}}{{% set ns.s = {step} %}}{{% endfor %}}{{{{ ns.s }}}}"
        );
        fs::write(corpus.join(format!("doubling-{i}")), source)?;
    }
    Ok(())
}
