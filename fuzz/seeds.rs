//! Writes starting points for the fuzzer into fuzz/corpus/<target>/ (git-ignored: they are made, not kept).

use std::fs;
use std::path::Path;

use tandem::model::{export, load, synth};
use tandem::tensor::DType;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for target in ["gguf", "safetensors", "config"] {
        fs::create_dir_all(corpus.join(target))?;
    }
    for name in synth::names() {
        let spec = Path::new(env!("CARGO_MANIFEST_DIR")).join("../specs").join(name).with_added_extension("json");
        fs::copy(spec, corpus.join("config").join(name))?;
    }
    for name in ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-gemma3"] {
        let model = load(&format!("synth:{name},dtype=q4_0,layers=1"))?;
        let bytes = export::to_gguf(&model)?;
        fs::write(corpus.join("gguf").join(name), &bytes)?;
        // The header alone is where the fuzzer can do most.
        fs::write(corpus.join("gguf").join(format!("{name}-header")), &bytes[..bytes.len().min(4096)])?;
        let dir = std::env::temp_dir().join(format!("tandem-seed-{}-{name}", std::process::id()));
        export::to_hf_folder(&model, &dir, DType::BF16, 1)?;
        let st = fs::read(dir.join("model.safetensors"))?;
        fs::write(corpus.join("safetensors").join(name), &st[..st.len().min(8192)])?;
        fs::remove_dir_all(&dir)?;
    }
    let good = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]}}"#;
    let mut small = (good.len() as u64).to_le_bytes().to_vec();
    small.extend_from_slice(good);
    small.extend_from_slice(&[0; 12]);
    fs::write(corpus.join("safetensors").join("small"), small)?;
    templates(&corpus.join("chat_template"))
}

/// The templates of the tests, and ones that double a value with every turn: the fuzzer takes it from there.
fn templates(corpus: &Path) -> Result<(), Box<dyn std::error::Error>> {
    fs::create_dir_all(corpus)?;
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/chat_templates.json");
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
